"""One decision: the service's jobs as a policy of the simulator sees them, and its answer as places.

The same ``View``, ``Jobs`` and ``Placer`` as in the simulator. What the policy decided before is where a job
is, whether its processes have got there yet or not; how far they are is a charge that has not ended.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arena_jax.grid import Allocation
from arena_jax.scheduler import (
    Cluster,
    Jobs,
    JobSpec,
    Policy,
    Profile,
    ProfileSet,
    RestartCosts,
    TableProfile,
    View,
    Workload,
)
from arena_jax.scheduler.costs import CAUSES, MIGRATE, cause_of
from arena_jax.scheduler.placement import Placed, Placer
from arena_jax.service.job import Job, Phase, Place

# Of each job that changes, so many of its best allocations are kept with the decision.
_MOST_CONSIDERED = 8
# A charge that has run out while the change is not confirmed goes on for so long at a time.
_STILL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A job that is to run elsewhere, begin, or wait.

    Attributes:
        cause: as in the simulator; ``pause`` for waiting.
        charge_s: what going there is thought to cost.
        gain_s: seconds by which it is thought to end earlier, the charge counted; ``None`` for a job that waited.
        considered: its best allocations with the seconds it would still take there.
    """

    job: Job
    place: Place | None
    cause: str
    charge_s: float = 0.0
    gain_s: float | None = None
    considered: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the decision log."""
        desired = self.job.desired
        return {
            "job": self.job.id,
            "cause": self.cause,
            "from": None if desired is None else str(desired.allocation),
            "to": None if self.place is None else str(self.place.allocation),
            "gain_s": self.gain_s,
            "charge_s": self.charge_s,
            "considered": [list(pair) for pair in self.considered],
        }


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What came of asking the policy. ``wake_at`` is on the service's clock."""

    changes: tuple[Change, ...] = ()
    wake_at: float | None = None
    rejected: tuple[Job, ...] = ()
    took_s: float = 0.0
    num_jobs: int = 0


@dataclass
class Decider:
    """Asks a policy. ``epoch`` is the service's first second: policies count from there."""

    cluster: Cluster
    policy: Policy
    epoch: float
    down: set[tuple[str, int]] = field(default_factory=set)

    def decide(
        self,
        jobs: Sequence[Job],
        step_times: Mapping[str, Mapping[Allocation, float]],
        now: float,
        costs: RestartCosts,
        factors: Mapping[str, float],
    ) -> Decided:
        """Where each job should run.

        Args:
            jobs: all that have not ended and have an index.
            step_times: seconds of a step by allocation, by ``plan_key``.
            factors: by what a queue's shares multiply its jobs' weights.
        """
        began = time.perf_counter()
        # These are left alone, and their devices are not there for the policy.
        fixed = [job for job in jobs if _is_fixed(job) or _is_ending(job, step_times[job.plan_key], costs)]
        left_alone = {job.number for job in fixed}
        free: list[Job] = []
        idle: list[Job] = []
        for job in jobs:
            if job.number not in left_alone:
                can = self._may_run(job, now) and self.options(job, step_times[job.plan_key])
                (free if can else idle).append(job)
        changes = [Change(job=job, place=None, cause="pause") for job in idle if job.desired is not None]
        placer = self._placer([*fixed, *free])
        placer.fixed = left_alone
        if not free:
            return Decided(changes=tuple(changes), took_s=time.perf_counter() - began)
        workload = self._workload(free, step_times, factors)
        by_id = {job.id: job for job in free}
        ordered = [by_id[spec.id] for spec in workload.jobs]
        view = View(self.cluster, workload.columns, placer.capacity() - self._taken(fixed))
        seen = self._jobs(ordered, workload, now, costs)
        decision = self.policy.decide(view, seen, now - self.epoch)
        changes += self._place(ordered, workload, seen, decision.column, placer, costs)
        wake = decision.wake_s
        return Decided(
            changes=tuple(changes),
            wake_at=None if wake is None else wake + self.epoch,
            rejected=tuple(ordered[i] for i in decision.rejected),
            took_s=time.perf_counter() - began,
            num_jobs=len(ordered),
        )

    def _may_run(self, job: Job, now: float) -> bool:
        return not job.cancelled and job.pin != "pause" and job.not_before <= now

    def options(self, job: Job, step_times: Mapping[Allocation, float]) -> list[Allocation]:
        """The allocations a job may get in this cluster."""
        spec, types = job.spec, {self.cluster.catalogue.canonical(name) for name in job.spec.types}
        groups = {group.device_type: group for group in self.cluster.groups}
        return [
            a
            for a in step_times
            if a.device_type in groups
            and a.num_nodes <= groups[a.device_type].num_nodes
            and a.devices_per_node <= groups[a.device_type].devices_per_node
            and spec.min_devices <= a.num_devices <= (spec.max_devices or a.num_devices)
            and (not types or a.device_type in types)
            and (job.pin in ("", "pause") or str(a) == job.pin)
        ]

    def _placer(self, jobs: Sequence[Job]) -> Placer:
        placer = Placer(self.cluster)
        for name, node in self.down:
            placer.set_up(self.cluster.types.index(name), node, False)
        for job in jobs:
            if job.desired is not None:
                placer.take(job.number, self._placed(job.desired))
        return placer

    def _placed(self, place: Place) -> Placed:
        allocation = place.allocation
        return Placed(self.cluster.types.index(allocation.device_type), place.nodes, allocation.devices_per_node)

    def _taken(self, fixed: Sequence[Job]) -> np.ndarray:
        taken = np.zeros(len(self.cluster.types), dtype=np.int64)
        for job in fixed:
            assert job.desired is not None
            allocation = job.desired.allocation
            up = [node for node in job.desired.nodes if (allocation.device_type, node) not in self.down]
            taken[self.cluster.types.index(allocation.device_type)] += len(up) * allocation.devices_per_node
        return taken

    def _workload(
        self,
        jobs: Sequence[Job],
        step_times: Mapping[str, Mapping[Allocation, float]],
        factors: Mapping[str, float],
    ) -> Workload:
        specs: list[JobSpec] = []
        profiles: dict[tuple[str, int | None], Profile] = {}
        for job in jobs:
            spec = job.spec
            request = Allocation.parse(spec.on, self.cluster.catalogue) if spec.on else None
            profiles[job.plan_key, None] = TableProfile(step_times[job.plan_key])
            specs.append(
                JobSpec(
                    id=job.id,
                    arrival_s=max(0.0, job.submitted_at - self.epoch),
                    num_steps=spec.steps,
                    model=job.plan_key,
                    device_type=None if request is None else request.device_type,
                    num_devices=None if request is None else request.num_devices,
                    weight=spec.priority * factors.get(spec.queue, 1.0),
                    deadline_s=None if spec.deadline_s is None else job.submitted_at + spec.deadline_s - self.epoch,
                    min_devices=spec.min_devices,
                    max_devices=spec.max_devices,
                    allowed_types=spec.types,
                )
            )
        workload = Workload.build(specs, self.cluster, ProfileSet(profiles))
        by_id = {job.id: job for job in jobs}
        for row, built in enumerate(workload.jobs):
            pin = by_id[built.id].pin
            if pin:
                column = workload.columns.index(Allocation.parse(pin, None))
                workload.step_s[row, np.arange(len(workload.columns)) != column] = np.inf
                workload.request[row] = column
        return workload

    def _jobs(self, ordered: Sequence[Job], workload: Workload, now: float, costs: RestartCosts) -> Jobs:
        columns = workload.columns
        column = [-1 if job.desired is None else columns.index(job.desired.allocation) for job in ordered]
        until = [job.charge_until if job.settled else max(job.charge_until, now + _STILL_S) for job in ordered]

        def since(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=float) - self.epoch

        running = np.array(column) >= 0
        return Jobs(
            key=np.array([job.number for job in ordered], dtype=np.int64),
            step_s=workload.step_s,
            remaining_steps=np.array([max(1.0, float(job.spec.steps - job.step)) for job in ordered]),
            num_steps=workload.num_steps,
            arrival_s=workload.arrival_s,
            column=np.array(column, dtype=np.int64),
            request=workload.request,
            since_s=np.where(running, since([job.since for job in ordered]), now - self.epoch),
            charge_until_s=since(until),
            started=np.array([job.started for job in ordered], dtype=bool),
            num_restarts=np.array([job.num_changes for job in ordered], dtype=np.int64),
            run_s=np.array([job.run_s for job in ordered]),
            device_s=np.array([job.device_s for job in ordered]),
            weight=np.array([job.weight for job in workload.jobs]),
            deadline_s=np.array([math.inf if j.deadline_s is None else j.deadline_s for j in workload.jobs]),
            batch=np.array([float(job.spec.global_batch or 1) for job in ordered]),
            restart_s=costs.by_cause(),
        )

    def _place(
        self,
        ordered: Sequence[Job],
        workload: Workload,
        seen: Jobs,
        chosen: np.ndarray,
        placer: Placer,
        costs: RestartCosts,
    ) -> list[Change]:
        """Give the policy's columns nodes, and say what that changes, as the simulator does."""
        allocations = workload.columns.allocations
        by_number = {job.number: (i, job) for i, job in enumerate(ordered)}
        changed = [int(i) for i in np.flatnonzero(chosen != seen.column)]
        changes: dict[int, Change] = {}
        wanted: dict[int, Allocation] = {}
        for i in changed:
            job = ordered[i]
            if seen.column[i] >= 0 or job.desired is not None:
                placer.release(job.number)
            if chosen[i] >= 0:
                wanted[job.number] = allocations[chosen[i]]
            else:
                changes[job.number] = Change(job=job, place=None, cause="pause")
        for number in list(wanted):  # a resized job stays on its nodes where it can
            self._stay(by_number[number][1], wanted, placer)
        migrated, unplaced = placer.place(wanted)
        for number in unplaced:
            job = by_number[number][1]
            if job.desired is not None:
                changes[number] = Change(job=job, place=None, cause="pause")
        for number, placed in placer.held.items():
            if number not in by_number:
                continue
            i, job = by_number[number]
            c = int(chosen[i])
            place = Place(allocations[c], placed.nodes)
            if place == job.desired:
                continue
            cause = CAUSES[MIGRATE]
            if number not in migrated:
                columns = workload.columns
                kind = cause_of(
                    int(seen.column[i]),
                    c,
                    columns.type_of,
                    columns.num_devices,
                    started=job.started,
                    failed=job.crashes > 0,
                )
                cause = CAUSES[kind]
            changes[number] = self._described(job, place, cause, seen, i, workload, costs)
        return [changes[number] for number in sorted(changes)]

    def _stay(self, job: Job, wanted: dict[int, Allocation], placer: Placer) -> None:
        old, new = job.desired, wanted[job.number]
        if old is None or old.allocation.device_type != new.device_type or len(old.nodes) < new.num_nodes:
            return
        kind = self.cluster.types.index(new.device_type)
        nodes = [node for node in old.nodes if placer.free(kind, node) >= new.devices_per_node][: new.num_nodes]
        if len(nodes) == new.num_nodes:
            placer.take(job.number, Placed(kind, tuple(nodes), new.devices_per_node))
            del wanted[job.number]

    def _described(
        self, job: Job, place: Place, cause: str, seen: Jobs, i: int, workload: Workload, costs: RestartCosts
    ) -> Change:
        remaining = seen.remaining_s[i]
        old, new = int(seen.column[i]), workload.columns.index(place.allocation)
        charge_s = float(getattr(costs, cause))
        gain_s = None if old < 0 else float(remaining[old] - remaining[new] - charge_s)
        best = np.argsort(remaining, kind="stable")[:_MOST_CONSIDERED]
        return Change(
            job=job,
            place=place,
            cause=cause,
            charge_s=charge_s,
            gain_s=None if gain_s is None or not math.isfinite(gain_s) else gain_s,
            considered=tuple(
                (str(workload.columns.allocations[c]), float(remaining[c])) for c in best if np.isfinite(remaining[c])
            ),
        )


def _is_fixed(job: Job) -> bool:
    """Opaque jobs that have begun, since they cannot be saved, and starts: breaking one off loses all it has cost."""
    if job.desired is None:
        return False
    return job.spec.rigid or (job.phase is Phase.STARTING and not job.pin and not job.cancelled)


def _is_ending(job: Job, step_times: Mapping[Allocation, float], costs: RestartCosts) -> bool:
    """Trainings that end sooner where they are than they would begin again after a pause."""
    if job.phase is not Phase.RUNNING or job.desired is None or job.pin or job.cancelled or not job.settled:
        return False
    step_s = step_times.get(job.desired.allocation, math.inf)
    return (job.spec.steps - job.step) * step_s <= costs.resume


def lost_places(jobs: Sequence[Job], down: set[tuple[str, int]]) -> list[Job]:
    """Jobs that are to run on a node that is not up. Commands stay to their end: they cannot be moved."""
    return [
        job
        for job in jobs
        if job.desired is not None
        and not job.spec.rigid
        and any((job.desired.allocation.device_type, node) in down for node in job.desired.nodes)
        and job.phase is not Phase.PLANNING
    ]
