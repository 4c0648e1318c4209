"""The pump between a run's event log and a tracker: one thread beside the loop, or ``sync`` later.

The log is the only queue. The pump reads whole lines from the byte it had reached, hands them to the
tracker, and then stores the new position with the tracker's state in ``RUNDIR/tracking.json``. So the
emitter never waits, memory stays bounded, and what a dead server missed is replayed from the same
position by the same code. A crash between the two leaves events to be sent again; the tracker makes
that harmless (see :mod:`arena_jax.tracking.mlflow`).
"""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.events import Event, EventLog, log_path, read_from
from arena_jax.tracking.protocol import StatefulTracker, Tracker

STATE_FILE_NAME = "tracking.json"
POLL_S = 2.0
CLOSE_TIMEOUT_S = 30.0
FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 120.0

_UNSENT: Mapping[str, Any] = {"offset": 0, "tracker": {}}

logger = logging.getLogger(__name__)


class Sink:
    """Feeds ``tracker`` from ``log`` on one daemon thread, started at once.

    A tracker that fails is offered the same events again after a pause that grows; the first failure
    is reported once to ``on_warning`` and nothing else is disturbed.

    Args:
        tracker: where the events go.
        log: the run's event log; its folder also holds the sink's position.
        on_warning: called from the sink's thread with one line of text; by default the line becomes
            a log record.
    """

    def __init__(
        self, tracker: Tracker, log: EventLog | Path, *, on_warning: Callable[[str], object] | None = None
    ) -> None:
        self._pump = _Pump(tracker, log.path if isinstance(log, EventLog) else log_path(log))
        self._on_warning = logger.warning if on_warning is None else on_warning
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="arena-jax-tracking", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the tracker took everything it was offered last."""
        return not self._failed

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Send what is left and stop; return whether all of it arrived.

        Waits at most ``timeout_s``. When some events did not arrive, says once how to send them.
        """
        self._closing.set()
        self._thread.join(timeout_s)
        done = not self._thread.is_alive() and self._pump.finished
        if not done:
            folder = self._pump.log.parent
            self._on_warning(f"not all events reached the tracker; nothing is lost: arena-jax track sync {folder}")
        return done

    def _run(self) -> None:
        pause_s = FIRST_RETRY_S
        try:
            with _locked(self._pump.log.parent):
                self._pump.store()  # so that a sync knows the tracker even if it never answers
                while True:
                    last_round = self._closing.is_set()
                    try:
                        self._pump.drain()
                        self._failed, pause_s = False, FIRST_RETRY_S
                    except Exception as error:  # whatever a tracker raises must not reach the run
                        self._report(error)
                        if not last_round:
                            self._closing.wait(pause_s)
                            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                            continue
                    if last_round:
                        break
                    self._closing.wait(POLL_S)
                self._pump.close()
        except ArenaError as error:  # another process sends this run already
            self._report(error)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._failed:
            self._on_warning(
                f"tracking failed, the run goes on and the event log keeps everything: {short_reason(error)}"
            )
        self._failed = True


def sync(run_dir: str | Path, tracker: Tracker, *, from_start: bool = False) -> int:
    """Send the events of a run that its tracker has not seen, each exactly once; return how many.

    ``from_start`` forgets what was sent: for a tracker that is another one than before.

    Raises:
        ArenaError: there is no event log, or a running process is sending it already.
    """
    log = log_path(run_dir)
    if not log.is_file():
        raise ArenaError(f"no event log at {str(log)!r}", hint="name the folder that holds events.jsonl")
    with _locked(log.parent):
        pump = _Pump(tracker, log, from_start=from_start)
        num_sent = pump.drain()
        pump.close()
    return num_sent


def stored_state(run_dir: str | Path) -> dict[str, Any]:
    """The tracker's state as stored beside the log of a run; empty when nothing was ever sent."""
    state = _load(log_path(run_dir).parent / STATE_FILE_NAME)["tracker"]
    assert isinstance(state, dict)
    return state


class _Pump:
    """Position in a log and the tracker behind it. Not thread-safe; one owner at a time."""

    def __init__(self, tracker: Tracker, log: Path, *, from_start: bool = False) -> None:
        self.log = log
        self.finished = False
        self._tracker = tracker
        self._position = log.parent / STATE_FILE_NAME
        stored = _UNSENT if from_start else _load(self._position)
        self._offset: int = stored["offset"]
        self._opened = False
        if isinstance(tracker, StatefulTracker) and stored["tracker"]:
            tracker.state = stored["tracker"]

    def drain(self) -> int:
        """Send everything the log holds beyond the position; return the number of events sent.

        What is appended meanwhile waits for the next call: a call of the tracker costs about the same
        for one event as for twenty.
        """
        size = self.log.stat().st_size if self.log.exists() else 0
        self.finished = False
        num_sent = 0
        while True:
            events, end = read_from(self.log, self._offset) if self._offset < size else ([], self._offset)
            if end == self._offset:
                self.finished = True
                return num_sent
            for group in _runs(events):
                self._send(group)
            num_sent += len(events)
            self._offset = end
            self.store()

    def close(self) -> None:
        if self._opened:
            self._tracker.close()
            self.store()

    def _send(self, group: list[Event]) -> None:
        if group[0]["kind"] == "run_start":
            self._tracker.open(group[0])
            self._opened = True
        elif not self._opened:
            start = self._last_start()
            if start is None:
                return  # a log without a beginning names no run to send to
            self._tracker.open(start)
            self._opened = True
        self._tracker.write(group)

    def _last_start(self) -> Event | None:
        """The ``run_start`` that the events at the position belong to."""
        start, offset = None, 0
        while offset < self._offset:
            events, end = read_from(self.log, offset, max_bytes=min(1 << 20, self._offset - offset))
            start = next((e for e in reversed(events) if e["kind"] == "run_start"), start)
            if end == offset:
                break
            offset = end
        return start

    def store(self) -> None:
        """Write position and tracker state beside the log."""
        state = self._tracker.state if isinstance(self._tracker, StatefulTracker) else {}
        text = json.dumps({"offset": self._offset, "tracker": state}, indent=1)
        scratch = self._position.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(text + "\n", encoding="utf-8")
        scratch.replace(self._position)


def _runs(events: list[Event]) -> Iterator[list[Event]]:
    """Split at every ``run_start``, which begins its group."""
    group: list[Event] = []
    for event in events:
        if event["kind"] == "run_start" and group:
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _load(path: Path) -> Mapping[str, Any]:
    """Position and state; from the start again when the file is missing or damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        offset, tracker = stored["offset"], stored["tracker"]
        if isinstance(offset, int) and offset >= 0 and isinstance(tracker, dict):
            return {"offset": offset, "tracker": tracker}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return _UNSENT


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's sending lock; the kernel lets it go when the process dies."""
    with open(run_dir / f"{STATE_FILE_NAME}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ArenaError(
                f"the events of {str(run_dir)!r} are being sent by another process",
                hint="a running training sends them itself; sync it when it has ended",
            ) from error
        yield


def short_reason(error: Exception) -> str:
    """One line of at most 160 characters that says what a tracker's exception is about."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # HTTP clients append the whole chain of their inner exceptions.
    return lines[0].partition(" with exception ")[0].partition(" (Caused by")[0][:160]
