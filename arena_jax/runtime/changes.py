"""The change of plan that is wanted: one at a time, compiled ahead, until it can be made or is refused.

Decides nothing about devices or state; :class:`arena_jax.runtime.trainer.Trainer` asks at every step
boundary what is due.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation, GridShape, Request
from arena_jax.runtime.ahead import Ahead, AheadCompiler
from arena_jax.runtime.contract import Compiled, Rehearsed
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.scheduler_line import SchedulerLine

# A deadline is met this much early, or as much earlier as a step and a save last took.
_MARGIN_S = 0.5
# A hook may ask for the same at every boundary; what was refused is not tried again for so many seconds.
_RETRY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Due:
    """A change that can be made now.

    Attributes:
        compiled: the program, or the plan that another process is to run.
        background_s: seconds of planning and compiling for it, 0 where it was prepared.
        prepared: whether it was compiled before it was asked for.
    """

    request: Request
    compiled: Compiled | Rehearsed
    background_s: float
    prepared: bool


class PlanChanges:
    """What the scheduler wants and what has come of it.

    Args:
        ahead: compiles; ``None`` where plans cannot be changed.
        scheduler: is told of requests that cannot be met.
        journal: takes the same as warnings.
    """

    def __init__(self, ahead: AheadCompiler | None, scheduler: SchedulerLine, journal: Journal) -> None:
        self._ahead = ahead
        self._scheduler = scheduler
        self._journal = journal
        self._request: Request | None = None
        self._work: Ahead | None = None
        self._prepared = False
        self._free_by_s: float | None = None
        self._made: Request | None = None
        self._refused: Request | None = None
        self._retry_at_s = 0.0
        self._unreachable: dict[GridShape | Allocation, str] = {}

    @property
    def pending(self) -> Request | None:
        """The request that is neither made nor refused."""
        return self._request

    @property
    def must_wait(self) -> bool:
        """Whether no step may run before it."""
        return self._request is not None and self._request.wait

    def want(self, request: Request, running: Compiled, devices: Sequence[int] | None) -> bool:
        """Take a request for a grid or an allocation, in place of the one before.

        Args:
            running: what runs now.
            devices: the device numbers it runs on; ``None`` for the first ones.

        Returns:
            Whether what runs is what is wanted.
        """
        target = request.target
        assert isinstance(target, GridShape | Allocation)
        if request == self._request or (request == self._refused and time.monotonic() < self._retry_at_s):
            return False
        self.drop()
        grid = running.plan.grid
        # For the devices it has, a job stays with its number of stages.
        if request == self._made or (target in (grid, grid.allocation) and request.devices == devices):
            return True
        if target in self._unreachable:
            self._refused, self._retry_at_s = request, time.monotonic() + _RETRY_S
            self._scheduler.refuse(f"cannot go to {target}: {self._unreachable[target]}")
            return False
        if self._ahead is None:
            self._refuse(request, "this run cannot change its plan")
            return False
        self._request = request
        self._work = self._ahead.want(target, request.devices, idle=request.wait)
        self._prepared = self._work.compiled is not None
        if request.deadline_s is not None and _freed(running, devices, request):
            self._free_by_s = time.monotonic() + request.deadline_s
        return False

    def due(self, running: Compiled, devices: Sequence[int] | None) -> Due | None:
        """The change that is ready to be made, if any; one that cannot be made is refused."""
        request, work = self._request, self._work
        if request is None or work is None or not work.done.is_set():
            return None
        self._request = self._work = self._free_by_s = None
        if work.compiled is None:
            self._refuse(request, _why(work.error))
            return None
        self._made, self._refused = request, None
        if work.compiled.plan == running.plan and request.devices == devices:
            return None  # an allocation whose best plan is the one that runs
        return Due(
            request=request,
            compiled=work.compiled,
            background_s=0.0 if self._prepared else work.seconds,
            prepared=self._prepared,
        )

    def wait(self, seconds: float) -> None:
        """Wait for the compiler, at most so long."""
        if self._work is not None:
            self._work.done.wait(seconds)

    def overdue(self, margin_s: float) -> bool:
        """Whether devices have to be freed now, although the new plan is not ready."""
        margin_s = max(margin_s, _MARGIN_S)
        return self._free_by_s is not None and time.monotonic() >= self._free_by_s - margin_s

    def drop(self, why: str = "") -> None:
        """Forget the request, if there is one; ``why`` is reported."""
        if self._request is not None and why:
            self._refuse(self._request, why)
        if self._request is not None and self._ahead is not None:
            self._ahead.drop()
        self._request = self._work = self._free_by_s = None

    def cannot_reach(self, target: GridShape | Allocation, why: str) -> None:
        """Report a target that failed in a process of its own; it is not tried again."""
        self._unreachable[target] = why
        self._refuse(Request(target=target), why)

    def failed(self, request: Request, error: Exception) -> None:
        """Report that a change that was due could not be made."""
        self._refuse(request, _why(error))

    def _refuse(self, request: Request, why: str) -> None:
        self._made, self._refused, self._retry_at_s = None, request, time.monotonic() + _RETRY_S
        message = f"cannot go to {request.target}: {why}"
        self._scheduler.refuse(message)
        self._journal.warn(message)


def _why(error: BaseException | None) -> str:
    if isinstance(error, ArenaError):
        return error.one_line
    return f"{type(error).__name__}: {error}"


def _freed(running: Compiled, devices: Sequence[int] | None, request: Request) -> bool:
    """Whether the request leaves out a device that is in use."""
    target = request.target
    assert isinstance(target, GridShape | Allocation)
    grid = running.plan.grid
    if target.allocation.device_type != grid.allocation.device_type:
        return True
    used = range(grid.num_devices) if devices is None else devices
    wanted = range(target.num_devices) if request.devices is None else request.devices
    return bool(set(used) - set(wanted))
