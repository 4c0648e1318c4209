"""The simulator: event-driven, deterministic, honest about what a policy can know.

Time jumps from event to event: completions, node failures and repairs, arrivals, a policy's own
timer. Everything at one instant is applied before the policy decides once. With rounds, events act
when they happen but decisions wait for the next multiple of the round. The policy sees *estimated*
step times; the clock uses the true ones.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arena_jax.errors import ArenaError, UsageError
from arena_jax.scheduler.costs import CAUSES, MIGRATE, RestartCosts, cause_of
from arena_jax.scheduler.jobs import Workload
from arena_jax.scheduler.placement import Placed, Placer
from arena_jax.scheduler.policy import Decision, Jobs, Policy, View

FUTURE, WAITING, RUNNING, FINISHED, REJECTED = range(5)
_SAME_TIME_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class NodeEvent:
    """A node that goes down (a failure loses progress since the last save; a drain does not) or comes back."""

    time_s: float
    device_type: str
    node: int
    kind: str  # "fail", "drain" or "up"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to simulate.

    Attributes:
        costs: restart charges by cause.
        round_s: 0 for continuous time, else decisions at multiples of it.
        quantise: the artifact's rule: completions take effect at the next round boundary, and times
            are counted from the boundary at or before arrival.
        horizon_s: stop there, seconds after the first arrival; ``None`` runs every job to completion.
        estimates: predicted over true step time, jobs x columns; ``None`` for exact predictions.
        learn: whether a running job's step time on its allocation becomes known to the policy after
            its first step there.
        straggle: true slow-down factor of a run given (job, number of the run); ``None`` for none.
        node_events: failures, drains and repairs.
        save_every_s: time between checkpoints, what a failure can lose; 0 loses nothing.
    """

    costs: RestartCosts = field(default_factory=RestartCosts)
    round_s: float = 0.0
    quantise: bool = False
    horizon_s: float | None = None
    estimates: np.ndarray | None = None
    learn: bool = False
    straggle: Callable[[int, int], float] | None = None
    node_events: Sequence[NodeEvent] = ()
    save_every_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.round_s < math.inf:
            raise UsageError(f"round_s must be at least 0, got {self.round_s!r}")
        if self.horizon_s is not None and not self.horizon_s > 0:
            raise UsageError(f"horizon_s must be above 0, got {self.horizon_s!r}")
        if self.quantise and not self.round_s:
            raise UsageError("quantise needs rounds", hint="give round_s")


@dataclass(frozen=True)
class Segment:
    """One stretch of a job on one allocation. ``charge_s`` seconds at its beginning are the restart."""

    job: int
    start_s: float
    end_s: float
    column: int
    nodes: tuple[int, ...]
    cause: str
    charge_s: float


@dataclass
class Result:
    """What happened. Times are on the trace's clock; NaN where a job did not get there."""

    workload: Workload
    policy: str
    finish_s: np.ndarray
    first_start_s: np.ndarray
    counted_arrival_s: np.ndarray
    num_restarts: np.ndarray
    run_s: np.ndarray
    device_s: np.ndarray
    state: np.ndarray
    segments: list[Segment]
    decision_s: np.ndarray
    num_active: np.ndarray
    end_s: float
    start_charge_s: float
    wall_s: float


class Simulator:
    """One policy on one workload. :meth:`run` to the end, or :meth:`step` event by event."""

    def __init__(self, workload: Workload, policy: Policy, settings: Settings | None = None) -> None:
        self.workload, self.policy, self.settings = workload, policy, settings or Settings()
        num = len(workload.jobs)
        self._arrival = workload.arrival_s
        self._steps = workload.num_steps
        self.estimate = workload.step_s.copy()
        if self.settings.estimates is not None:
            self.estimate *= self.settings.estimates
        self._weight = np.array([job.weight for job in workload.jobs])
        self._deadline = np.array([math.inf if j.deadline_s is None else j.deadline_s for j in workload.jobs])
        self._batch = np.array([float(job.global_batch or 1) for job in workload.jobs])
        self._costs = self.settings.costs.by_cause()
        self.now = float(self._arrival[0]) if num else 0.0
        self.state = np.full(num, FUTURE)
        self.remaining = self._steps.copy()
        self.column = np.full(num, -1, dtype=np.int64)
        self.pace = np.full(num, np.inf)  # true seconds a step, straggling included
        self.since = np.zeros(num)
        self.charge_until = np.zeros(num)
        self.updated = np.zeros(num)
        self.started = np.zeros(num, dtype=bool)
        self.failed = np.zeros(num, dtype=bool)
        self.num_runs = np.zeros(num, dtype=np.int64)
        self.num_restarts = np.zeros(num, dtype=np.int64)
        self.run_s = np.zeros(num)
        self.device_s = np.zeros(num)
        self.finish = np.full(num, np.nan)
        self.first_start = np.full(num, np.nan)
        self.due = np.full(num, np.inf)
        self.cause = np.full(num, -1)
        self.placer = Placer(workload.cluster)
        self._active: list[int] = []
        self._next_arrival = 0
        self._node_events = sorted(self.settings.node_events, key=lambda e: e.time_s)
        self._next_node_event = 0
        self._wake = math.inf
        self._pending = False
        self.segments: list[Segment] = []
        self._decision_s: list[float] = []
        self._num_active: list[int] = []
        policy.reset()

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Simulate to completion or the horizon; raise :class:`ArenaError` when nothing can ever move."""
        began = time.perf_counter()
        done = -1
        while self.step():
            if progress is not None and (finished := int((self.state >= FINISHED).sum())) != done:
                done = finished
                progress(done, len(self.state))
        return self.result(time.perf_counter() - began)

    def step(self) -> bool:
        """Advance to the next instant at which something happens, and decide there; ``False`` at the end."""
        if not self._active and self._next_arrival >= len(self.state):
            return False
        at = self._next_time()
        if self.settings.horizon_s is not None and at > self._arrival[0] + self.settings.horizon_s:
            self._advance(float(self._arrival[0]) + self.settings.horizon_s)
            return False
        if math.isinf(at):
            names = ", ".join(self.workload.jobs[j].id for j in self._active[:5])
            raise ArenaError(
                f"{self.policy.name}: {len(self._active)} jobs wait at {self.now:.0f} s and nothing will ever "
                f"wake the policy ({names})",
                hint="jobs wait on an idle cluster: check their requests against the nodes that are up",
            )
        self._advance(at)
        self._apply_events()
        if not self._active:
            self._pending, self._wake = False, math.inf
        elif (self._pending or self.now >= self._wake - _SAME_TIME_S) and self._on_boundary():
            self._decide()
        return True

    # -- time ------------------------------------------------------------------------------------

    def _next_time(self) -> float:
        event = math.inf
        if self._active:
            event = float(self.due[self._active].min())
        if self._next_arrival < len(self.state):
            event = min(event, float(self._arrival[self._next_arrival]))
        if self._next_node_event < len(self._node_events):
            event = min(event, self._node_events[self._next_node_event].time_s)
        wake = self._wake
        if self.settings.round_s:
            if self._pending:
                wake = min(wake, self._boundary(self.now, strictly=True))
            elif wake < math.inf:
                wake = self._boundary(wake)
        return max(self.now, min(event, wake))

    def _boundary(self, at: float, *, strictly: bool = False) -> float:
        round_s = self.settings.round_s
        number = math.ceil(at / round_s - 1e-9)
        if strictly and number * round_s <= at + _SAME_TIME_S:
            number += 1
        return number * round_s

    def _on_boundary(self) -> bool:
        return not self.settings.round_s or abs(self._boundary(self.now) - self.now) <= _SAME_TIME_S

    def _advance(self, at: float) -> None:
        if self._active:
            active = np.array(self._active)
            running = active[self.column[active] >= 0]
            # Progress is exact to rounding: steps done since the charge ended, at the true pace.
            productive = at - np.maximum(self.updated[running], self.charge_until[running])
            self.remaining[running] -= np.maximum(productive, 0.0) / self.pace[running]
            elapsed = at - self.updated[running]
            self.run_s[running] += elapsed
            self.device_s[running] += elapsed * self.workload.columns.num_devices[self.column[running]]
            self.updated[active] = at
        self.now = at

    # -- events ----------------------------------------------------------------------------------

    def _apply_events(self) -> None:
        if self._active:
            active = np.array(self._active)
            for j in active[self.due[active] <= self.now + _SAME_TIME_S]:
                self._finish(int(j))
        while self._next_node_event < len(self._node_events):
            event = self._node_events[self._next_node_event]
            if event.time_s > self.now + _SAME_TIME_S:
                break
            self._next_node_event += 1
            self._node_event(event)
        while self._next_arrival < len(self.state) and self._arrival[self._next_arrival] <= self.now + _SAME_TIME_S:
            j = self._next_arrival
            self.state[j] = WAITING
            self.updated[j] = self.now
            self._active.append(j)
            self._next_arrival += 1
            self._pending = True

    def _finish(self, j: int) -> None:
        self._close(j)
        self.placer.release(j)
        self.state[j], self.column[j], self.remaining[j] = FINISHED, -1, 0.0
        self.finish[j], self.due[j] = self.now, math.inf
        self._active.remove(j)
        self._pending = True

    def _node_event(self, event: NodeEvent) -> None:
        k = self.workload.columns.types.index(event.device_type)
        for j in self.placer.set_up(k, event.node, event.kind == "up"):
            self._close(j)
            self.placer.release(j)
            if event.kind == "fail" and self.settings.save_every_s:
                productive = max(0.0, self.now - self.charge_until[j])
                lost = productive % self.settings.save_every_s
                self.remaining[j] = min(self.remaining[j] + lost / self.pace[j], self._steps[j])
            self._idle(j)
            self.failed[j] = event.kind == "fail"
        self._pending = True

    def _idle(self, j: int) -> None:
        self.column[j], self.due[j], self.state[j] = -1, math.inf, WAITING

    def _reject(self, j: int) -> None:
        assert self.column[j] < 0, f"{self.policy.name} turns a running job away"
        self.state[j] = REJECTED
        self._active.remove(j)

    def _close(self, j: int) -> None:
        placed = self.placer.held[j]
        charge = min(self.charge_until[j], self.now) - self.since[j]
        self.segments.append(
            Segment(
                j,
                float(self.since[j]),
                self.now,
                int(self.column[j]),
                placed.nodes,
                CAUSES[self.cause[j]],
                float(charge),
            )
        )

    # -- decisions -------------------------------------------------------------------------------

    def jobs_view(self) -> tuple[np.ndarray, Jobs]:
        """Numbers of the active jobs and what the policy sees of them."""
        active = np.array(self._active, dtype=np.int64)
        if self.settings.learn:
            self._learn(active)
        running = self.column[active] >= 0
        return active, Jobs(
            key=active,
            step_s=self.estimate[active],
            remaining_steps=self.remaining[active],
            num_steps=self._steps[active],
            arrival_s=self._arrival[active],
            column=self.column[active],
            request=self.workload.request[active],
            since_s=np.where(running, self.since[active], self.now),
            charge_until_s=self.charge_until[active],
            started=self.started[active],
            num_restarts=self.num_restarts[active],
            run_s=self.run_s[active],
            device_s=self.device_s[active],
            weight=self._weight[active],
            deadline_s=self._deadline[active],
            batch=self._batch[active],
            restart_s=self._costs,
        )

    def _learn(self, active: np.ndarray) -> None:
        running = active[self.column[active] >= 0]
        seen = running[self.now >= self.charge_until[running] + self.pace[running]]
        self.estimate[seen, self.column[seen]] = self.pace[seen]

    def _decide(self) -> None:
        began = time.perf_counter()
        active, jobs = self.jobs_view()
        view = View(self.workload.cluster, self.workload.columns, self.placer.capacity())
        decision = self.policy.decide(view, jobs, self.now)
        self._check(decision, active, view)
        self._apply(active, decision)
        for i in decision.rejected:
            self._reject(int(active[i]))
        self._decision_s.append(time.perf_counter() - began)
        self._num_active.append(len(active))
        self._pending = False
        self._wake = math.inf if decision.wake_s is None else max(decision.wake_s, self.now + _SAME_TIME_S)

    def _check(self, decision: Decision, active: np.ndarray, view: View) -> None:
        chosen = decision.column
        assert len(chosen) == len(active), f"{self.policy.name} answered for {len(chosen)} of {len(active)} jobs"
        held = chosen >= 0
        assert np.isfinite(self.workload.step_s[active[held], chosen[held]]).all(), (
            f"{self.policy.name}: infeasible column"
        )
        used = self.workload.columns.usage(chosen)
        assert (used <= view.capacity).all(), f"{self.policy.name} uses {used} of {view.capacity} devices"

    def _apply(self, active: np.ndarray, decision: Decision) -> None:
        changed = np.flatnonzero(decision.column != self.column[active])
        old = {}
        wanted = {}
        for i in changed:
            j, new = int(active[i]), int(decision.column[i])
            old[j] = int(self.column[j])
            if old[j] >= 0:
                self._close(j)
                self.placer.release(j)
            if new < 0:
                self._idle(j)
            else:
                wanted[j] = new
        if not wanted:
            return
        before = dict(self.placer.held)
        allocations = self.workload.columns.allocations
        migrated, unplaced = self.placer.place({j: allocations[c] for j, c in wanted.items()})
        for j in unplaced:
            wanted.pop(j)
            self._idle(j)
        for j in migrated:
            self._close_at(j, before[j])
            old[j] = wanted[j] = int(self.column[j])
        for j, new in wanted.items():
            self._start(j, old[j], new, migrated=j in migrated)

    def _close_at(self, j: int, placed: Placed) -> None:
        now_held = self.placer.held[j]
        self.placer.held[j] = placed
        self._close(j)
        self.placer.held[j] = now_held

    def _start(self, j: int, old: int, new: int, *, migrated: bool) -> None:
        columns = self.workload.columns
        cause = (
            MIGRATE
            if migrated
            else cause_of(
                old,
                new,
                columns.type_of,
                columns.num_devices,
                started=bool(self.started[j]),
                failed=bool(self.failed[j]),
            )
        )
        slow = 1.0 if self.settings.straggle is None else self.settings.straggle(j, int(self.num_runs[j]))
        self.column[j], self.state[j], self.cause[j] = new, RUNNING, cause
        self.pace[j] = self.workload.step_s[j, new] * slow
        self.since[j] = self.now
        # A change during a charge starts a new one, and never makes the job ready sooner than the old one would.
        ready = self.charge_until[j] if old >= 0 else 0.0
        self.charge_until[j] = max(self.now + self._costs[cause], ready)
        self.due[j] = self.charge_until[j] + self.remaining[j] * self.pace[j]
        if self.settings.quantise:
            self.due[j] = self._boundary(float(self.due[j]))
        self.num_runs[j] += 1
        if self.started[j]:
            self.num_restarts[j] += 1
        else:
            self.first_start[j] = self.now
        self.started[j], self.failed[j] = True, False

    def clock(self) -> dict[str, Any]:
        """Where the simulation stands besides its arrays; see :mod:`arena_jax.scheduler.snapshot`."""
        return {
            "now": self.now,
            "active": list(self._active),
            "next_arrival": self._next_arrival,
            "next_node_event": self._next_node_event,
            "wake": self._wake,
            "pending": self._pending,
            "decision_s": list(self._decision_s),
            "num_active": list(self._num_active),
        }

    def set_clock(self, clock: Mapping[str, Any]) -> None:
        """Take up what :meth:`clock` gave."""
        self.now, self._wake, self._pending = clock["now"], clock["wake"], clock["pending"]
        self._active = list(clock["active"])
        self._next_arrival, self._next_node_event = clock["next_arrival"], clock["next_node_event"]
        self._decision_s, self._num_active = list(clock["decision_s"]), list(clock["num_active"])

    def result(self, wall_s: float = 0.0) -> Result:
        """What happened so far; stretches still running are closed at ``now``."""
        for j in self._active:
            if self.column[j] >= 0 and self.now > self.since[j]:
                self._close(j)
        arrival = self._arrival
        if self.settings.quantise:
            arrival = np.floor(arrival / self.settings.round_s + 1e-9) * self.settings.round_s
        return Result(
            workload=self.workload,
            policy=self.policy.name,
            finish_s=self.finish.copy(),
            first_start_s=self.first_start.copy(),
            counted_arrival_s=arrival,
            num_restarts=self.num_restarts.copy(),
            run_s=self.run_s.copy(),
            device_s=self.device_s.copy(),
            state=self.state.copy(),
            segments=self.segments,
            decision_s=np.array(self._decision_s),
            num_active=np.array(self._num_active),
            end_s=self.now,
            start_charge_s=self.settings.costs.start,
            wall_s=wall_s,
        )
