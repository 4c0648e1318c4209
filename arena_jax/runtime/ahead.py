"""Plans compiled away from the step loop, on one thread, the wanted one before those prepared.

What takes the interpreter's lock (planning, tracing) slows the steps, and what takes processor time, too
(XLA). So where there is a ``warm`` (see :class:`arena_jax.warm.WarmProcess`) another process does both
first, at a low priority, and leaves plan and executables in the caches; here only tracing remains.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from arena_jax.grid import Allocation, GridShape
from arena_jax.runtime.contract import Compiled, Elsewhere, Program, Recompile, Rehearsed

Target = GridShape | Allocation
Key = tuple[Target, tuple[int, ...] | None]
Ready = Compiled | Rehearsed
T = TypeVar("T")

# Seconds for which one thread may keep the interpreter's lock while another wants it. Python's default,
# 5 ms, would delay every small thing that a step does by as much while a plan is traced.
_SWITCH_INTERVAL_S = 0.0005


class Warm(Protocol):
    """Fills the caches for a target, outside this process; failures only cost time."""

    def __call__(
        self,
        target: Target,
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> None: ...


@dataclass(eq=False)
class Ahead:
    """One plan on its way.

    Attributes:
        urgent: whether somebody waits for it.
        idle: whether no step runs meanwhile, so that another process would only be a detour.
        seconds: from the start of the work on it to its end.
        compiled, error: what came of it.
    """

    key: Key
    urgent: bool
    idle: bool = False
    seconds: float = 0.0
    compiled: Ready | None = None
    error: Exception | None = None
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class AheadCompiler:
    """Compiles for targets in the background and keeps what it compiled.

    Args:
        recompile: plans and compiles for a target.
        warm: see the module.
        elsewhere: for targets that this process cannot reach.
        capacity: programs kept; the least recently used goes first.
    """

    def __init__(
        self,
        recompile: Recompile,
        warm: Warm | None = None,
        elsewhere: Elsewhere | None = None,
        *,
        capacity: int = 6,
    ) -> None:
        self._recompile = recompile
        self._warm = warm
        self._elsewhere = elsewhere
        self._capacity = capacity
        self._kept: dict[Key, Ready] = {}
        self._failed: dict[Key, Exception] = {}
        self._failures: list[tuple[Target, Exception]] = []
        self._running: Program | None = None
        self._to_plan: list[Program] = []  # kept programs that do not know yet how the state comes to them
        self._lock = threading.Condition()
        self._wanted: Ahead | None = None
        self._queue: list[Key] = []
        self._current: Ahead | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, target: Target, devices: Sequence[int] | None, *, idle: bool = False) -> Ahead:
        """Begin with this one at once; it replaces the one wanted before.

        Args:
            idle: no step runs until it is done.
        """
        key = _key(target, devices)
        with self._lock:
            self._cancel_wanted()
            work = Ahead(key, urgent=True, idle=idle)
            if key in self._kept:
                self._kept[key] = work.compiled = self._kept.pop(key)
                work.done.set()
                return work
            if self._current is not None and self._current.key != key:
                self._current.cancelled = True
            elif self._current is not None:
                # Already under way: urgent from now on, which ends the low priority of its other process.
                self._current.urgent, self._current.idle, self._current.cancelled = True, idle, False
                self._wanted = self._current
                return self._current
            self._wanted = work
            self._wake()
        return work

    def prepare(self, targets: Sequence[Target]) -> None:
        """Compile these when nothing is wanted, likeliest first; replaces those named before."""
        with self._lock:
            keys = [_key(target, None) for target in targets[: self._capacity]]
            self._queue = [k for k in keys if k not in self._kept and k not in self._failed]
            if self._queue:
                self._wake()

    def keep(self, compiled: Compiled, devices: Sequence[int] | None) -> None:
        """Keep a program that is compiled, so that a swap to it compiles nothing."""
        with self._lock:
            self._keep(_key(compiled.program.plan.grid, devices), compiled)

    def run_under(self, program: Program) -> None:
        """Say which program runs, from which the state will come."""
        with self._lock:
            self._running = program
            programs = [ready.program for ready in self._kept.values() if isinstance(ready, Compiled)]
            self._to_plan = [other for other in programs if other is not program]
            if self._to_plan:
                self._wake()

    def drop(self) -> None:
        """Nothing is wanted any more."""
        with self._lock:
            self._cancel_wanted()

    @property
    def prepared(self) -> tuple[Key, ...]:
        """What a swap would find compiled."""
        with self._lock:
            return tuple(self._kept)

    def take_failures(self) -> list[tuple[Target, Exception]]:
        """What could not be prepared since the last call."""
        with self._lock:
            taken, self._failures = self._failures, []
        return taken

    def close(self) -> None:
        """End the thread after what it is doing, without waiting for it."""
        with self._lock:
            self._closed = True
            self._queue = []
            self._cancel_wanted()
            if self._current is not None:
                self._current.cancelled = True
            self._lock.notify_all()

    def _cancel_wanted(self) -> None:
        if self._wanted is not None:
            self._wanted.cancelled = True
            self._wanted = None

    def _keep(self, key: Key, compiled: Ready) -> None:
        self._kept.pop(key, None)
        self._kept[key] = compiled
        while len(self._kept) > self._capacity:
            del self._kept[next(iter(self._kept))]

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="compile-ahead", daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def _next(self) -> Ahead | Program | None:
        """What to do next: compile, or plan how the state comes to a program; ``None`` is the end."""
        with self._lock:
            self._current = None
            while not self._closed:
                if self._wanted is not None and not self._wanted.done.is_set():
                    self._current = self._wanted
                    return self._current
                if self._to_plan:
                    return self._to_plan.pop()
                if self._queue:
                    self._current = Ahead(self._queue.pop(0), urgent=False)
                    return self._current
                self._lock.wait()
            return None

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            if not isinstance(work, Ahead):
                with suppress(Exception):  # planned again, and reported, when the state is to move
                    work.plan_move(self._running)
                continue
            began_s = time.perf_counter()
            compiled, error = None, None
            try:
                compiled = self._compile(work)
            except Exception as caught:  # reported by who wanted it; the plan that runs is still good
                error = caught
            self._finish(work, compiled, error, time.perf_counter() - began_s)

    def _finish(self, work: Ahead, compiled: Ready | None, error: Exception | None, seconds: float) -> None:
        with self._lock:
            work.seconds, work.compiled, work.error = seconds, compiled, error
            if compiled is not None:
                self._keep(work.key, compiled)
                # Under its grid, too, where only an allocation was asked for.
                self._keep(_key(compiled.plan.grid, work.key[1]), compiled)
            elif error is None:
                work.error = InterruptedError("another request came")
            elif not work.urgent:
                self._failed[work.key] = error
                self._failures.append((work.key[0], error))
            work.done.set()

    def _compile(self, work: Ahead) -> Ready | None:
        target, devices = work.key
        running: Any = self._running
        elsewhere, warm = self._elsewhere, self._warm
        if elsewhere is not None and elsewhere.why(target, devices):
            return _hurried(
                work,
                lambda urgent, stale: elsewhere.rehearse(
                    target,
                    devices,
                    num_microbatches=running.plan.num_microbatches,
                    urgent=urgent,
                    cancelled=stale,
                ),
                lambda: False,
            )
        if warm is not None and running is not None:
            _hurried(
                work,
                lambda urgent, stale: warm(
                    target,
                    devices,
                    num_microbatches=running.plan.num_microbatches,
                    urgent=urgent,
                    cancelled=stale,
                ),
                lambda: work.idle,
            )
        if work.cancelled:
            return None
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_INTERVAL_S))
        try:
            compiled = self._recompile(target, devices)
            # What somebody waits for is not run before its turn: the steps beside it would be slowed by as much.
            if not work.urgent and not work.cancelled:
                compiled.program.warm_up()
            running = self._running
            if running is not None and not work.cancelled:
                compiled.program.plan_move(running)
            return compiled
        finally:
            sys.setswitchinterval(before)


def _hurried(work: Ahead, run: Callable[[bool, Callable[[], bool]], T], needless: Callable[[], bool]) -> T | None:
    """Run with the work's urgency, and again if it has become urgent meanwhile; not where it is needless."""
    began: bool | None = None
    result: T | None = None

    def is_stale() -> bool:
        return work.cancelled or needless() or work.urgent != began

    while is_stale() and not work.cancelled and not needless():
        began = work.urgent
        result = run(began, is_stale)
    return result


def _key(target: Target, devices: Sequence[int] | None) -> Key:
    return target, None if devices is None else tuple(devices)
