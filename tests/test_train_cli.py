"""``arena-jax train``: what it prints, keeps, obeys and refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from arena_jax.cli import main
from arena_jax.events import read_events

RECIPE = """
summary: a gpt small enough for tests
model: {name: gpt, vocabulary: 256, sequence_length: 16, hidden: 16, num_layers: 2, num_heads: 2}
data: {kind: text, files: [text.txt]}
optimizer: {name: adamw, learning_rate: 1e-2, schedule: constant}
global_batch: 8
steps: 6
cpu_devices: 2
plan: {grid: cpu:2/s1}
checkpoint: {every: 2}
eval: {every: 3, batches: 2}
tracking: {enabled: false}
"""

KEYS = {
    *("steps", "losses", "step_time_s", "tokens_or_samples_per_s", "estimated_step_time_s", "plan_id", "grid"),
    *("swaps", "run_id", "checkpoint_dir", "stop_reason"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny recipe and text to train on."""
    assert len(jax.devices()) == 8  # jax runs before any verb could set another number for the whole test run
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Train in this process; exit code, the last line of stdout as JSON, stderr."""
    code = main(["train", "tiny.yaml", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out.splitlines()[-1]), captured.err


def start(*arguments: str) -> subprocess.Popen[str]:
    """Train in a process of its own."""
    command = [sys.executable, "-m", "arena_jax", "train", "tiny.yaml", *arguments, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    while process.poll() is None:
        logs = list((folder / "runs").glob("*/*/events.jsonl"))
        if any(e["kind"] == "step" and e["step"] >= step for log in logs for e in read_events(log)):
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def test_train_shows_candidates_and_plan_first_and_reports_every_promised_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, err = run(capsys)
    assert code == 0
    assert report.keys() >= KEYS
    assert report["steps"] == len(report["losses"]) == 6
    assert report["losses"][-1] < report["losses"][0]
    assert (report["grid"], report["stop_reason"]) == ("cpu:2/s1", "done")
    assert err.index("cpu:2/s1") < err.index(f"plan {report['plan_id']}") < err.index("\nstep ")
    run_dir = Path(report["run_dir"])
    assert run_dir.parent == folder / "runs" / "tiny"
    assert sorted(p.name for p in Path(report["checkpoint_dir"]).iterdir()) == ["2", "4", "6"]
    events = list(read_events(run_dir))
    assert events[0]["params"]["global_batch"] == 8
    assert "num_layers: 2" in events[0]["recipe"]
    assert [e["step"] for e in events if e["kind"] == "eval"] == [3, 6]
    assert events[-1]["kind"] == "run_end"


def test_a_finished_run_is_not_resumed_and_more_steps_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = run(capsys)
    _, second, _ = run(capsys)
    assert second["run_id"] != first["run_id"]
    assert second["losses"] == first["losses"]
    _, more, _ = run(capsys, "--steps", "8")
    assert (more["run_id"], more["first_step"], len(more["losses"])) == (second["run_id"], 6, 2)
    _, back, _ = run(capsys, "--steps", "8", "--resume", "4")
    assert (back["first_step"], back["losses"][2:]) == (4, more["losses"])
    _, anew, _ = run(capsys, "--resume", "never")
    assert anew["run_id"] not in (first["run_id"], second["run_id"])


def test_fewer_steps_are_the_beginning_of_the_same_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ("optimizer.schedule=cosine", "optimizer.warmup_steps=3")
    _, whole, _ = run(capsys, *schedule)
    _, start, _ = run(capsys, *schedule, "--steps", "2", "--resume", "never")
    assert start["losses"] == whole["losses"][:2]
    _, rest, _ = run(capsys, *schedule)
    assert (rest["run_id"], rest["losses"]) == (start["run_id"], whole["losses"][2:])


def test_a_script_swaps_plans_and_the_curve_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, still, _ = run(capsys, "--resume", "never")
    _, report, _ = run(capsys, "--resume", "never", 'hook.script=["2: cpu:2/s2", "4: cpu:1"]')
    assert [(s["step"], s["from"], s["to"]) for s in report["swaps"]] == [
        (2, "cpu:2/s1", "cpu:2/s2"),
        (4, "cpu:2/s2", "cpu:1/s1"),
    ]
    assert set(report["swaps"][0]) >= {"step", "from", "to", "reason", "background_s", "stall_s"}
    assert report["losses"] == pytest.approx(still["losses"], rel=1e-4)


def test_dry_run_chooses_and_keeps_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, err = run(capsys, "--dry-run")
    assert code == 0
    assert report["plan"]["grid"] == report["grid"] == "cpu:2/s1"
    assert "chosen" in err
    assert not (folder / "runs").exists()
    (folder / "plan.json").write_text(json.dumps(report["plan"]))
    _, trained, _ = run(capsys, "--plan", "plan.json")
    assert trained["plan_id"] == report["plan_id"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(folder: Path, number: signal.Signals, code: int) -> None:
    arguments = ("--steps", "400", "checkpoint.every=1000", "eval.every=0")
    process = start(*arguments)
    wait_for_step(folder, process, 3)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code, err
    report = json.loads(out.splitlines()[-1])
    assert report["steps"] == len(report["losses"]) < 400
    again = start("--steps", str(report["steps"] + 2), *arguments[2:])
    out, err = again.communicate()
    assert again.returncode == 0, err
    second = json.loads(out.splitlines()[-1])
    assert (second["first_step"], second["run_id"]) == (report["steps"], report["run_id"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_it_starts_ends_it_in_order(folder: Path, number: signal.Signals, code: int) -> None:
    process = start()
    while not list(folder.glob("runs/*/*/events.jsonl")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code, err
    (log,) = folder.glob("runs/*/*/events.jsonl")
    assert list(read_events(log))[-1]["stop_reason"] == {75: "terminated", 130: "interrupted"}[code]


def test_a_second_signal_leaves_at_once(folder: Path) -> None:
    process = start("--steps", "100000", "eval.every=0")
    wait_for_step(folder, process, 3)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate()
    # Whichever of two pending signals Python handles first, the other one leaves.
    assert process.returncode in (75, 130), err
    assert "run_end" not in {e["kind"] for log in folder.glob("runs/*/*/events.jsonl") for e in read_events(log)}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--devices", "64", "plan.grid=null"], 2, "64 devices were asked for; there are 8"),
        (["plan.grid=cpu:64"], 2, "needs 64 devices, jax has 8"),
        (["plan.grid=a100:2"], 2, "jax runs on cpu:8 here"),
        (["--devices", "4"], 2, "--devices 4 against plan.grid"),
        (["--resume", "must"], 1, "no run with a checkpoint"),
        (["--resume", "7"], 1, "no run with a checkpoint"),
        (["--resume", "often"], 2, "resume is 'often'"),
        (["--plan", "nowhere.json"], 2, "cannot read plan"),
        (["checkpoint.dir=text.txt"], 2, "cannot"),
        (["hook.script=[cpu:4]"], 2, 'not "STEP: GRID"'),
        (["stepz=5"], 2, "steps"),
        (["model.vocabulary=10"], 2, "10 is too small for bytes"),
        (["data.files=[nowhere*.txt]"], 2, "nowhere"),
        (["optimizer.learning_rate=1e38", "optimizer.name=sgd"], 1, "the loss of step"),
    ],
)
def test_what_cannot_work_is_one_error_with_its_code(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    got, report, err = run(capsys, *arguments)
    assert (got, "Traceback" in err) == (code, False), err
    assert says in err
    assert report["error"]["message"]


def test_a_checkpoint_of_another_model_or_other_data_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys)
    code, _, err = run(capsys, "--steps", "8", "model.hidden=32")
    assert code == 1
    assert "was made by another model: first difference at 'params/" in err
    with (folder / "text.txt").open("a") as file:
        file.write("and more")
    code, _, err = run(capsys, "--steps", "8")
    assert code == 2
    assert "other training data" in err


def test_a_damaged_checkpoint_is_one_error_that_names_the_one_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first, _ = run(capsys)
    shutil.rmtree(Path(first["checkpoint_dir"]) / "6" / "arrays")
    code, _, err = run(capsys, "--steps", "8")
    assert code == 1
    assert "damaged" in err
    assert "resume with 4" in err
    code, report, _ = run(capsys, "--steps", "8", "--resume", "4")
    assert (code, report["first_step"]) == (0, 4)


def test_a_dead_tracking_server_warns_once_and_loses_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, err = run(capsys, "tracking.enabled=true", "tracking.uri=http://127.0.0.1:9")
    assert code == 0
    assert err.count("tracking failed") == 1
    assert "track sync" in err
    assert [e["step"] for e in read_events(report["run_dir"]) if e["kind"] == "step"] == list(range(1, 7))
