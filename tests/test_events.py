"""The event log: whole lines whatever happens to the writer, and a reader that bears the rest."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.errors import ArenaError
from arena_jax.events import EventLog, read_events, read_from

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _without_time(events):
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


@given(st.lists(st.dictionaries(st.text(min_size=1).map("f_{}".format), _JSON, max_size=3), max_size=6))
def test_events_read_back_as_written(tmp_path_factory, fields):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path) as log:
        for values in fields:
            log.emit("step", **values)
    assert _without_time(read_events(path)) == [{"kind": "step", **values} for values in fields]


def test_arrays_and_non_finite_numbers(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("step", loss=np.float32(1.5), shape=np.arange(2), bad=float("nan"), worse=float("-inf"), path=tmp_path)
    text = log.path.read_text()
    (event,) = read_events(tmp_path)
    assert (event["loss"], event["shape"], event["path"]) == (1.5, [0, 1], str(tmp_path))
    assert np.isnan(float(event["bad"]))
    assert float(event["worse"]) == -np.inf
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) == event


def test_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", step=1)
    with open(path, "ab") as file:
        file.write(b'{"time": 1, "kind": "st')
    with EventLog(path) as log:
        log.emit("step", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


@given(st.binary(max_size=200))
def test_reader_bears_any_bytes(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.write_bytes(noise)
    with EventLog(path) as log:
        log.emit("step", step=7)
    assert list(read_events(path))[-1]["step"] == 7


@given(st.integers(1, 400))
def test_reading_in_pieces_gives_every_event_once(tmp_path_factory, max_bytes):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path) as log:
        for step in range(20):
            log.emit("step", step=step, text="x" * step)
    found, offset = [], 0
    while True:
        events, end = read_from(path, offset, max_bytes=max_bytes)
        if end == offset:
            break
        found += [event["step"] for event in events]
        offset = end
    assert found == list(range(20))


def test_unfinished_line_is_left_for_later(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"step","step":1}\n{"kind":"st')
    events, end = read_from(path, 0)
    assert [event["step"] for event in events] == [1]
    with open(path, "ab") as file:
        file.write(b'ep","step":2}\n')
    assert [event["step"] for event in read_from(path, end)[0]] == [2]


def test_threads_do_not_mix_lines(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.emit("step", step=n, text="x" * 5000) for _ in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(event["step"] for event in read_events(tmp_path)) == sorted(list(range(4)) * 50)


def test_sigkill_loses_no_whole_event(tmp_path):
    code = (
        "import sys; from arena_jax.events import EventLog; log = EventLog(sys.argv[1]); step = 0\n"
        "while True: log.emit('step', step=step, text='x' * 500); print(step, flush=True); step += 1"
    )
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        seen = [int(process.stdout.readline()) for _ in range(200)][-1]
        os.kill(process.pid, signal.SIGKILL)
    steps = [event["step"] for event in read_events(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > seen


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(ArenaError, match="No space left on device"), EventLog(path) as log:
        log.emit("step", step=1)


def test_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArenaError, match="cannot open the event log"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_no_log_yet_reads_as_empty(tmp_path):
    assert list(read_events(tmp_path)) == []
