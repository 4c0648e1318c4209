"""Runs of the command line that go on in another process: on another device type, and back where that fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arena_jax
from arena_jax.errors import UsageError
from arena_jax.events import read_events
from arena_jax.relaunch import ENV_NOTE, FILE_NAME, Note, Place, arriving, rescue
from arena_jax.runtime.rundir import open_run, take_over
from tests import relaunch_job
from tests.doubles import one_stage_plan

ROOT = Path(__file__).parents[1]
CLUSTER = """
[types.slow]
threads = 1
[types.fast]
threads = 2
"""
STEPS = 8


def note(run: Path, **changes: Any) -> Note:
    place = Place(plan=one_stage_plan(2), num_devices=2, devices=(1, 0))
    facts: dict[str, Any] = {"run": str(run), "folder": str(run / "state"), "step": 3, "here": place, "back": place}
    return Note(**{**facts, "target": "cpu:2", "history": ((1.5, 0.1),), **changes})


def test_a_note_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = note(tmp_path, request_id="resize-3", swaps=({"step": 1},))
    path = written.write()
    monkeypatch.setenv(ENV_NOTE, str(path))
    assert arriving() == written
    environment = json.loads(path.read_text())["environment"]
    assert environment[ENV_NOTE] == str(path)
    assert environment["ARENA_JAX_DEVICE_TYPE"] is None
    (tmp_path / "state").mkdir()
    written.settle()
    assert not (tmp_path / "state").exists()
    assert arriving() is None  # taken over already
    path.write_text("{}")
    with pytest.raises(UsageError, match="no note of a training"):
        arriving()


def test_the_state_of_a_process_that_was_killed_half_way_becomes_a_checkpoint(tmp_path: Path) -> None:
    left, checkpoints = tmp_path / "state" / "3", tmp_path / "checkpoints"
    for newest, expected in ((5, None), (None, 3), (2, 3)):
        left.mkdir(parents=True)
        (left / "arrays").write_text("all of them")
        note(tmp_path).write()
        assert rescue(tmp_path, checkpoints, newest) == expected
        assert not left.exists()
        assert [p.name for p in checkpoints.glob("*")] == ([] if expected is None else ["3"])
        shutil.rmtree(checkpoints, ignore_errors=True)
    note(tmp_path).write()  # and the machine was switched off
    assert rescue(tmp_path, checkpoints, None) is None
    assert rescue(tmp_path, checkpoints, None) is None


def test_a_directory_stays_taken_while_the_program_is_replaced(tmp_path: Path) -> None:
    run = open_run(tmp_path, name="toy", resume="auto")
    run.keep_over_exec()
    with pytest.raises(UsageError, match="another process"):
        open_run(tmp_path, name="toy", resume="auto")
    again = take_over(tmp_path)
    assert again is not None
    assert again.run_id == run.run_id
    assert take_over(tmp_path) is None
    again.close()
    open_run(tmp_path, name="toy", resume="auto").close()


def test_a_run_changes_its_device_type_and_comes_back_from_a_node_that_fails(tmp_path: Path) -> None:
    """slow -> fast by a new process; a second visit of slow fails on arrival."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    environment = os.environ | {
        "ARENA_JAX_CLUSTER": str(tmp_path / "cluster.toml"),
        "BROKEN_TYPE": "slow",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # each type has its own
    script = '["3: fast:1", "5: slow:1"]'
    command = [sys.executable, "-m", "arena_jax", "train", "tests.relaunch_job:job", f"steps={STEPS}", "--json"]
    settings = [f"hook.script={script}", "plan.grid=slow:1", "tracking.enabled=false", "checkpoint.dir=runs"]
    done = subprocess.run([*command, *settings], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [(s["step"], s["from"], s["to"]) for s in report["swaps"]] == [(3, "slow:1/s1", "fast:1/s1")]
    assert report["grid"] == "fast:1/s1"
    (run,) = (tmp_path / "runs").iterdir()
    events = list(read_events(run))
    warnings = [e["message"] for e in events if e["kind"] == "warning"]
    assert any("cannot go to slow:1: it failed there: RuntimeError: this node is on fire" in m for m in warnings)
    assert [e["step"] for e in events if e["kind"] == "step"] == list(range(1, STEPS + 1))
    assert not (run / FILE_NAME).exists()
    assert not list(run.glob("handed-over-*"))
    expected = arena_jax.fit(
        relaunch_job.Net,
        relaunch_job.job()["optimizer"],
        relaunch_job.loss_fn,
        relaunch_job.batches(),
        steps=STEPS,
        grid="cpu:1",
    )
    np.testing.assert_allclose(report["losses"], [r.loss for r in expected.history], rtol=1e-5)
