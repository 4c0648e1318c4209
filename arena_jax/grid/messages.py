"""What a scheduler and a job say to each other at step boundaries."""

from dataclasses import dataclass, field
from typing import Protocol

from arena_jax.grid.shapes import Allocation, GridShape


@dataclass(frozen=True)
class Pause:
    """Save, free the devices, and wait to be resumed."""


@dataclass(frozen=True)
class Stop:
    """Save and end the run as resumable."""


Target = GridShape | Allocation | Pause | Stop


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish of the scheduler.

    Attributes:
        target: the grid to run on; an :class:`Allocation` leaves the stage count to the job.
        devices: device numbers to use, ``None`` for the first ones of the allocation.
        deadline_s: seconds from receipt by which devices must be free; ``None`` for no hurry.
        reason: free text, kept with the swap.
        id: the scheduler's own name of the request, reported back.
    """

    target: Target
    devices: tuple[int, ...] | None = None
    deadline_s: float | None = None
    reason: str = ""
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Progress of a job since its last report."""

    step: int
    num_steps: int
    loss: float | None
    step_time_s: float
    estimated_step_time_s: float | None
    samples_per_s: float
    plan_id: str
    grid: GridShape
    state: str = "running"
    request_id: str | None = None
    errors: tuple[str, ...] = field(default=())


class SchedulerHook(Protocol):
    """The tell half, called by the job. ``poll`` must not block."""

    def poll(self, step: int) -> Request | GridShape | None:
        """Return what the scheduler wants at this step boundary, if anything."""

    def report(self, report: StepReport) -> None:
        """Take note of progress."""

    def prepare(self) -> list[GridShape]:
        """Grids worth compiling ahead, likeliest first."""
