"""What a training says of itself, read from its event log while it is written."""

import statistics
from collections import deque
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.events import FILE_NAME, read_from
from arena_jax.grid import GridShape
from arena_jax.service.executor import Progress
from arena_jax.service.job import Job
from arena_jax.service.store import Point

# The step time is a median over the last steps under one plan, but for the first: some are in flight before any
# is waited for. It is known after a few.
_WINDOW, _SKIPPED, _FEWEST = 15, 3, 4
# Clocks of the event and of the launch may differ by rounding.
_SLACK_S = 1.0


class RunReader:
    """Follows the newest run directory of a job from one launch on.

    Args:
        root: where the job's run directories are.
        run: number of the launch; ``since`` its unix time. What is older is of launches before.

    Attributes:
        folder: the run directory, once there is one.
        done: whether the training said that it came to its end.
        seen_at: unix time of the latest sign of life.
        asked_at, asked_step: when the training was last asked itself, and the step that it named.
    """

    def __init__(self, root: Path, *, run: int, since: float) -> None:
        self.run = run
        self.folder: Path | None = None
        self.done = False
        self.seen_at = 0.0
        self.asked_at = 0.0
        self.asked_step: int | None = None
        self._root, self._since = root, since - _SLACK_S
        self._offset = 0
        self._step: int | None = None
        self._loss: float | None = None
        self._grid = ""
        self._num_devices = 0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._num_steps = 0
        self._stall_s: float | None = None
        self._points: list[Point] = []

    def read(self) -> None:
        """Take in what was written since the last time."""
        try:
            newest = max((p.parent for p in self._root.glob(f"*/{FILE_NAME}")), default=None)
        except OSError:
            return
        if newest is None:
            return
        if newest != self.folder:
            self.folder, self._offset = newest, 0
        while True:
            try:
                events, end = read_from(self.folder, self._offset)
            except ArenaError:
                return
            if end == self._offset:
                return
            self._offset = end
            for event in events:
                self._take(event)

    def progress(self) -> Progress | None:
        """What is known; the points are given once."""
        if self._step is None:
            return None
        points, self._points = tuple(self._points), []
        return Progress(
            step=self._step,
            loss=self._loss,
            step_time_s=statistics.median(self._times) if len(self._times) >= _FEWEST else None,
            grid=self._grid,
            num_devices=self._num_devices,
            seen_at=self.seen_at,
            stall_s=self._stall_s,
            points=points,
        )

    def _take(self, event: dict[str, Any]) -> None:
        at = event.get("time")
        if not isinstance(at, int | float) or at < self._since:
            return
        self.seen_at = float(at)
        kind = event["kind"]
        try:
            if kind == "plan":
                self._grid = str(event["grid"])
                self._num_devices = GridShape.parse(self._grid, None).num_devices
                self._times.clear()
                self._num_steps = 0
            elif kind == "step":
                self._step, self._loss = int(event["step"]), float(event["loss"])
                self._num_steps += 1
                if self._num_steps > _SKIPPED:
                    self._times.append(float(event["step_time_s"]))
                self._points.append((self._step, float(at), self._loss, float(event["step_time_s"])))
            elif kind == "swap":
                self._stall_s = float(event["stall_s"])
            elif kind == "run_end":
                self.done = event.get("stop_reason") in ("done", "data_ended")
        except (KeyError, TypeError, ValueError):
            return


class RunReaders:
    """A reader for each job, of its latest launch."""

    def __init__(self) -> None:
        self._readers: dict[int, RunReader] = {}

    def of(self, job: Job, root: Path) -> RunReader:
        """The job's reader; ``root`` is where its run directories are."""
        reader = self._readers.get(job.number)
        if reader is None or reader.run != job.run:
            reader = self._readers[job.number] = RunReader(root, run=job.run, since=job.launched_at)
        return reader

    def forget(self, job: Job) -> None:
        """It is launched anew."""
        self._readers.pop(job.number, None)
