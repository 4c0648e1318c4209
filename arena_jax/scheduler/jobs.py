"""Jobs as submitted, and the workload of a simulation: jobs x allocations as arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arena_jax.errors import UsageError, counted
from arena_jax.scheduler.cluster import Cluster, Columns
from arena_jax.scheduler.profiles import ProfileSource

# Past these a float of seconds no longer resolves a microsecond, or the work left loses single steps.
_LATEST_S = 4e9
_MOST_STEPS = 1e12


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job as it was submitted.

    Attributes:
        id: unique name.
        arrival_s: seconds on the trace's clock.
        num_steps: training steps.
        model: key into the profiles, with ``global_batch``.
        global_batch: samples a step.
        device_type: the type it asked for, ``None`` for no preference.
        num_devices: the count it asked for, ``None`` for no preference.
        weight: how much a second of its completion time counts; 1 is ordinary.
        deadline_s: on the trace's clock, ``None`` for none.
        min_devices, max_devices: bounds on its elasticity.
        allowed_types: the only types it may run on; empty for all.
        elastic: ``False`` pins it to the count it asked for.
    """

    id: str
    arrival_s: float
    num_steps: float
    model: str
    global_batch: int | None = None
    device_type: str | None = None
    num_devices: int | None = None
    weight: float = 1.0
    deadline_s: float | None = None
    min_devices: int = 1
    max_devices: int | None = None
    allowed_types: tuple[str, ...] = ()
    elastic: bool = True

    def __post_init__(self) -> None:
        def refuse(what: str, value: object) -> None:
            raise UsageError(f"job {self.id!r}: {what}, got {value!r}")

        if not 0 <= self.arrival_s <= _LATEST_S:
            refuse(f"arrival must be a time of at least 0 and at most {_LATEST_S:g} s", self.arrival_s)
        if not 0 < self.num_steps <= _MOST_STEPS:
            refuse(f"the number of steps must be positive and at most {_MOST_STEPS:g}", self.num_steps)
        if not math.isfinite(self.weight) or self.weight <= 0:
            refuse("weight must be positive", self.weight)
        if self.deadline_s is not None and (math.isnan(self.deadline_s) or self.deadline_s < self.arrival_s):
            refuse("deadline must not lie before the arrival", self.deadline_s)
        if self.num_devices is not None and self.num_devices < 1:
            refuse("the requested number of devices must be at least 1", self.num_devices)
        if self.min_devices < 1 or (self.max_devices is not None and self.max_devices < self.min_devices):
            refuse("min_devices must be at least 1 and at most max_devices", (self.min_devices, self.max_devices))


@dataclass(frozen=True)
class Workload:
    """Jobs in arrival order with their step times over the columns of a cluster.

    Attributes:
        jobs: by (arrival, position in the trace).
        step_s: seconds of a step, jobs x columns; infinite where infeasible or not allowed.
        request: the column a rigid policy runs the job on: what it asked for, else the nearest feasible.
        kind: rows with the same number share a profile (for errors drawn per model).
    """

    cluster: Cluster
    columns: Columns
    jobs: tuple[JobSpec, ...]
    step_s: np.ndarray
    request: np.ndarray
    kind: np.ndarray = field(repr=False)

    @property
    def arrival_s(self) -> np.ndarray:
        return np.array([job.arrival_s for job in self.jobs])

    @property
    def num_steps(self) -> np.ndarray:
        return np.array([float(job.num_steps) for job in self.jobs])

    @property
    def isolated_s(self) -> np.ndarray:
        """Seconds of each job alone on its fastest allocation, without any start charge."""
        return self.num_steps * self.step_s.min(axis=1)

    @classmethod
    def build(cls, jobs: Sequence[JobSpec], cluster: Cluster, profiles: ProfileSource) -> "Workload":
        """Look every job up; raise :class:`UsageError` naming all that are doubled or fit nowhere."""
        seen: dict[str, JobSpec] = {}
        for job in jobs:
            if job.id in seen:
                raise UsageError(f"job id {job.id!r} occurs twice", hint="give every job an id of its own")
            seen[job.id] = job
        ordered = sorted(jobs, key=lambda job: job.arrival_s)  # stable: ties keep the trace's order
        kinds: dict[tuple[str, int | None], int] = {}
        found = []
        faults: list[str] = []
        unknown: list[str] = []
        for job in ordered:
            key = (job.model, job.global_batch)
            for name in {job.device_type, *job.allowed_types} - {None}:
                try:
                    cluster.catalogue.canonical(str(name))
                except UsageError as error:
                    unknown.append(f"job {job.id!r}: {error.message}")
            if key not in kinds:
                try:
                    found.append(profiles.profile(*key))
                except UsageError as error:
                    faults.append(f"job {job.id!r}: {error.message}")
                    continue
                kinds[key] = len(kinds)
        if unknown:
            raise UsageError(
                f"{counted(len(unknown), 'unknown device type')}\n  " + "\n  ".join(unknown),
                hint=f"known types: {', '.join(sorted(cluster.catalogue.types))}",
            )
        if faults:
            raise UsageError(f"{counted(len(faults), 'job')} without a profile\n  " + "\n  ".join(faults))
        columns = Columns(cluster, (a for profile in found for a in profile.allocations()))
        table = np.full((len(found), len(columns)), np.inf)
        for row, profile in enumerate(found):
            for c, allocation in enumerate(columns.allocations):
                seconds = profile.step_time_s(allocation)
                if seconds is not None:
                    if not seconds > 0:
                        raise UsageError(f"a profile gives {seconds!r} seconds a step on {allocation}")
                    table[row, c] = seconds
        kind = np.array([kinds[job.model, job.global_batch] for job in ordered], dtype=np.int64)
        step_s = table[kind] if len(ordered) else np.empty((0, len(columns)))
        for row, job in enumerate(ordered):
            step_s[row, ~_allowed(job, cluster, columns)] = np.inf
            if not np.isfinite(step_s[row]).any():
                faults.append(
                    f"job {job.id!r} ({job.model}, batch {job.global_batch}) {_why(job, table[kind[row]], columns)}"
                )
        if faults:
            raise UsageError(
                f"{counted(len(faults), 'job')} {'fits' if len(faults) == 1 else 'fit'} nowhere on this cluster\n  "
                + "\n  ".join(faults)
            )
        request = np.array(
            [_request(job, cluster, columns, step_s[row]) for row, job in enumerate(ordered)], dtype=np.int64
        )
        return cls(cluster, columns, tuple(ordered), step_s, request, kind)


def _allowed(job: JobSpec, cluster: Cluster, columns: Columns) -> np.ndarray:
    most = math.inf if job.max_devices is None else job.max_devices
    allowed = (columns.num_devices >= job.min_devices) & (columns.num_devices <= most)
    if not job.elastic and job.num_devices is not None:
        allowed &= columns.num_devices == job.num_devices
    if job.allowed_types:
        names = {cluster.catalogue.canonical(name) for name in job.allowed_types}
        allowed &= np.array([columns.types[k] in names for k in columns.type_of], dtype=bool)
    return allowed


def _why(job: JobSpec, profiled: np.ndarray, columns: Columns) -> str:
    feasible = [str(columns.allocations[c]) for c in np.flatnonzero(np.isfinite(profiled))]
    if not feasible:
        return "has no feasible plan on any of its devices"
    return f"may not use any of its feasible allocations ({', '.join(feasible[:6])})"


def _request(job: JobSpec, cluster: Cluster, columns: Columns, step_s: np.ndarray) -> int:
    """The column a rigid policy uses: what was asked for, else the nearest that is feasible.

    Nearest: the wanted type before others, then the least count not below the wanted one, then the
    largest below it; without a wanted count, the column of least device-time.
    """
    options = np.flatnonzero(np.isfinite(step_s))
    if job.device_type is not None:
        name = cluster.catalogue.canonical(job.device_type)
        same = options[[columns.types[k] == name for k in columns.type_of[options]]]
        options = same if len(same) else options
    devices = columns.num_devices[options]
    if job.num_devices is None:
        return int(options[np.argmin(step_s[options] * devices)])
    distance = np.where(devices >= job.num_devices, devices - job.num_devices, 1e9 + job.num_devices - devices)
    return int(options[np.lexsort((step_s[options], distance))[0]])
