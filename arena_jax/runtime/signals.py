"""SIGINT and SIGTERM as a wish to stop at the next step boundary."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is noted in ``received``; a second one leaves at once.

    For the second, ``leave(signal_number)`` is called; without it the handlers that were there
    before act again, so that Ctrl-C raises ``KeyboardInterrupt`` as usual. Outside the main thread,
    where Python allows no handlers, nothing is installed.
    """

    def __init__(self, leave: Callable[[int], Any] | None = None) -> None:
        self.received: signal.Signals | None = None
        self._leave = leave
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and self._leave is not None:
            self._leave(number)
        self.received = signal.Signals(number)
        if self._leave is None:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None: installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
