"""Where the events of a run go: the event log, where there is one, and the caller's callbacks."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from arena_jax.errors import ArenaError
from arena_jax.events import EventLog
from arena_jax.grid import Plan

if TYPE_CHECKING:
    from arena_jax.runtime.contract import Compiled

Callback = Callable[[dict[str, Any]], Any]


class Journal:
    """Hands every event to the log and to the callbacks, in order, on the caller's thread.

    A log that cannot be written any more (a full disk) costs one warning, never the run. What a
    callback raises is the caller's own and ends the run.
    """

    def __init__(self, log: EventLog | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self._log = log
        self._callbacks = tuple(callbacks)
        self._said: set[str] = set()

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event."""
        event: dict[str, Any] = {"time": time.time(), "kind": kind, **fields}
        failure = None
        if self._log is not None:
            try:
                event = self._log.emit(kind, **fields)
            except ArenaError as error:
                failure = error
        for callback in self._callbacks:
            callback(event)
        if failure is not None and "log" not in self._said:
            self._said.add("log")
            self.warn(f"{failure.message}; training goes on")

    def warn(self, message: str, *, once: bool = False) -> bool:
        """Record a warning; ``once`` drops one that was already given. Returns whether it was recorded."""
        if once and message in self._said:
            return False
        self._said.add(message)
        self.emit("warning", message=message)
        return True

    def plan(self, plan: Plan, *, step: int, reason: str, compiled: "Compiled") -> None:
        """Record that ``plan`` runs from ``step`` on; ``reason`` is start, resume or swap."""
        self.emit(
            "plan",
            step=step,
            plan_id=plan.plan_id,
            grid=str(plan.grid),
            plan=plan.to_json(),
            estimated_step_time_s=compiled.estimated_step_time_s,
            engine=compiled.engine,
            reason=reason,
        )
