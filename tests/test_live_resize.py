"""A training in another process, resized from here as from another terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arena_jax.cli.resize import command
from arena_jax.control import FILE_NAME
from arena_jax.errors import EXIT_RESUMABLE
from arena_jax.events import read_events

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120.0


def until(holds: object, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def start(folder: Path, *settings: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "arena_jax", "train", "tests.relaunch_job:job", "steps=10000000"]
    return subprocess.Popen(
        [*command, "tracking.enabled=false", f"checkpoint.dir={folder / 'runs'}", *settings],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def training(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = start(tmp_path, "checkpoint.every=100000")
    until(lambda: list(tmp_path.glob(f"runs/*/{FILE_NAME}")), process)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_resizes_from_another_terminal(tmp_path: Path, training: "subprocess.Popen[str]") -> None:
    def resize(*arguments: str) -> Result:
        return CliRunner().invoke(command, [str(tmp_path / "runs"), *arguments], catch_exceptions=False)

    for grid, says in (
        ("cpu:4/s2", "runs on cpu:4/s2 since about step"),
        ("pause", "paused at step"),
        ("cpu:2", "runs on cpu:2/s1 since about step"),
    ):
        done = resize(grid, "--wait")
        assert (done.exit_code, says in done.stderr) == (0, True), done.stderr
    refused = resize("cpu:8/s8", "--wait")
    assert refused.exit_code == 1
    assert "no plan fits cpu:8/s8" in refused.stderr
    stopped = resize("stop", "--wait")
    assert (stopped.exit_code, "stopped" in stopped.stderr) == (0, True), stopped.stderr
    _, said = training.communicate(timeout=TIMEOUT_S)
    assert training.returncode == EXIT_RESUMABLE, said
    (run,) = (tmp_path / "runs").iterdir()
    swaps = [(e["from"], e["to"]) for e in read_events(run) if e["kind"] == "swap"]
    assert swaps == [("cpu:8/s1", "cpu:4/s2"), ("cpu:4/s2", "cpu:2/s1")]


def test_a_signal_has_a_file_read(tmp_path: Path) -> None:
    wish = tmp_path / "wish"
    process = start(tmp_path, f"hook.file={wish}", "plan.grid=cpu:2")

    def happened(kind: str) -> bool:
        return any(e["kind"] == kind for run in tmp_path.glob("runs/*") for e in read_events(run))

    try:
        until(lambda: happened("step"), process)
        wish.write_text("# by night\ncpu:1\n")
        os.kill(process.pid, signal.SIGUSR1)
        until(lambda: happened("swap"), process)
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == EXIT_RESUMABLE
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
