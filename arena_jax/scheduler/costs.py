"""What a start or a change of allocation costs, by cause."""

from dataclasses import dataclass, fields

import numpy as np

from arena_jax.errors import UsageError

# Causes by number, so that charges are looked up as arrays.
CAUSES = ("start", "resume", "grow", "shrink", "move", "migrate", "failure")
START, RESUME, GROW, SHRINK, MOVE, MIGRATE, FAILURE = range(len(CAUSES))


@dataclass(frozen=True, kw_only=True)
class RestartCosts:
    """Seconds during which a job holds its devices and makes no progress.

    Attributes:
        start: the first start of a job.
        resume: a start after a pause.
        grow: more devices of the same type (a relaunch).
        shrink: fewer devices of the same type (a swap inside the process).
        move: another device type.
        migrate: the same allocation on other nodes.
        failure: a start after a node failed.
    """

    start: float = 40.0
    resume: float = 40.0
    grow: float = 40.0
    shrink: float = 40.0
    move: float = 40.0
    migrate: float = 40.0
    failure: float = 40.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < float("inf"):
                raise UsageError(f"restart cost {f.name!r} must be at least 0 s, got {getattr(self, f.name)!r}")

    @classmethod
    def uniform(cls, seconds: float) -> "RestartCosts":
        """The same charge whatever the cause."""
        return cls(**{f.name: seconds for f in fields(cls)})

    def by_cause(self) -> np.ndarray:
        """Seconds indexed by cause number."""
        return np.array([float(getattr(self, name)) for name in CAUSES])


def cause_of(old: int, new: int, type_of: np.ndarray, num_devices: np.ndarray, *, started: bool, failed: bool) -> int:
    """The cause of running on column ``new`` after ``old`` (-1: not running)."""
    if old < 0:
        return FAILURE if failed else RESUME if started else START
    if type_of[old] != type_of[new]:
        return MOVE
    if num_devices[old] == num_devices[new]:
        return MIGRATE
    return GROW if num_devices[new] > num_devices[old] else SHRINK
