"""Scheduler hooks that need no scheduler."""

import signal
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from arena_jax.errors import UsageError
from arena_jax.grid import Allocation, GridShape, Request, StepReport, as_target


class ScriptedHook:
    """Asks for grids at given steps: ``["5: cpu:4/s2", "15: cpu:2", "20: stop"]``.

    The grids are compiled ahead from the start, and the job waits for what is not ready at its step, so
    that a script always does the same; with ``wait=False`` it trains on meanwhile, as with a scheduler.
    A grid with ``/sS`` fixes the stages, a bare allocation leaves them to the job; ``pause`` and ``stop``
    are words of their own. A step that has passed (after a resume) counts at once, so that the job runs
    where the script says it should be by then; of several, the last.
    """

    def __init__(self, script: Iterable[str], *, wait: bool = True) -> None:
        self._script = [(step, replace(request, wait=wait)) for step, request in read_script(script)]
        self.reports: list[StepReport] = []

    def poll(self, step: int) -> Request | None:
        """The latest line whose step has come and that was not given yet."""
        given: Request | None = None
        while self._script and self._script[0][0] <= step:
            given = self._script.pop(0)[1]
        return given

    def report(self, report: StepReport) -> None:
        """Keep the latest report."""
        self.reports = [report]

    def prepare(self) -> list[GridShape | Allocation]:
        """The grids and allocations still to come."""
        targets = [request.target for _, request in self._script]
        return [target for target in targets if isinstance(target, GridShape | Allocation)]


class FileHook:
    """Asks for what a file says whenever the process gets SIGUSR1: a grid, an allocation, ``pause`` or ``stop``.

    The first line that is neither empty nor a comment (``#``) counts. Must be made on the main thread.

    Args:
        path: the file; it need not exist before the first signal.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._asked = threading.Event()
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("a FileHook listens to a signal and must be made on the main thread")
        self._before: Any = signal.signal(signal.SIGUSR1, self._note)

    def poll(self, step: int) -> Request | None:
        """What the file says, once after each signal."""
        if not self._asked.is_set():
            return None
        self._asked.clear()
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"SIGUSR1: cannot read {str(self.path)!r}: {why}") from error
        lines = [line.strip() for line in text.splitlines()]
        wanted = next((line for line in lines if line and not line.startswith("#")), "")
        if not wanted:
            raise UsageError(f"SIGUSR1: {str(self.path)!r} names no grid", hint="write a line like cpu:4/s2")
        return Request(target=as_target(wanted), reason=f"SIGUSR1: {self.path.name}")

    def report(self, report: StepReport) -> None:
        """Nobody listens."""

    def prepare(self) -> list[GridShape]:
        """Nothing is known before it is asked for."""
        return []

    def close(self) -> None:
        """Let the signal do what it did before."""
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()


def read_script(script: Iterable[str]) -> list[tuple[int, Request]]:
    """The lines as (step, request), in the order of their steps; raise :class:`UsageError` for a bad one."""
    return sorted((_parse(line) for line in script), key=lambda entry: entry[0])


def _parse(line: str) -> tuple[int, Request]:
    step, colon, target = (part.strip() for part in line.partition(":"))
    if not colon or not step.isdecimal() or not target:
        raise UsageError(f"hook.script line {line!r} is not STEP: GRID", hint="write 5: cpu:4/s2")
    return int(step), Request(target=as_target(target), reason=f"script: {line}")
