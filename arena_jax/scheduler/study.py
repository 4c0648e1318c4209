"""Many simulations: policies x seeds x clusters, in parallel processes, each reproducible alone."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from arena_jax.errors import UsageError
from arena_jax.scheduler.cluster import Cluster
from arena_jax.scheduler.costs import RestartCosts
from arena_jax.scheduler.jobs import JobSpec, Workload
from arena_jax.scheduler.policies import Arena, make_policy
from arena_jax.scheduler.policy import Policy
from arena_jax.scheduler.profiles import ProfileSet
from arena_jax.scheduler.seeds import (
    Stragglers,
    estimate_errors,
    node_failures,
    permuted,
    scale_arrivals,
    with_deadlines,
)
from arena_jax.scheduler.simulator import NodeEvent, Result, Settings, Simulator


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything of a simulation but the policy.

    Attributes:
        arrival_scale: divides the time since the first arrival.
        error: sigma of the log-normal error on every estimate; ``learn`` makes a running job's step
            time known after its first step.
        failures_per_day: expected failures per node and day, each repaired after an hour.
        node_events: failures, drains and repairs to replay, in seconds after the first arrival.
        straggler_share: share of runs that are 1.5 times as slow.
        deadlines: give 30 % of the jobs a deadline.
        objective: of the ``arena`` policy.
        round_s: seconds between decisions; ``None`` takes the policy's own form.
        failure_length_s: failures are drawn for so long after the first arrival.
    """

    jobs: tuple[JobSpec, ...] = field(repr=False)
    cluster: Cluster
    profiles: ProfileSet = field(repr=False)
    costs: RestartCosts = field(default_factory=RestartCosts)
    arrival_scale: float = 1.0
    seed: int = 0
    error: float = 0.0
    learn: bool = False
    failures_per_day: float = 0.0
    node_events: tuple[NodeEvent, ...] = ()
    failure_length_s: float = 5e5
    straggler_share: float = 0.0
    deadlines: bool = False
    objective: str = "time"
    round_s: float | None = None
    quantise: bool = False
    horizon_s: float | None = None

    def __post_init__(self) -> None:
        for name, value, most in (
            ("seed", self.seed, math.inf),
            ("the error of estimates", self.error, 10.0),
            ("failures per node and day", self.failures_per_day, 1e4),
            ("the share of stragglers", self.straggler_share, 1.0),
        ):
            if not 0 <= value <= most:
                raise UsageError(
                    f"{name} must be at least 0{f' and at most {most:g}' * (most < math.inf)}, got {value!r}"
                )

    def workload(self) -> Workload:
        """The jobs of this seed and scale, with their step times."""
        jobs = scale_arrivals(permuted(self.jobs, self.seed), self.arrival_scale)
        built = Workload.build(jobs, self.cluster, self.profiles)
        if self.deadlines:
            built = replace(built, jobs=tuple(with_deadlines(built, self.seed)))
        return built

    def settings(self, workload: Workload, round_s: float) -> Settings:
        """Simulator settings with this scenario's luck."""
        start = float(workload.arrival_s.min())
        events = [replace(event, time_s=start + event.time_s) for event in self.node_events]
        if self.failures_per_day:
            events += node_failures(
                self.cluster,
                self.seed,
                per_day=self.failures_per_day,
                start_s=start,
                length_s=self.failure_length_s,
            )
        return Settings(
            costs=self.costs,
            round_s=round_s if self.round_s is None else self.round_s,
            quantise=self.quantise,
            horizon_s=self.horizon_s,
            estimates=estimate_errors(workload, self.seed, self.error) if self.error else None,
            learn=self.learn,
            straggle=Stragglers(seed=self.seed, share=self.straggler_share) if self.straggler_share else None,
            node_events=events,
            save_every_s=600.0 if events else 0.0,
        )

    def policy(self, name: str) -> tuple[Policy, float]:
        """The policy by name, with this scenario's objective."""
        if self.objective != "time" and name == "arena":
            return Arena(objective=self.objective), 0.0
        return make_policy(name)


def simulate(scenario: Scenario, policy: str, progress: Callable[[int, int], None] | None = None) -> Result:
    """Run one policy, by name, on one scenario."""
    workload = scenario.workload()
    made, round_s = scenario.policy(policy)
    result = Simulator(workload, made, scenario.settings(workload, round_s)).run(progress)
    result.policy = policy
    return result


def simulate_all(cases: Sequence[tuple[Scenario, str]], *, workers: int = 0) -> Iterator[tuple[int, Result]]:
    """Yield (position, result) as simulations end; in this process with one worker or one case."""
    if workers < 0:
        raise UsageError(f"the number of workers must be at least 0, got {workers}")
    workers = min(workers or os.cpu_count() or 1, len(cases))
    if workers <= 1:
        for i, (scenario, policy) in enumerate(cases):
            yield i, simulate(scenario, policy)
        return
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(simulate, scenario, policy): i for i, (scenario, policy) in enumerate(cases)}
        for future in as_completed(futures):
            yield futures[future], future.result()
