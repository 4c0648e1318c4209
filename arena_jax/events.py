"""The event log: the truth of a run, one JSON object a line in ``RUNDIR/events.jsonl``.

Every event has ``time`` (unix seconds) and ``kind``. A line is written whole with one system call,
so a killed process loses at most the line it was writing, and readers skip such a torn line. Kinds
and their fields:

==============  =====================================================================================
run_start       run_id, name, recipe (YAML text), params (flat), command, versions, host
candidates      rows: [{grid, stages, dp_tp, num_microbatches, step_time_s, memory_bytes, feasible,
                reason, engine, objectives, plan_id, chosen}]
plan            step, plan_id, grid, plan (JSON), estimated_step_time_s, engine, reason; starts a segment
step            step, loss, metrics, step_time_s, rate, rate_unit, estimated_step_time_s
eval            step, metrics
checkpoint      step, path, seconds
request         step, target, reason: a change of plan that is being prepared
swap            step, from, to, reason, background_s, stall_s, prepared, move_s, moved_bytes, difference
relaunch        step, from, to, reason, why, background_s, prepared: the run goes on in other processes
restart         step, why, down_s: processes were lost, and others go on from a checkpoint
pause           step, asked: whether for a pause, or because a deadline came
warning         message
run_end         step, stop_reason, message
==============  =====================================================================================

Numbers that JSON does not know are the strings ``nan``, ``inf`` and ``-inf``; ``float()`` reads them.
This module imports no other part: runtime writes events; tracking, scheduler and command line read.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError

FILE_NAME = "events.jsonl"
# Under which trackers file a run, unless told otherwise.
EXPERIMENT = "arena-jax"

Event = dict[str, Any]


class EventLog:
    """Appends events to a file; safe to share between threads.

    Args:
        path: the file; it and its folder are made when missing. An existing log is continued.

    Raises:
        ArenaError: the file cannot be opened or written (read-only or full disk).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            # A writer that was killed inside a line left it open; close it, so that ours starts fresh.
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        except OSError as error:
            raise self._cannot("open", error) from error

    def emit(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it as written (plain JSON values)."""
        event: Event = {"time": time.time(), "kind": kind, **_plain(fields)}
        line = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            data = memoryview(b"\n" + line if self._torn else line)
            self._torn = True
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                raise self._cannot("write", error) from error
            self._torn = False
        return event

    def close(self) -> None:
        """Close the file; the log must not be used afterwards. Closing twice is allowed."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cannot(self, verb: str, error: OSError) -> ArenaError:
        return ArenaError(
            f"cannot {verb} the event log {str(self.path)!r}: {error.strerror}",
            hint="choose a run folder on a writable disk with room",
        )


def read_events(path: str | Path) -> Iterator[Event]:
    """All whole events of a log (or of a run folder), in order; nothing when there is no log yet."""
    offset = 0
    while True:
        events, end = read_from(path, offset)
        yield from events
        if end == offset:
            return
        offset = end


def read_from(path: str | Path, offset: int, *, max_bytes: int = 1 << 20) -> tuple[list[Event], int]:
    """Return the whole events that start at byte ``offset`` or later, and the offset to go on from.

    Reads about ``max_bytes``, always at least one line. A last line without its newline is left for
    the next call; a line that is no event is skipped.
    """
    log = log_path(path)
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
            if b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise ArenaError(f"cannot read the event log {str(log)!r}: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    events = [event for line in whole.splitlines() if (event := _parse(line)) is not None]
    return events, offset + len(whole)


def log_path(path: str | Path) -> Path:
    """The log file itself, given the file or the run folder that holds it."""
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and jax scalars and arrays
        return _plain(value.tolist())
    return str(value)
