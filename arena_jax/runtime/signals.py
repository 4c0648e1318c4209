"""SIGINT and SIGTERM as a wish to stop at the next boundary between steps or phases.

An exception raised by a handler would come up anywhere, inside jax's callbacks too, where it is lost
or leaves threads behind that crash at exit. So the handler only notes, and who can stop asks.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from arena_jax.errors import EXIT_RESUMABLE


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is noted in ``received``; a second one leaves at once.

    For the second, ``leave(signal_number)`` is called; without it the handlers that were there
    before act again, so that Ctrl-C raises ``KeyboardInterrupt`` as usual. Outside the main thread,
    where Python allows no handlers, nothing is installed. May be entered again while entered.

    Args:
        leave: see above; should not return.
        noted: called in the handler with the first signal, to tell who sent it.
    """

    def __init__(
        self, leave: Callable[[int], Any] | None = None, *, noted: Callable[[signal.Signals], Any] | None = None
    ) -> None:
        self.received: signal.Signals | None = None
        self._leave = leave
        self._noted = noted
        self._depth = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._restore()

    def check(self, phase: str) -> None:
        """End here if a signal came during ``phase``, before which there is nothing to save.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with the code of a run that can be started again.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt(f"SIGINT while {phase}")
        if self.received is not None:
            raise SystemExit(EXIT_RESUMABLE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and self._leave is not None:
            self._leave(number)
        if self.received is None and self._noted is not None:
            self._noted(signal.Signals(number))
        self.received = signal.Signals(number)
        if self._leave is None:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None: installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
