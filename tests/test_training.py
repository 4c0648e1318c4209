"""A whole training: directory, log, checkpoints, tracker and resume, over the jit program of ``doubles``."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arena_jax.errors import (
    CheckpointError,
    DataError,
    InfeasibleError,
    NonFiniteLossError,
    UsageError,
)
from arena_jax.events import read_events
from arena_jax.grid import Allocation, GridShape, PlanIndex
from arena_jax.planner import Candidate
from arena_jax.runtime.checkpoint_info import complete_steps
from arena_jax.runtime.contract import Compiled, LoopOptions
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.rundir import RunDirectory, find_run, open_run
from arena_jax.training import INTERRUPTED_CLOSE_TIMEOUT_S, Trained, Training, run_training
from tests.doubles import BATCH, ToyLoader, ToyPlans


def train(
    run: RunDirectory | None,
    *,
    steps: int = 6,
    every: int = 2,
    on: str = "cpu:1",
    loader: ToyLoader | None = None,
    plans: ToyPlans | None = None,
    **rest: Any,
) -> Trained:
    options = LoopOptions(num_steps=steps, items_per_step=BATCH, checkpoint_every=every)
    try:
        return run_training(
            Training(
                name="toy",
                planner=plans or ToyPlans(),
                target=Allocation.parse(on),
                feed=Feed(loader or ToyLoader()),
                options=options,
                run=run,
                **rest,
            )
        )
    finally:
        if run is not None:
            run.close()


def values(trained: Trained) -> dict[str, np.ndarray]:
    program = trained.outcome.program
    return {k: np.asarray(v) for k, v in program.save_tree(trained.outcome.state).items()}


def kinds(path: Path) -> list[str]:
    return [event["kind"] for event in read_events(path)]


def test_the_log_tells_the_whole_story(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    trained = train(run, record={"recipe": "name: toy\n", "params": {"steps": 6}})
    events = list(read_events(run.path))
    assert [e["kind"] for e in events if e["kind"] not in ("step", "checkpoint")] == [
        "run_start",
        "candidates",
        "plan",
        "run_end",
    ]
    start, end = events[0], events[-1]
    assert start["run_id"] == trained.run_id == run.run_id
    assert start["recipe"] == "name: toy\n"
    assert "jax" in start["versions"]
    assert (end["step"], end["stop_reason"]) == (6, "done")
    (candidates,) = [e for e in events if e["kind"] == "candidates"]
    assert [row["chosen"] for row in candidates["rows"]] == [True]
    assert [e["step"] for e in events if e["kind"] == "checkpoint"] == [2, 4, 6]


def test_without_a_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(None)
    assert trained.run_id == ""
    assert trained.outcome.step == 6
    assert list(tmp_path.iterdir()) == []


def test_resume_goes_on_in_the_same_run(tmp_path: Path) -> None:
    whole = values(train(open_run(tmp_path / "whole", name="toy", resume="auto"), steps=8))
    first = open_run(tmp_path / "run", name="toy", resume="auto")
    train(first, steps=4)
    second = open_run(tmp_path / "run", name="toy", resume="auto")
    assert second.run_id == first.run_id
    assert second.resume_step == 4
    loader = ToyLoader()
    trained = train(second, steps=8, loader=loader)
    assert loader.given == [4, 5, 6, 7]
    assert trained.first_step == 4
    assert values(trained).keys() == whole.keys()
    for name, value in values(trained).items():
        np.testing.assert_array_equal(value, whole[name])
    steps = [e["step"] for e in read_events(tmp_path / "run") if e["kind"] == "step"]
    assert steps == list(range(1, 9))
    assert [e["reason"] for e in read_events(tmp_path / "run") if e["kind"] == "plan"] == ["start", "resume"]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4)
    trained = train(open_run(tmp_path / "run", name="toy", resume="must"), steps=4)
    assert trained.outcome.step == 4
    assert trained.outcome.history == ()


def test_going_back_sets_the_later_checkpoints_aside(tmp_path: Path) -> None:
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=6)
    trained = train(open_run(tmp_path / "run", name="toy", resume=4), steps=5)
    assert trained.first_step == 4
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2, 4, 5]
    warnings = [e["message"] for e in read_events(tmp_path / "run") if e["kind"] == "warning"]
    assert len(warnings) == 1
    assert "set-aside" in warnings[0]


def test_never_sets_the_old_run_aside(tmp_path: Path) -> None:
    first = open_run(tmp_path / "run", name="toy", resume="auto")
    train(first, steps=4)
    second = open_run(tmp_path / "run", name="toy", resume="never")
    assert second.run_id != first.run_id
    assert train(second, steps=2).first_step == 0
    (aside,) = (tmp_path / "run" / "set-aside").iterdir()
    assert json.loads((aside / "run.json").read_text())["run_id"] == first.run_id
    assert complete_steps(aside / "checkpoints") == [2, 4]


@pytest.mark.parametrize("resume", ["must", 3])
def test_asking_for_a_checkpoint_that_is_not_there(tmp_path: Path, resume: str | int) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_run(tmp_path / "run", name="toy", resume=resume)
    with pytest.raises(CheckpointError, match="no run with a checkpoint"):
        find_run(tmp_path / "root", name="toy", resume=resume, num_steps=4)


@pytest.mark.parametrize("resume", ["yes", True, -1])
def test_resume_words_are_checked(tmp_path: Path, resume: Any) -> None:
    with pytest.raises(UsageError, match="resume is"):
        open_run(tmp_path / "run", name="toy", resume=resume)


def test_two_processes_cannot_train_in_one_directory(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    with pytest.raises(UsageError, match="another process is training"):
        open_run(tmp_path / "run", name="toy", resume="auto")
    run.close()
    open_run(tmp_path / "run", name="toy", resume="auto").close()


def test_auto_goes_on_with_the_newest_run_unless_it_is_finished(tmp_path: Path) -> None:
    first = find_run(tmp_path, name="toy", resume="auto", num_steps=6)
    train(first, steps=4)
    empty = find_run(tmp_path, name="toy", resume="never", num_steps=6)
    empty.close()
    assert empty.path != first.path
    again = find_run(tmp_path, name="toy", resume="auto", num_steps=6)
    again.close()
    assert (again.path, again.resume_step) == (first.path, 4)
    other = find_run(tmp_path, name="toy", resume="auto", num_steps=4)
    other.close()
    assert other.path not in (first.path, empty.path)
    assert other.resume_step is None
    finished = find_run(tmp_path, name="toy", resume="must", num_steps=4)
    finished.close()
    assert (finished.path, finished.resume_step) == (first.path, 4)


def test_another_model_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=2)
    plans = ToyPlans(hidden=32)
    leaves = {"params/down/bias": ("float32", (6,)), "params/down/kernel": ("float32", (32, 6))}
    with pytest.raises(CheckpointError, match=r"another model.*'params/down/kernel': float32\[16,6\]"):
        train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4, plans=plans, leaves=leaves)
    assert plans.num_compiled == 0
    with pytest.raises(CheckpointError, match=r"another model.*'params/down/kernel'"):
        train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4, plans=plans)


def test_other_data_is_refused(tmp_path: Path) -> None:
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=2)
    loader = ToyLoader()
    loader.fingerprint = "other"  # type: ignore[misc]
    with pytest.raises(DataError, match="other training data: toy-data, now other"):
        train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4, loader=loader)


def test_a_directory_that_cannot_be_written_is_refused_before_compiling(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        open_run(tmp_path / "file" / "run", name="toy", resume="auto")
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    run.checkpoints.write_text("in the way")
    plans = ToyPlans()
    with pytest.raises(UsageError, match="cannot write checkpoints") as caught:
        train(run, plans=plans)
    assert caught.value.exit_code == 2
    assert plans.num_compiled == 0


def test_no_feasible_plan_names_why(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    with pytest.raises(InfeasibleError, match=r"cpu:3.*does not divide over 3"):
        train(run, on="cpu:3")
    assert kinds(run.path) == ["run_start", "candidates", "run_end"]


def test_a_nan_is_told_in_the_log_and_a_resume_meets_the_last_good_state(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    with pytest.raises(NonFiniteLossError):
        train(run, loader=ToyLoader(bad_at=5))
    end = list(read_events(run.path))[-1]
    assert end["stop_reason"] == "nonfinite"
    assert "step 5" in end["message"]
    assert open_run(tmp_path / "run", name="toy", resume="auto").resume_step == 4


def test_init_from_takes_the_model_and_nothing_else(tmp_path: Path) -> None:
    first = train(open_run(tmp_path / "first", name="toy", resume="auto"), steps=4)
    for source in (tmp_path / "first", tmp_path / "first" / "checkpoints" / "4"):
        trained = train(None, steps=0, init_from=source)
        for name, value in values(trained).items():
            if name.startswith("params/"):
                np.testing.assert_array_equal(value, values(first)[name])
            elif name.endswith("count"):
                assert value == 0
    with pytest.raises(CheckpointError, match="another model"):
        train(None, steps=0, init_from=tmp_path / "first", plans=ToyPlans(hidden=8))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(None, steps=0, init_from=tmp_path / "nowhere")


def test_resumed_on_more_devices_the_curve_goes_on(tmp_path: Path) -> None:
    whole = train(None, steps=8)
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4, on="cpu:4")
    trained = train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=8, on="cpu:2")
    assert trained.outcome.program.plan.grid == GridShape.parse("cpu:2")
    losses = [r.loss for r in whole.outcome.history[4:]]
    np.testing.assert_allclose([r.loss for r in trained.outcome.history], losses, rtol=1e-4)


class Tracking:
    """A tracker that keeps what it is given, or fails."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead
        self.seen: list[dict[str, Any]] = []

    def open(self, run_start: dict[str, Any]) -> None:
        if self.dead:
            raise ConnectionError("no server")

    def write(self, events: Sequence[dict[str, Any]]) -> None:
        self.seen.extend(events)

    def close(self) -> None:
        pass


def test_a_tracker_sees_the_steps_and_a_dead_one_harms_nothing(tmp_path: Path) -> None:
    tracker = Tracking()
    train(open_run(tmp_path / "run", name="toy", resume="auto"), tracker=tracker)
    assert [e["step"] for e in tracker.seen if e["kind"] == "step"] == list(range(1, 7))
    seen: list[dict[str, Any]] = []
    dead = open_run(tmp_path / "dead", name="toy", resume="auto")
    trained = train(dead, tracker=Tracking(dead=True), callbacks=(seen.append,))
    assert trained.outcome.step == 6
    assert any("tracking failed" in e["message"] for e in seen if e["kind"] == "warning")
    assert kinds(dead.path).count("step") == 6


def test_a_damaged_newest_checkpoint_is_an_error_that_names_the_one_before(tmp_path: Path) -> None:
    train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4" / "arrays")
    with pytest.raises(CheckpointError, match="damaged") as caught:
        train(open_run(tmp_path / "run", name="toy", resume="auto"), steps=6)
    assert "step 2" in caught.value.hint
    assert train(open_run(tmp_path / "run", name="toy", resume=2), steps=6).first_step == 2


class Signalled(ToyPlans):
    """Plans during which a signal comes, in the phase that ``during`` names."""

    def __init__(self, number: signal.Signals, *, during: str) -> None:
        super().__init__()
        self.number = number
        self.during = during

    def search(self, target: GridShape | Allocation) -> PlanIndex:
        if self.during == "planning":
            os.kill(os.getpid(), self.number)
        return super().search(target)

    def compile(self, candidate: Candidate, device_numbers: Sequence[int] | None = None) -> Compiled:
        if self.during == "compiling":
            os.kill(os.getpid(), self.number)
        return super().compile(candidate, device_numbers)


@pytest.mark.parametrize("during", ["planning", "compiling"])
@pytest.mark.parametrize(
    ("number", "error", "reason"),
    [(signal.SIGINT, KeyboardInterrupt, "interrupted"), (signal.SIGTERM, SystemExit, "terminated")],
)
def test_a_signal_before_the_first_step_ends_after_its_phase(
    tmp_path: Path, during: str, number: signal.Signals, error: type[BaseException], reason: str
) -> None:
    before = signal.getsignal(number)
    run = open_run(tmp_path / "run", name="toy", resume="auto")
    plans = Signalled(number, during=during)
    with pytest.raises(error) as caught:
        train(run, plans=plans)
    assert getattr(caught.value, "code", 75) == 75
    assert plans.num_compiled == (during == "compiling")  # the phase came to its end, the next one never began
    assert list(read_events(run.path))[-1]["stop_reason"] == reason
    assert signal.getsignal(number) is before


def test_an_interrupted_run_does_not_wait_for_its_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("arena_jax.training.Sink.close", lambda self, timeout_s=30.0: waits.append(timeout_s))
    train(open_run(tmp_path / "whole", name="toy", resume="auto"), steps=1, tracker=Tracking())
    plans = Signalled(signal.SIGINT, during="planning")
    with pytest.raises(KeyboardInterrupt):
        train(open_run(tmp_path / "run", name="toy", resume="auto"), plans=plans, tracker=Tracking())
    assert waits == [30.0, INTERRUPTED_CLOSE_TIMEOUT_S]
