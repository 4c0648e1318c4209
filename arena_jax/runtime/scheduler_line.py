"""The loop's side of the scheduler hook: asks, reports, and survives a scheduler in trouble."""

import statistics
import time
from collections.abc import Sequence

from arena_jax.grid import Allocation, GridShape, Request, SchedulerHook, StepReport
from arena_jax.runtime.contract import Compiled, LoopOptions
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.metrics import StepRecord


class SchedulerLine:
    """Speaks to a hook, if there is one. What the hook raises becomes a warning, never the end of a run."""

    def __init__(self, hook: SchedulerHook | None, options: LoopOptions, journal: Journal) -> None:
        self._hook = hook
        self._options = options
        self._journal = journal
        self._reported_at_s = 0.0
        self._num_reported = 0
        self._refused: tuple[str, ...] = ()
        self._request_id: str | None = None

    @property
    def due(self) -> bool:
        """Whether it is time for another report."""
        return self._hook is not None and time.monotonic() - self._reported_at_s >= self._options.report_every_s

    def poll(self, step: int) -> Request | None:
        """What is wanted at the boundary after ``step`` completed steps."""
        if self._hook is None:
            return None
        try:
            wanted = self._hook.poll(step)
        except Exception as error:
            self._warn(error)
            return None
        request = Request(target=wanted) if isinstance(wanted, GridShape | Allocation) else wanted
        if request is not None:
            self._request_id = request.id
        return request

    def refuse(self, message: str) -> None:
        """Tell the scheduler with the next report that a request could not be met."""
        self._refused = (*self._refused, message)

    def report(self, state: str, step: int, history: Sequence[StepRecord], compiled: Compiled) -> None:
        """Report progress since the last report; times are means over it."""
        if self._hook is None:
            return
        recent = history[self._num_reported :] or history[-1:]
        step_time_s = statistics.fmean(r.step_time_s for r in recent) if recent else 0.0
        plan = compiled.program.plan
        report = StepReport(
            step=step,
            num_steps=self._options.num_steps,
            loss=recent[-1].loss if recent else None,
            step_time_s=step_time_s,
            estimated_step_time_s=compiled.estimated_step_time_s,
            samples_per_s=self._options.samples_per_step / step_time_s if step_time_s else 0.0,
            plan_id=plan.plan_id,
            grid=plan.grid,
            state=state,
            request_id=self._request_id,
            errors=self._refused,
        )
        self._reported_at_s, self._num_reported, self._refused = time.monotonic(), len(history), ()
        try:
            self._hook.report(report)
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        self._journal.warn(f"the scheduler hook failed: {type(error).__name__}: {error}", once=True)
