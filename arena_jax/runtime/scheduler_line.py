"""The loop's side of the scheduler hook: asks, reports, and survives a scheduler in trouble.

The hook is called on a thread of its own, so that one that blocks costs the loop one time-out and not
the run. Calls come one at a time, in order.
"""

import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation, GridShape, Request, SchedulerHook, StepReport
from arena_jax.runtime.contract import Compiled, LoopOptions
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.metrics import StepRecord

HOOK_TIMEOUT_S = 1.0


class SchedulerLine:
    """Speaks to a hook, if there is one. What the hook raises becomes a warning, never the end of a run."""

    def __init__(
        self,
        hook: SchedulerHook | None,
        options: LoopOptions,
        journal: Journal,
        *,
        timeout_s: float = HOOK_TIMEOUT_S,
    ) -> None:
        self._hook = hook
        self._name = type(hook).__name__
        self._options = options
        self._journal = journal
        self._timeout_s = timeout_s
        self._reported_at_s = 0.0
        self._num_reported = 0
        self._refused: tuple[str, ...] = ()
        self._request_id: str | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked: _Call | None = None  # a poll that has not been answered
        self._proposing: _Call | None = None
        self._reporting: _Call | None = None
        self._late = False

    @property
    def due(self) -> bool:
        """Whether it is time for another report."""
        return self._hook is not None and time.monotonic() - self._reported_at_s >= self._options.report_every_s

    def poll(self, step: int) -> Request | None:
        """What is wanted at the boundary after ``step`` completed steps."""
        if self._hook is None:
            return None
        call = self._asked or self._call(lambda hook: hook.poll(step), "poll")
        self._asked = call
        # After a time-out the loop only looks whether the answer has come; it does not wait again.
        if not call.done.wait(0 if self._late else self._timeout_s):
            if not self._late:
                self._journal.warn(
                    f"the scheduler hook {self._name} has not answered {call.name} for {self._timeout_s:g} s; "
                    "training goes on without it until it does"
                )
            self._late = True
            return None
        if self._late:
            self._journal.warn(f"the scheduler hook {self._name} answers again")
        self._asked, self._late = None, False
        self._check_reporting()
        if call.error is not None:
            self._warn(call)
            return None
        return self._as_request(call.result)

    def proposals(self) -> list[GridShape | Allocation] | None:
        """What the hook thinks worth compiling ahead, when it has answered; asks again at the next call."""
        if self._hook is None:
            return None
        call, self._proposing = self._proposing, None
        if call is None:
            self._proposing = self._call(lambda hook: hook.prepare(), "prepare")
            return None
        if not call.done.is_set():
            self._proposing = call
            return None
        if call.error is not None:
            self._warn(call)
            return None
        return [grid for grid in call.result or () if isinstance(grid, GridShape | Allocation)]

    def resume(self, request_id: str | None) -> None:
        """Reports answer this request, which another process took."""
        self._request_id = request_id

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
        self._reporting = self._call(lambda hook: hook.report(report), "report")

    def close(self) -> None:
        """Give the last report a moment to arrive, and let the thread go."""
        if self._reporting is not None and not self._late:
            self._reporting.done.wait(self._timeout_s)
            self._check_reporting()
        self._calls.put(None)

    def _check_reporting(self) -> None:
        if self._reporting is not None and self._reporting.done.is_set():
            if self._reporting.error is not None:
                self._warn(self._reporting)
            self._reporting = None

    def _as_request(self, wanted: Any) -> Request | None:
        if wanted is None:
            return None
        try:
            request = wanted if isinstance(wanted, Request) else Request(target=wanted)
        except ArenaError as error:
            self._complain(f"the scheduler hook {self._name} asked for what cannot be: {error.one_line}")
            return None
        self._request_id = request.id
        return request

    def _call(self, do: Callable[[SchedulerHook], Any], name: str) -> "_Call":
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="scheduler-hook", daemon=True)
            self._thread.start()
        call = _Call(do, name)
        self._calls.put(call)
        return call

    def _serve(self) -> None:
        assert self._hook is not None
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.do(self._hook)
            except Exception as error:
                call.error = error
            call.done.set()

    def _warn(self, call: "_Call") -> None:
        error = call.error
        self._complain(f"the scheduler hook {self._name} failed in {call.name}: {type(error).__name__}: {error}")

    def _complain(self, message: str) -> None:
        """Warn of something once, and tell the scheduler with the next report."""
        if self._journal.warn(message, once=True):
            self.refuse(message)


class _Call:
    """One call of the hook, and what came of it."""

    def __init__(self, do: Callable[[SchedulerHook], Any], name: str) -> None:
        self.do = do
        self.name = name
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
