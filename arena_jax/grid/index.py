"""The plan index: one row per (job, grid, microbatches), in memory and in SQLite.

Profiler, search, scheduler and tracking all use these rows. A row is served only under the exact
key it was stored with, so a change of precision, pins, catalogue or versions cannot serve a stale
plan.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.grid.plan import Plan
from arena_jax.grid.shapes import Allocation, GridShape
from arena_jax.grid.store_file import StoreFile

_SCHEMA_VERSION = 1
_TABLES = (
    "CREATE TABLE jobs (digest TEXT PRIMARY KEY, key TEXT NOT NULL)",
    """CREATE TABLE rows (job TEXT, grid TEXT, num_microbatches INTEGER,
    data TEXT NOT NULL, stored_at REAL, PRIMARY KEY (job, grid, num_microbatches))""",
)
# Before the name of a model that has no recipe.
FIT_PREFIX = "fit:"


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """Predicted seconds and bytes of one stage, for one microbatch where a time is meant.

    Attributes:
        compute_s, communication_s: a whole forward and backward pass.
        memory_bytes: peak bytes of a device.
        forward_s: how much of the two times is the first forward pass.
        transfer_s: bringing one microbatch in from the stage before, one way.
        update_s: reducing gradients and updating parameters, once a step.
        sync_s: how much of ``update_s`` is communication.
        communication: the seconds of ``communication_s`` by cause: collectives of the ``forward`` pass, of
            the ``backward`` pass with what it recomputes, and gathers of sharded ``parameters``.
        memory: the bytes of ``memory_bytes`` by what they hold: ``parameters``, ``gradients``,
            ``optimizer``, ``activations``.
        collective_bytes: by kind of collective, bytes that one device holds of it, over all of one step.
    """

    compute_s: float
    communication_s: float
    memory_bytes: int
    forward_s: float = 0.0
    transfer_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    collective_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_s(self) -> float:
        """Forward and backward pass of one microbatch."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the cost model says of a plan.

    Attributes:
        step_time_s: seconds of one whole step.
        memory_bytes: peak bytes of the fullest device.
        device_memory_bytes: usable bytes of a device.
        stages: per stage, see :class:`StageEstimate`.
        flops: model FLOPs of one step, rematerialisation not counted.
        imbalance: slowest over mean stage time.
        measured_share: share of the time that came from measurements, 0 to 1.
        breakdown: seconds by cause, adding up to ``step_time_s``.
    """

    step_time_s: float
    memory_bytes: int
    device_memory_bytes: int
    stages: tuple[StageEstimate, ...]
    flops: float
    imbalance: float = 1.0
    measured_share: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """The best plan of one grid at one number of microbatches, or why none fits.

    ``least_memory_bytes`` is what the fullest device would need at least, where memory is why.
    ``objectives`` holds the seconds of the cut into stages that each engine asked has found.
    """

    grid: GridShape
    num_microbatches: int
    plan: Plan | None
    estimate: Estimate | None
    reason: str = ""
    engine: str = "highs"
    profiles: tuple[str, ...] = ()
    measured_step_time_s: float | None = None
    least_memory_bytes: int | None = None
    objectives: Mapping[str, float] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        return self.plan is not None

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step where known, else the estimate."""
        if self.measured_step_time_s is not None:
            return self.measured_step_time_s
        return None if self.estimate is None or self.plan is None else self.estimate.step_time_s


@dataclass(frozen=True)
class JobKey:
    """Everything that decides what a row holds; two unequal keys never share a row.

    Attributes:
        fields: model fingerprint, global batch, precision, constraints and pins, search switches,
            memory fraction, catalogue and profile generation, versions. JSON values only.
    """

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class PlanIndex:
    """The rows of one job. What a scheduler reads, and what ``arena_jax.plan`` returns.

    Attributes:
        search_s, num_programs_solved: what the search cost.
        lower_bounds_s: of an interrupted search, for every grid it did not finish, seconds a step that
            no plan there can beat.
    """

    def __init__(
        self,
        rows: Iterable[IndexRow],
        *,
        key: JobKey | None = None,
        search_s: float = 0.0,
        num_programs_solved: int = 0,
        lower_bounds_s: Mapping[GridShape, float] | None = None,
    ) -> None:
        self._rows = {(row.grid, row.num_microbatches): row for row in rows}
        self.key = key
        self.search_s = search_s
        self.num_programs_solved = num_programs_solved
        self.lower_bounds_s = dict(lower_bounds_s or {})

    def __iter__(self) -> Iterator[IndexRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[IndexRow, ...]:
        return tuple(self._rows.values())

    def row(self, grid: GridShape) -> IndexRow | None:
        """The fastest feasible row of a grid, else an infeasible one, else ``None``."""
        rows = [row for row in self if row.grid == grid]
        feasible = [row for row in rows if row.feasible]
        return min(feasible, key=_time) if feasible else (rows[0] if rows else None)

    def best(self, allocation: Allocation) -> IndexRow | None:
        """The fastest feasible row of an allocation over all stage counts, or ``None``."""
        rows = [row for row in self if row.grid.allocation == allocation and row.feasible]
        return min(rows, key=_time) if rows else None

    def speedup(self, a: Allocation, b: Allocation) -> float | None:
        """Step time on ``a`` over step time on ``b``; ``None`` when either has no plan."""
        row_a, row_b = self.best(a), self.best(b)
        return None if row_a is None or row_b is None else _time(row_a) / _time(row_b)

    def missing(self, allocations: Iterable[Allocation]) -> tuple[Allocation, ...]:
        """The allocations that have not been planned at all."""
        known = {row.grid.allocation for row in self}
        return tuple(a for a in allocations if a not in known)

    def with_measured(self, grid: GridShape, num_microbatches: int, step_time_s: float) -> "PlanIndex":
        """Return an index in which one row carries a measured step time."""
        rows = dict(self._rows)
        rows[grid, num_microbatches] = replace(rows[grid, num_microbatches], measured_step_time_s=step_time_s)
        return PlanIndex(rows.values(), key=self.key, search_s=self.search_s)

    def save(self, path: str | Path) -> None:
        """Store all rows under this index's key in the SQLite file ``path``."""
        if self.key is None:
            raise ArenaError("this index has no job key and cannot be stored")
        PlanStore(path).put(self.key, self.rows)


class SearchInterrupted(KeyboardInterrupt):
    """A search was interrupted; ``index`` holds what it had found, and bounds on what it had not."""

    def __init__(self, index: PlanIndex) -> None:
        super().__init__("the search was interrupted")
        self.index = index


class PlanStore:
    """A SQLite file of rows of many jobs; many readers and writers at once.

    A file that is damaged or of a newer version is set aside under another name, never trusted.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = StoreFile(path, name="plan index", schema_version=_SCHEMA_VERSION, tables=_TABLES)
        self.path = self._file.path
        self.set_aside = self._file.set_aside

    def put(self, key: JobKey, rows: Iterable[IndexRow]) -> None:
        """Insert or replace rows; either all are stored or none."""
        values = [
            (key.digest, str(row.grid), row.num_microbatches, json.dumps(row_to_json(row)), time.time()) for row in rows
        ]
        with self._file.connect() as db:
            db.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?)",
                (key.digest, json.dumps(dict(key.fields), sort_keys=True)),
            )
            db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)", values)

    def index(self, key: JobKey) -> PlanIndex:
        """The rows stored under exactly this key; possibly none."""
        return PlanIndex(self._rows(key.digest), key=key)

    def jobs(self) -> tuple[JobKey, ...]:
        """Keys of all jobs in the store, oldest first."""
        with self._file.connect() as db:
            return tuple(JobKey(json.loads(text)) for (text,) in db.execute("SELECT key FROM jobs ORDER BY rowid"))

    def stored_at(self, key: JobKey) -> dict[tuple[GridShape, int], float]:
        """When each row of a job was stored, by grid and number of microbatches, in Unix seconds."""
        with self._file.connect() as db:
            found = db.execute("SELECT grid, num_microbatches, stored_at FROM rows WHERE job = ?", (key.digest,))
            return {(GridShape.parse(grid, catalogue=None), number): at for grid, number, at in found}

    def _rows(self, digest: str) -> list[IndexRow]:
        with self._file.connect() as db:
            texts = [text for (text,) in db.execute("SELECT data FROM rows WHERE job = ? ORDER BY rowid", (digest,))]
        rows = []
        for text in texts:
            # What does not read is as good as not stored: it is searched for again.
            with suppress(ValueError, KeyError, TypeError):
                rows.append(row_from_json(json.loads(text)))
        return rows


def row_to_json(row: IndexRow) -> dict[str, Any]:
    """The stored form of a row."""
    return {
        "grid": str(row.grid),
        "num_microbatches": row.num_microbatches,
        "plan": None if row.plan is None else row.plan.to_json(),
        "estimate": None if row.estimate is None else asdict(row.estimate),
        "reason": row.reason,
        "engine": row.engine,
        "profiles": list(row.profiles),
        "measured_step_time_s": row.measured_step_time_s,
        "least_memory_bytes": row.least_memory_bytes,
        "objectives": dict(row.objectives),
    }


def row_from_json(data: Mapping[str, Any]) -> IndexRow:
    """Read what :func:`row_to_json` wrote."""
    estimate = data["estimate"]
    if estimate is not None:
        stages = tuple(StageEstimate(**stage) for stage in estimate["stages"])
        estimate = Estimate(**{**estimate, "stages": stages})
    return IndexRow(
        grid=GridShape.parse(data["grid"], catalogue=None),
        num_microbatches=data["num_microbatches"],
        plan=None if data["plan"] is None else Plan.from_json(data["plan"]),
        estimate=estimate,
        reason=data["reason"],
        engine=data["engine"],
        profiles=tuple(data["profiles"]),
        measured_step_time_s=data["measured_step_time_s"],
        least_memory_bytes=data.get("least_memory_bytes"),
        objectives=data.get("objectives", {}),
    )


def _time(row: IndexRow) -> float:
    assert row.step_time_s is not None
    return row.step_time_s
