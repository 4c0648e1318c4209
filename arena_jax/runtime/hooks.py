"""Scheduler hooks that need no scheduler."""

from collections.abc import Iterable

from arena_jax.errors import UsageError
from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport, Stop


class ScriptedHook:
    """Asks for grids at given steps: ``["5: cpu:4/s2", "15: cpu:2", "20: stop"]``.

    A grid with ``/sS`` fixes the stages, a bare allocation leaves them to the job; ``pause`` and
    ``stop`` are words of their own. A step that has passed (after a resume) counts at once, so that
    the job runs where the script says it should be by then; of several, the last.
    """

    def __init__(self, script: Iterable[str]) -> None:
        self._script = read_script(script)
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

    def prepare(self) -> list[GridShape]:
        """The grids still to come."""
        return [request.target for _, request in self._script if isinstance(request.target, GridShape)]


def read_script(script: Iterable[str]) -> list[tuple[int, Request]]:
    """The lines as (step, request), in the order of their steps; raise :class:`UsageError` for a bad one."""
    return sorted((_parse(line) for line in script), key=lambda entry: entry[0])


def _parse(line: str) -> tuple[int, Request]:
    step, colon, target = (part.strip() for part in line.partition(":"))
    if not colon or not step.isdecimal() or not target:
        raise UsageError(f"hook.script line {line!r} is not STEP: GRID", hint="write 5: cpu:4/s2")
    reason = f"script: {line}"
    if target in ("pause", "stop"):
        return int(step), Request(target=Pause() if target == "pause" else Stop(), reason=reason)
    return int(step), Request(target=parse_target(target), reason=reason)


def parse_target(text: str) -> GridShape | Allocation:
    """Read ``cpu:4/s2`` as a grid shape and ``cpu:4`` as an allocation."""
    return GridShape.parse(text) if "/" in text else Allocation.parse(text)
