"""Variations of a trace: arrival scale, seeded permutations, deadlines, errors, stragglers, failures.

All are drawn from a seed and from nothing else, so that policies are compared on the same luck.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.cluster import Cluster
from arena_jax.scheduler.jobs import JobSpec, Workload
from arena_jax.scheduler.simulator import NodeEvent

_DAY_S = 86400.0


def scale_arrivals(jobs: Sequence[JobSpec], scale: float) -> list[JobSpec]:
    """Divide the time since the first arrival by ``scale``; a deadline keeps its distance from its arrival."""
    if not 0 < scale < float("inf"):
        raise UsageError(f"the arrival scale must be positive, got {scale!r}")
    first = min((job.arrival_s for job in jobs), default=0.0)
    return [_moved(job, first + (job.arrival_s - first) / scale) for job in jobs]


def permuted(jobs: Sequence[JobSpec], seed: int) -> list[JobSpec]:
    """Seed 0 is the trace; seed k permutes what was submitted over the arrival times.

    Ids stay with their arrival times.
    """
    if seed == 0:
        return list(jobs)
    order = np.random.default_rng(seed).permutation(len(jobs))
    return [_moved(replace(jobs[i], id=job.id), job.arrival_s) for job, i in zip(jobs, order, strict=True)]


def _moved(job: JobSpec, arrival_s: float) -> JobSpec:
    deadline = None if job.deadline_s is None else job.deadline_s - job.arrival_s + arrival_s
    return replace(job, arrival_s=arrival_s, deadline_s=deadline)


def with_deadlines(
    workload: Workload, seed: int, *, share: float = 0.3, slack: tuple[float, float] = (1.5, 4.0)
) -> list[JobSpec]:
    """Give ``share`` of the jobs a deadline of arrival + U(slack) x isolated time, the rest none."""
    rng = np.random.default_rng([seed, 1])
    chosen = rng.random(len(workload.jobs)) < share
    factor = rng.uniform(*slack, size=len(workload.jobs))
    times = workload.isolated_s
    return [
        replace(job, deadline_s=job.arrival_s + factor[i] * times[i] if chosen[i] else None)
        for i, job in enumerate(workload.jobs)
    ]


def estimate_errors(workload: Workload, seed: int, sigma: float) -> np.ndarray:
    """Predicted over true step time, jobs x columns: log-normal with median 1, drawn per (profile, column).

    Jobs that share a profile share its errors, as they would share its plan index.
    """
    num_kinds = int(workload.kind.max(initial=-1)) + 1
    drawn = np.random.default_rng([seed, 2]).normal(0.0, sigma, size=(num_kinds, len(workload.columns)))
    return np.exp(drawn)[workload.kind]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """``share`` of all runs (one stretch of a job on one allocation) take ``factor`` times as long a step."""

    seed: int
    share: float = 0.05
    factor: float = 1.5

    def __call__(self, job: int, run: int) -> float:
        drawn = np.random.default_rng([self.seed, 3, job, run]).random()
        return self.factor if drawn < self.share else 1.0


def node_failures(
    cluster: Cluster, seed: int, *, per_day: float, start_s: float, length_s: float, repair_s: float = 3600.0
) -> list[NodeEvent]:
    """Failures at ``per_day`` expected per node and day (Poisson), each repaired after ``repair_s``."""
    rng = np.random.default_rng([seed, 4])
    events = []
    for group in cluster.groups:
        for node in range(group.num_nodes):
            at = start_s
            while per_day > 0:
                at += rng.exponential(_DAY_S / per_day)
                if at > start_s + length_s:
                    break
                events.append(NodeEvent(time_s=at, device_type=group.device_type, node=node, kind="fail"))
                at += repair_s
                events.append(NodeEvent(time_s=at, device_type=group.device_type, node=node, kind="up"))
    return sorted(events, key=lambda e: e.time_s)
