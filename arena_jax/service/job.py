"""A job of the service: what was asked for, where it stands, and both as JSON values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from arena_jax.errors import UsageError, nearest
from arena_jax.grid import Allocation

KINDS = ("recipe", "closure", "command")
# Longest texts that a submission may hold, characters.
MAX_NAME, MAX_COMMAND, MAX_RECIPE = 100, 20_000, 100_000


class Phase(StrEnum):
    """Where a job stands. From ``STARTING`` to ``STOPPING`` a process may be alive."""

    PLANNING = "planning"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})
ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a user asked for.

    Attributes:
        kind: ``recipe``, ``closure`` (a ``fit`` call carried by cloudpickle) or ``command`` (opaque, rigid).
        recipe: YAML of the resolved recipe; of a closure, the path of its file.
        command: shell command, run in ``folder``.
        on: allocation of a command; of others, what a rigid policy gives. Empty for no preference.
        steps, global_batch: of the training; 1 and ``None`` for a command.
        min_devices, max_devices, types: bounds on what the job may get; ``None`` and empty for none.
        priority: weight of a second of its completion time; 1 is ordinary.
        deadline_s: seconds after the submission by which it should be done.
        expected_s: how long a command is thought to take.
    """

    kind: str
    name: str
    queue: str = "default"
    recipe: str = ""
    command: str = ""
    folder: str = ""
    on: str = ""
    steps: int = 1
    global_batch: int | None = None
    min_devices: int = 1
    max_devices: int | None = None
    types: tuple[str, ...] = ()
    priority: float = 1.0
    deadline_s: float | None = None
    expected_s: float = 3600.0

    def __post_init__(self) -> None:
        def check(key: str, fine: bool, hint: str) -> None:
            if not fine:
                raise UsageError(f"{key} is {getattr(self, key)!r}", hint=hint)

        check("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        for key, long in (("name", MAX_NAME), ("queue", MAX_NAME), ("on", MAX_NAME), ("folder", 4096)):
            text = getattr(self, key)
            check(key, isinstance(text, str) and len(text) <= long and text.isprintable(), f"at most {long} characters")
        for key, long in (("command", MAX_COMMAND), ("recipe", MAX_RECIPE)):
            text = getattr(self, key)
            check(key, isinstance(text, str) and len(text) <= long and "\0" not in text, f"at most {long} characters")
        check("name", bool(self.name) and "/" not in self.name and self.name[0] != ".", "a word without slashes")
        check("queue", bool(self.queue), "a name")
        check("steps", _is_count(self.steps) and self.steps >= 1, "a whole number of at least 1")
        check("min_devices", _is_count(self.min_devices) and self.min_devices >= 1, "a whole number of at least 1")
        most = self.max_devices
        check("max_devices", most is None or (_is_count(most) and most >= self.min_devices), "at least min_devices")
        batch = self.global_batch
        check("global_batch", batch is None or (_is_count(batch) and batch >= 1), "a whole number of at least 1")
        check("priority", _is_number(self.priority) and 0 < self.priority <= 1e6, "a number above 0, at most 1e6")
        late = self.deadline_s
        check("deadline_s", late is None or (_is_number(late) and 0 < late < 1e10), "seconds, more than 0")
        check("expected_s", _is_number(self.expected_s) and 0 < self.expected_s < 1e10, "seconds, more than 0")
        fine = isinstance(self.types, tuple) and len(self.types) <= 100 and all(_is_word(t) for t in self.types)
        check("types", fine, "names of device types")
        check("on", self.kind != "command" or bool(self.on), "a command needs an allocation, as in cpu:8")
        check("command", self.kind != "command" or bool(self.command.strip()), "a command to run")
        check("recipe", self.kind == "command" or bool(self.recipe), "the text of a recipe")

    @property
    def rigid(self) -> bool:
        """Whether it runs on one allocation and can neither be moved nor resumed."""
        return self.kind == "command"

    @classmethod
    def stored(cls, data: Mapping[str, Any]) -> "Submission":
        """Read what :meth:`to_json` wrote into the store. It was checked when it came; thousands are read at once."""
        made = object.__new__(cls)
        made.__dict__.update(data, types=tuple(data["types"]))
        return made

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self.__dict__, "types": list(self.types)}

    @classmethod
    def from_json(cls, data: Any) -> "Submission":
        """Read what :meth:`to_json` wrote, or anything at all; raise :class:`UsageError` for what is no submission."""
        if not isinstance(data, Mapping):
            raise UsageError("a submission is a JSON object")
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise UsageError(f"a submission has no key {str(key)[:50]!r}{nearest(str(key)[:50], known)}")
        for key in ("kind", "name"):
            if key not in data:
                raise UsageError(f"the submission lacks {key!r}")
        values = dict(data)
        if isinstance(values.get("types"), list):
            values["types"] = tuple(values["types"])
        return cls(**values)


@dataclass(frozen=True)
class Place:
    """Where a job should run: an allocation on these nodes of its type."""

    allocation: Allocation
    nodes: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [str(self.allocation), list(self.nodes)]

    @classmethod
    def from_json(cls, data: Any) -> "Place":
        return cls(Allocation.parse(data[0], None), tuple(data[1]))


@dataclass(frozen=True)
class Held:
    """Devices that are a job's until its release is confirmed, as (node, numbers on it).

    ``allocation`` is what the job's process was last told to run on.
    """

    allocation: Allocation
    devices: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node for node, _ in self.devices)

    def to_json(self) -> list[Any]:
        return [str(self.allocation), [[node, list(numbers)] for node, numbers in self.devices]]

    @classmethod
    def from_json(cls, data: Any) -> "Held":
        devices = tuple((int(node), tuple(numbers)) for node, numbers in data[1])
        return cls(Allocation.parse(data[0], None), devices)


@dataclass(kw_only=True)
class Job:
    """A job as the service keeps it. Times are seconds of the service's clock; 0 means not yet.

    Attributes:
        plan_key: what its plan index is filed under.
        desired: where the policy wants it, ``None`` to wait.
        held: devices that are not free for others because of it.
        told: the allocation its process was asked to go on on, until that is confirmed.
        run: number of the latest launch; a launch is written before it is made.
        step, loss, step_time_s, grid: progress; ``seen_at`` is its last sign of life.
        crashes: in a row without progress beyond ``crash_step``; it is not launched before ``not_before``.
        pin: allocation that a user holds it to, or ``pause``.
        since, charge_until, cause, num_changes: of the present allocation, as in the simulator.
    """

    number: int
    id: str
    spec: Submission
    submitted_at: float
    phase: Phase = Phase.PLANNING
    reason: str = ""
    plan_key: str = ""
    desired: Place | None = None
    held: Held | None = None
    told: str = ""
    told_at: float = 0.0
    run: int = 0
    launched_at: float = 0.0
    stop_at: float = 0.0
    killed: bool = False
    cancelled: bool = False
    pin: str = ""
    crashes: int = 0
    crash_step: int = -1
    not_before: float = 0.0
    step: int = 0
    loss: float | None = None
    step_time_s: float | None = None
    grid: str = ""
    seen_at: float = 0.0
    ran_on: str = ""
    paused: bool = False
    since: float = 0.0
    charge_until: float = 0.0
    cause: str = ""
    settled: bool = True
    num_changes: int = 0
    run_s: float = 0.0
    device_s: float = 0.0
    first_start_at: float = 0.0
    finished_at: float = 0.0
    exit_code: int | None = None
    log_tail: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether a process of it may be alive."""
        return self.phase in LIVE

    @property
    def started(self) -> bool:
        return self.first_start_at > 0

    def begin_stop(self, why: str, now: float) -> None:
        """It is to save and end."""
        self.phase, self.reason, self.stop_at, self.told = Phase.STOPPING, why, now, ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.__dict__,
            "spec": self.spec.to_json(),
            "phase": str(self.phase),
            "desired": None if self.desired is None else self.desired.to_json(),
            "held": None if self.held is None else self.held.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Job":
        """Read what :meth:`to_json` wrote."""
        return cls(
            **{
                **data,
                "spec": Submission.stored(data["spec"]),
                "phase": Phase(data["phase"]),
                "desired": None if data["desired"] is None else Place.from_json(data["desired"]),
                "held": None if data["held"] is None else Held.from_json(data["held"]),
            }
        )

    def row(self) -> dict[str, Any]:
        """What ``status --json`` says of it."""
        held = self.held or None
        return {
            "id": self.id,
            "number": self.number,
            "name": self.spec.name,
            "recipe": self.spec.name if self.spec.kind != "command" else None,
            "kind": self.spec.kind,
            "queue": self.spec.queue,
            "state": str(self.phase),
            "reason": self.reason,
            "allocation": None if held is None else str(held.allocation),
            "wanted": None if self.desired is None else str(self.desired.allocation),
            "nodes": [] if held is None else [f"{held.allocation.device_type}/{node}" for node in held.nodes],
            "grid": self.grid or None,
            "step": self.step,
            "num_steps": self.spec.steps,
            "loss": self.loss,
            "step_time_s": self.step_time_s,
            "priority": self.spec.priority,
            "pin": self.pin or None,
            "changes": self.num_changes,
            "submitted_at": self.submitted_at,
            "started_at": self.first_start_at or None,
            "finished_at": self.finished_at or None,
            "exit_code": self.exit_code,
            "log_tail": self.log_tail,
        }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 1 << 40


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
