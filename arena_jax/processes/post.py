"""What a worker of a group knows of its supervisor: its line, signs of life, and the hook behind it. No jax."""

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from arena_jax.control import read_request
from arena_jax.grid import Allocation, GridShape, Request, StepReport, parse_target
from arena_jax.processes.line import Line, Message
from arena_jax.processes.messages import report_to_json

BEAT_S = 1.0


class Watched(Protocol):
    """Whose ``step`` tells how far the training is."""

    step: int


class Post:
    """Reads the line on a thread, sorts what comes, and says that this process is alive.

    Attributes:
        watched: whose ``step`` tells how far the training is; without, :meth:`note` does.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.watched: Watched | None = None
        self.step = -1
        self._boxes: dict[str, SimpleQueue[Message]] = {
            kind: SimpleQueue() for kind in ("go", "request", "rehearsed", "prepare", "bye")
        }
        # Before anything of jax is imported, which takes seconds.
        threading.Thread(target=self._read, name="supervisor-line", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def note(self, event: dict[str, Any]) -> None:
        """Take the step from an event of the training."""
        if event["kind"] == "step":
            self.step = event["step"]

    def wait(self, kind: str, timeout_s: float | None = None) -> Message | None:
        """The next message of a kind; ``None`` when the time is over."""
        try:
            return self._boxes[kind].get(timeout=timeout_s)
        except Empty:
            return None

    def latest(self, kind: str) -> Message | None:
        """The last message of a kind that has come since the last call, if any."""
        found = None
        with suppress(Empty):
            while True:
                found = self._boxes[kind].get_nowait()
        return found

    def _read(self) -> None:
        for message in self.line.messages():
            if message.get("do") in self._boxes:
                self._boxes[message["do"]].put(message)
        # Nobody would restart or stop this process any more.
        os._exit(1)

    def _beat(self) -> None:
        while True:
            step = self.step if self.watched is None else self.watched.step
            self.line.send(say="beat", step=step)
            time.sleep(BEAT_S)


class RelayHook:
    """The scheduler's half as the supervisor keeps it, which outlives this process."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._targets: list[GridShape | Allocation] = []

    def poll(self, step: int) -> Request | None:
        """The latest request that was not given yet."""
        message = self._post.latest("request")
        if message is None:
            return None
        return replace(read_request(message["request"]), id=message.get("id"))

    def report(self, report: StepReport) -> None:
        """Pass it on."""
        self._post.line.send(say="report", report=report_to_json(report))

    def prepare(self) -> list[GridShape | Allocation]:
        """What the supervisor's hook thinks likely."""
        message = self._post.latest("prepare")
        if message is not None:
            self._targets = [parse_target(text) for text in message["targets"]]
        return self._targets
