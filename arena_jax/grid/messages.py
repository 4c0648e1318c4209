"""What a scheduler and a job say to each other at step boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from arena_jax.errors import UsageError
from arena_jax.grid.shapes import Allocation, GridShape, parse_target


@dataclass(frozen=True)
class Pause:
    """Save, free the devices, and wait to be resumed."""


@dataclass(frozen=True)
class Stop:
    """Save and end the run as resumable."""


Target = GridShape | Allocation | Pause | Stop


def as_target(wanted: object) -> Target:
    """A target as it is, or read from its text: ``cpu:4/s2``, ``cpu:4``, ``pause`` or ``stop``.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(wanted, GridShape | Allocation | Pause | Stop):
        return wanted
    if not isinstance(wanted, str):
        raise UsageError(
            f"{wanted!r} is no target", hint="give a GridShape, an Allocation, Pause(), Stop(), or the text of one"
        )
    words: dict[str, Target] = {"pause": Pause(), "stop": Stop()}
    text = wanted.strip()
    return words[text] if text in words else parse_target(text)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish of the scheduler.

    Attributes:
        target: the grid to run on, :class:`Pause` or :class:`Stop`, or its text (see :func:`as_target`); an
            :class:`Allocation` leaves the stage count to the job.
        devices: device numbers to use, ``None`` for the first ones of the allocation.
        deadline_s: seconds from receipt by which the devices that the target does not use must be free;
            ``None`` for no hurry. If the new plan is not compiled by then, the job saves and waits for it
            without devices.
        reason: free text, kept with the swap.
        id: the scheduler's own name of the request, reported back.
        wait: whether the job stands still until the new plan is compiled, rather than training on under
            the old one: the change then comes exactly at this boundary.
    """

    target: Target
    devices: tuple[int, ...] | None = None
    deadline_s: float | None = None
    reason: str = ""
    id: str | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", as_target(self.target))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Progress of a job since its last report.

    Attributes:
        loss: of the latest step that is complete.
        state: ``running``, ``preparing`` (running, while the plan of a request is compiled), ``paused``,
            ``moving`` (goes on in other processes), ``finished`` or ``stopped``.
        request_id: of the latest request.
        errors: what went wrong since the last report: requests that cannot be met, and why.
    """

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
    """The tell half, called by the job on one thread of its own, one call at a time.

    ``poll`` is called at every step boundary and must not block: a job waits a second for it, once, and
    then trains on without an answer until the call returns.
    """

    def poll(self, step: int) -> Request | GridShape | None:
        """Return what the scheduler wants at this step boundary, if anything."""

    def report(self, report: StepReport) -> None:
        """Take note of progress."""

    def prepare(self) -> Sequence[GridShape | Allocation]:
        """Grids worth compiling ahead, likeliest first. Asked now and then; a plan for one of them swaps in at once."""
