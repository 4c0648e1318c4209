"""Who may change a running training, and how: the socket, the file, and hooks in trouble. No jax here."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from arena_jax import control
from arena_jax.control import ControlSocket, ask, find_training, read_request
from arena_jax.errors import UsageError
from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport, Stop


def report(request_id: str | None, grid: str, state: str = "running", errors: tuple[str, ...] = ()) -> StepReport:
    return StepReport(
        step=7,
        num_steps=9,
        loss=1.0,
        step_time_s=0.1,
        estimated_step_time_s=None,
        samples_per_s=80.0,
        plan_id="p",
        grid=GridShape.parse(grid),
        state=state,
        request_id=request_id,
        errors=errors,
    )


@pytest.fixture
def hook(tmp_path: Path):
    made = ControlSocket(tmp_path)
    yield made
    made.close()


def test_a_request_goes_through_and_its_end_can_be_followed(hook: ControlSocket, tmp_path: Path) -> None:
    assert hook.poll(1) is None
    name = ask(tmp_path, {"target": "cpu:4/s2", "deadline_s": 30, "reason": "night"})["id"]
    request = hook.poll(2)
    assert request == Request(target=GridShape.parse("cpu:4/s2"), deadline_s=30.0, reason="night", id=name)
    assert hook.poll(3) is None
    hook.report(report(None, "cpu:4/s2"))  # of before the request was taken
    assert ask(tmp_path, {"state": name})["outcome"] == "pending"
    hook.report(report(name, "cpu:2", "preparing"))
    assert ask(tmp_path, {"state": name})["outcome"] == "pending"
    hook.report(report(name, "cpu:4/s2"))
    said = ask(tmp_path, {"state": name})
    assert (said["outcome"], said["grid"], said["step"]) == ("done", "cpu:4/s2", 7)


def test_a_refusal_and_a_replacement_are_told(hook: ControlSocket, tmp_path: Path) -> None:
    first = ask(tmp_path, {"target": "cpu:3"})["id"]
    second = ask(tmp_path, {"target": "pause"})["id"]
    assert ask(tmp_path, {"state": first})["outcome"] == "replaced"
    request = hook.poll(1)
    assert request is not None
    assert request.target == Pause()
    hook.report(report(second, "cpu:2", errors=("cannot",)))
    assert ask(tmp_path, {"state": second}) | {"outcome": "refused", "errors": ["cannot"]} == ask(
        tmp_path, {"state": second}
    )


def test_grids_to_prepare(hook: ControlSocket, tmp_path: Path) -> None:
    ask(tmp_path, {"prepare": ["cpu:8/s1", "cpu:4/s2"]})
    assert hook.prepare() == [GridShape.parse("cpu:8/s1"), GridShape.parse("cpu:4/s2")]
    with pytest.raises(UsageError, match="neither"):
        ask(tmp_path, {"prepare": ["many"]})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"target": "cpu"}, "neither an allocation nor a grid"),
        ({"target": "nope:4"}, "unknown device type 'nope'"),
        ({"target": "cpu:2/s4"}, "4 stages on 2 devices"),
        ({"target": "cpu:4", "devices": [0, 0, 1, 2]}, "needs 4 devices"),
        ({"target": "cpu:4", "devices": "all"}, "devices is 'all'"),
        ({"target": "cpu:4", "deadline_s": -1}, "deadline_s is -1"),
        ({"target": "cpu:4", "when": "now"}, "unknown key 'when'"),
        ({}, "no target"),
    ],
)
def test_bad_requests_are_refused_where_they_are_made(
    fields: dict[str, Any], match: str, hook: ControlSocket, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=match):
        read_request(fields)
    with pytest.raises(UsageError, match=match):
        ask(tmp_path, fields)
    assert hook.poll(1) is None


def test_targets_are_grids_allocations_and_words() -> None:
    assert read_request({"target": "cpu:4"}).target == Allocation.parse("cpu:4")
    assert read_request({"target": " stop "}).target == Stop()
    assert read_request({"target": "cpu:2", "devices": [2, 3], "wait": True}) == Request(
        target=Allocation.parse("cpu:2"), devices=(2, 3), wait=True
    )


@pytest.mark.parametrize("sent", [b"not json\n", b"[1]\n", b"x" * (1 << 17) + b"\n", b"\xff\n"])
def test_garbage_is_answered_and_the_socket_lives(sent: bytes, hook: ControlSocket, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(hook.path))
        try:
            client.sendall(sent)
            answer = json.loads(client.recv(4096))
            assert "one line of JSON" in answer["error"] or "JSON object" in answer["error"]
        except (BrokenPipeError, ConnectionResetError):
            pass  # it hung up on too long a line
    assert "id" in ask(tmp_path, {"target": "cpu:2"})


def test_only_the_owner_gets_in(hook: ControlSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook.path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patched:
        patched.setattr(control.os, "geteuid", lambda: 12345)  # both ends then see a foreign owner
        with pytest.raises(UsageError, match=r"belongs to user \d+, you are user 12345"):
            ask(tmp_path, {"target": "cpu:2"})
        with pytest.raises(UsageError, match="belongs to user"):
            ControlSocket(tmp_path / "..", hook.path)
    if os.geteuid() == 0:
        pytest.skip("the superuser may always connect, so a refused peer cannot be tried")
    monkeypatch.setattr(control.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(control, "_socket_of", lambda folder: hook.path)
    with pytest.raises(UsageError, match="may not resize"):
        ask(tmp_path, {"target": "cpu:2"})


def test_what_is_in_the_way(hook: ControlSocket, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another training listens"):
        ControlSocket(tmp_path, hook.path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no socket"):
        ControlSocket(tmp_path, tmp_path / "file")
    with socket.socket(socket.AF_UNIX) as left:  # by a killed training
        left.bind(str(tmp_path / "left"))
    again = ControlSocket(tmp_path / "..", tmp_path / "left")
    again.close()


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    hook = ControlSocket(deep)
    assert len(os.fsencode(hook.path)) < 100
    assert "id" in ask(deep, {"target": "cpu:2"})
    hook.close()
    assert not hook.path.exists()
    assert list(deep.iterdir()) == []


def test_a_training_that_has_ended_says_so(tmp_path: Path) -> None:
    ControlSocket(tmp_path).close()
    with pytest.raises(UsageError, match="no training listens"):
        find_training(tmp_path)
    (tmp_path / control.FILE_NAME).write_text(json.dumps({"socket": str(tmp_path / "gone")}))
    with pytest.raises(UsageError, match="no training listens"):
        ask(tmp_path, {"target": "cpu:2"})
    with pytest.raises(UsageError, match="no run directory"):
        find_training(tmp_path / "nowhere")


def test_the_newest_training_of_a_folder_is_found(tmp_path: Path) -> None:
    for name in ("20260101", "20260102"):
        (tmp_path / name).mkdir()
    hooks = [ControlSocket(tmp_path / name) for name in ("20260101", "20260102")]
    assert find_training(tmp_path) == tmp_path / "20260102"
    for hook in hooks:
        hook.close()


def test_a_file_is_read_at_the_signal(tmp_path: Path) -> None:
    from arena_jax.runtime.hooks import FileHook

    before = signal.getsignal(signal.SIGUSR1)
    file = tmp_path / "wanted"
    hook = FileHook(file)
    try:
        assert hook.poll(1) is None
        file.write_text("# tonight\n\ncpu:4/s2\ncpu:8\n")
        assert hook.poll(2) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        request = hook.poll(3)
        assert request is not None
        assert request.target == GridShape.parse("cpu:4/s2")
        assert hook.poll(4) is None
        for text, match in (("", "names no grid"), ("cpu:none", "neither")):
            file.write_text(text)
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(UsageError, match=match):
                hook.poll(5)
        file.unlink()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(UsageError, match="cannot read"):
            hook.poll(6)
    finally:
        hook.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_hook_that_blocks_is_named_and_left_alone_until_it_answers() -> None:
    from arena_jax.runtime.contract import LoopOptions
    from arena_jax.runtime.journal import Journal
    from arena_jax.runtime.scheduler_line import SchedulerLine

    gate, events = threading.Event(), []

    class Stuck:
        def poll(self, step: int) -> Any:
            gate.wait(20)
            return GridShape.parse("cpu:2")

        def report(self, report: StepReport) -> None:
            pass

        def prepare(self) -> list[GridShape]:
            return []

    line = SchedulerLine(
        Stuck(), LoopOptions(num_steps=1, items_per_step=1), Journal(None, [events.append]), timeout_s=0.05
    )
    began = time.monotonic()
    for step in range(100):
        assert line.poll(step) is None
    assert time.monotonic() - began < 5  # one time-out, not a hundred
    (warning,) = events
    assert "Stuck has not answered poll" in warning["message"]
    gate.set()
    answer = None
    until = time.monotonic() + 10
    while answer is None and time.monotonic() < until:
        answer = line.poll(101)
    assert answer == Request(target=GridShape.parse("cpu:2"))
    assert "answers again" in events[-1]["message"]
    line.close()
