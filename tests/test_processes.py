"""Jobs that span processes: launch, agreement between processes, and whole groups of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.cli import main
from arena_jax.data import SampleLoader
from arena_jax.errors import UsageError
from arena_jax.events import read_events
from arena_jax.processes.launch import Launch, detect_launch, first_host
from arena_jax.processes.states import HandedOver, States
from arena_jax.runtime.checkpoint_info import complete_steps
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.peers import Meeting, PeerLostError, Peers

# Who started this process.

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "4096",
}


def test_launch_of_srun() -> None:
    assert detect_launch(SRUN) == Launch(rank=3, num_processes=8, coordinator="gpu07:61440", source="srun")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A batch script or an salloc shell: some of the variables, and one process.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
    ],
)
def test_no_launch(environment: dict[str, str]) -> None:
    assert detect_launch(environment) is None


@pytest.mark.parametrize("prefix", ["ARENA_JAX", "JAX"])
def test_launch_of_variables(prefix: str) -> None:
    address = f"{prefix}_COORDINATOR" + ("_ADDRESS" if prefix == "JAX" else "")
    given = {f"{prefix}_PROCESS_ID": "1", f"{prefix}_NUM_PROCESSES": "2", address: "[::1]:77"}
    launch = detect_launch(SRUN | given)
    assert launch is not None
    assert (launch.rank, launch.num_processes, launch.coordinator) == (1, 2, "[::1]:77")
    assert not launch.watched
    watched = detect_launch(given | {"ARENA_JAX_WATCHED": "1"})
    assert watched is not None
    assert watched.watched


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ARENA_JAX_PROCESS_ID": ""}, "without ARENA_JAX_PROCESS_ID"),
        ({"ARENA_JAX_PROCESS_ID": "2"}, "process 2 of 2"),
        ({"ARENA_JAX_NUM_PROCESSES": "two"}, "'two'"),
        ({"ARENA_JAX_COORDINATOR": "here"}, "'here'"),
    ],
)
def test_bad_launch(change: dict[str, str], said: str) -> None:
    good = {"ARENA_JAX_PROCESS_ID": "1", "ARENA_JAX_NUM_PROCESSES": "2", "ARENA_JAX_COORDINATOR": "a:1"}
    with pytest.raises(UsageError, match=said):
        detect_launch(good | change)


@given(
    name=st.text("ab0-", min_size=1), tails=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(",-")), min_size=1)
)
@settings(max_examples=30)
def test_first_host(name: str, tails: list[tuple[int, str]]) -> None:
    assert first_host(f"{name},other") == name
    inside = "".join(f"{number:02}{separator}" for number, separator in tails)[:-1]
    assert first_host(f"{name}[{inside}]-ib,other[1-2]") == f"{name}{tails[0][0]:02}-ib"


# What processes agree on.


class Board:
    """The key-value store, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._values, f"{key} was written twice"
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def peek(self, key: str) -> str | None:
        with self._changed:
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            del self._values[key]


def together(count: int, do: Callable[[Peers], Any], silence_s: float = 20.0) -> list[Any]:
    board = Board()
    with ThreadPoolExecutor(count) as pool:
        peers = [Peers(board, rank, count, one_runtime=True, silence_s=silence_s) for rank in range(count)]
        return [future.result(30) for future in [pool.submit(do, p) for p in peers]]


@given(
    wishes=st.dictionaries(st.integers(0, 11), st.sampled_from(["stopped", "relaunch", "paused"]), max_size=4),
    first=st.integers(0, 100),
    step_time_s=st.sampled_from([0.0, 0.01, 0.1, 2.0]),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.001]), min_size=3, max_size=3),
)
@settings(max_examples=30)
def test_every_process_does_the_same_at_the_same_step(
    wishes: dict[int, str], first: int, step_time_s: float, delays: list[float]
) -> None:
    def run(peers: Peers) -> list[tuple[int, str]]:
        done, step = [], first
        while step < first + 12:
            wish = wishes.get(step - first) if peers.leads and not peers.deciding else None
            decision = peers.at_boundary(step, wish, step_time_s=step_time_s)
            if decision is not None:
                done.append((step, decision))
                if decision == "stopped":
                    break
                if decision == "relaunch":
                    continue  # the hand-over failed: all stay where they are
            time.sleep(delays[peers.rank])
            step += 1
        return done

    leader, *others = together(3, _once(run))
    assert all(other == leader for other in others)
    if wishes and step_time_s >= 2.0 and min(wishes) < 11:
        assert leader, "a lease of one step delays a decision by one step"


def _once(run: Callable[[Peers], list[tuple[int, str]]]) -> Callable[[Peers], list[tuple[int, str]]]:
    def limited(peers: Peers) -> list[tuple[int, str]]:
        at_boundary = peers.at_boundary
        asked: set[int] = set()

        def once(step: int, wish: str | None = None, *, step_time_s: float = 0.0) -> str | None:
            wish = None if step in asked else wish
            asked.add(step)
            return at_boundary(step, wish, step_time_s=step_time_s)

        peers.at_boundary = once  # type: ignore[method-assign]
        return run(peers)

    return limited


def test_share_and_votes() -> None:
    def run(peers: Peers) -> list[Any]:
        said = []
        for n in range(40):  # more than the board keeps; votes hold the processes together, as saves do
            said.append(peers.share({"number": n} if peers.leads else None))
            assert n % 10 or peers.unanimous(True)
        votes = [peers.unanimous(True), peers.unanimous(peers.rank != 2), peers.unanimous(peers.rank != 0)]
        return [said[-1], *votes]

    assert together(3, run) == [[{"number": 39}, True, False, False]] * 3


def test_a_silent_peer_is_lost() -> None:
    def run(peers: Peers) -> str:
        if peers.leads:
            return ""
        with pytest.raises(PeerLostError, match="heard nothing") as caught:
            peers.share()
        return str(caught.value.exit_code)

    assert together(2, run, silence_s=0.2) == ["", "75"]


def test_one_failure_ends_the_meeting_of_all() -> None:
    board = Board()

    def run(rank: int) -> str:
        meeting = Meeting(board, "save/1", rank, 3)
        if rank == 1:
            meeting.wait("written", 20)
            meeting.fail("no space left")
            return ""
        try:  # who looks again late hears of it at the first place
            meeting.wait("written", 20)
            meeting.wait("committed", 20)
        except PeerLostError as lost:
            return str(lost)
        return "went on"

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(run, range(3)))
    assert said == ["process 1: no space left", "", "process 1: no space left"]


# Rows of the global batch.


class Counted:
    """Samples that know which of them were read."""

    num_samples, fingerprint = 23, "counted"

    def __init__(self) -> None:
        self.read_ids: list[int] = []

    def read(self, ids: Any, epochs: Any) -> dict[str, Any]:
        self.read_ids += ids.tolist()
        return {"x": ids * 100 + epochs, "scale": np.float32(2)}


def test_a_process_reads_its_own_rows_only() -> None:
    whole, source = SampleLoader(Counted(), global_batch=6, seed=3), Counted()
    feed = Feed(SampleLoader(source, global_batch=6, seed=3))
    rows = np.array([1, 2, 5])
    feed.keep_rows(rows)
    expected = [next(whole)["x"][rows] for _ in range(8)]
    found = [feed.next()["x"] for _ in range(8)]
    np.testing.assert_array_equal(found, expected)
    assert len(source.read_ids) == 8 * 3
    assert feed.position() == whole.get_state()


def test_rows_of_a_loader_that_gives_whole_batches() -> None:
    feed = Feed(SampleLoader(Counted(), global_batch=6, seed=3))
    feed.peek()
    feed.keep_rows(np.array([0, 4]))
    batch = feed.next()
    assert (batch["x"].shape, batch["scale"]) == ((2,), 2)


# Whole groups.


def start(tmp_path: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "arena_jax", "train", "tests.toy_job:job", "--json", "tracking.enabled=false"]
    command += [f"checkpoint.dir={tmp_path}", "precision.parameter=float64", *arguments]
    # The toy's tiny programs need no other flags, and float64 shows what rounding would hide.
    env = os.environ | {"JAX_ENABLE_X64": "1"} | environment
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]", code: int = 0) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return json.loads(out.splitlines()[-1]) if out else {}, err


def wait_for(found: Callable[[], Any], process: "subprocess.Popen[str]", seconds: float = 200) -> Any:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        value = found()
        if value:
            return value
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    raise AssertionError("it did not come about")


def only_run(folder: Path) -> Path | None:
    return next((p.parent for p in folder.glob("*/events.jsonl")), None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of 40 steps in one process, on one device."""
    report, _ = finish(start(tmp_path_factory.mktemp("alone"), "plan.grid=cpu:1", "--steps", "40"))
    losses: list[float] = report["losses"]
    return losses


def test_two_processes_compute_what_one_does_and_survive_a_death(tmp_path: Path, alone: list[float]) -> None:
    two = start(tmp_path, "--processes", "2", "--devices", "2", "plan.stages=1", "--steps", "40", "checkpoint.every=6")
    run = wait_for(lambda: only_run(tmp_path), two)
    wait_for(lambda: complete_steps(run / "checkpoints"), two)
    who = json.loads((run / "processes" / "group.json").read_text())
    os.kill(who["processes"][1], signal.SIGKILL)

    report, _ = finish(two)
    assert (report["grid"], report["steps"], report["stop_reason"]) == ("cpu:2x1/s1", 40, "done")
    assert report["num_restarts"] == 1
    np.testing.assert_allclose(report["losses"], alone, rtol=1e-9)
    events = list(read_events(run))
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert restart["step"] % 6 == 0
    # One process logs, and trains on from the checkpoint: no step is left out, and none comes twice but those since.
    steps = [event["step"] for event in events if event["kind"] == "step"]
    before = [event["step"] for event in events[: events.index(restart)] if event["kind"] == "step"]
    assert steps == [*range(1, before[-1] + 1), *range(restart["step"] + 1, 41)]
    assert complete_steps(run / "checkpoints")[-1] == 40


def test_stages_in_two_processes_and_then_all_in_one(tmp_path: Path, alone: list[float]) -> None:
    group = ["--processes", "2", "--devices", "2", "plan.stages=2", "--steps", "40", "checkpoint.every=0"]
    report, _ = finish(start(tmp_path, *group, 'hook.script=["6: cpu:1/s1"]'))
    np.testing.assert_allclose(report["losses"], alone, rtol=1e-9)
    (swap,) = report["swaps"]
    assert (swap["from"], swap["to"], report["num_restarts"]) == ("cpu:2x1/s2", "cpu:1/s1", 0)
    assert 6 <= swap["step"] <= 6 + 16, "later than the lease that was out"
    assert not list(Path("/dev/shm").glob(f"arena-jax-*-{report['run_id']}"))


@pytest.mark.parametrize(
    ("arguments", "said", "remedy"),
    [
        (["--processes", "3", "--devices", "4"], "4 devices cannot be spread evenly over 3", "--devices 3"),
        (["--processes", "2", "plan.grid=cpu:4"], "has 1 node, and there are 2", "cpu:2x2"),
        (["--processes", "2", "plan.grid=cpu:2x2", "--devices", "2"], "--devices 2 against cpu:2x2", "one of the two"),
        (["--processes", "2", "plan.grid=a100:2x4"], "cpu devices only", "cpu:2x4"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "gpt_tiny", f"checkpoint.dir={tmp_path}", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert remedy in error
    assert not list(tmp_path.iterdir())


def test_a_group_of_another_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "gpt_tiny", "--processes", "2"]) == 2
    assert "--processes 2 in a group of 8 processes (srun)" in capsys.readouterr().err


# What a group begins from.


def handed_over(folder: Path, step: int) -> HandedOver:
    (folder / str(step)).mkdir(parents=True)
    (folder / str(step) / "state").write_text(str(step))
    return HandedOver(folder=folder, step=step, left_s=0.0)


def test_a_group_begins_from_the_furthest_state_that_is_whole(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "8").mkdir(parents=True)
    states = States(checkpoints, 4)
    assert states.last(has_stepped=False) == (4, None)  # what was asked for, though 8 is there
    assert states.last(has_stepped=True) == (8, None)
    states.hand_over(handed_over(tmp_path / "one", 8))
    assert states.last(has_stepped=True) == (8, str(tmp_path / "one"))
    (checkpoints / "9").mkdir()
    assert states.last(has_stepped=True) == (9, None)
    states.hand_over(handed_over(tmp_path / "two", 12))
    assert not (tmp_path / "one").exists()
    shutil.rmtree(tmp_path / "two" / "12")
    assert states.last(has_stepped=True) == (9, None)


def test_a_state_between_groups_is_kept_until_a_checkpoint_is_further(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "4").mkdir(parents=True)
    states = States(checkpoints, None)
    states.hand_over(handed_over(tmp_path / "one", 6))
    states.forget_if_passed()
    assert states.handed_over is not None
    states.keep()
    assert complete_steps(checkpoints) == [4, 6]
    assert (checkpoints / "6" / "state").read_text() == "6"
    (checkpoints / "7").mkdir()
    states.forget_if_passed()
    assert states.handed_over is None
    assert not (tmp_path / "one").exists()


def test_a_supervisor_does_without_jax() -> None:
    code = "import sys, arena_jax.cli.train_processes; print([m for m in ('jax', 'orbax') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
