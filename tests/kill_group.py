"""Kill the processes of a job, one at a time, and show that nothing was lost: ``python -m tests.kill_group``.

A job of two processes trains the toy model in float64 and is resized between two and four processes. Twenty
times one of its processes gets SIGKILL: at any time, while a checkpoint is being written, and while the next
group of processes is being started. Each time the job must go on by itself within 30 s, from a complete
checkpoint, and at the end its losses must be those of one process that nobody disturbed, within 1e-9.

Prints a table; ``--write`` keeps it under ``benchmarks/results``. Exit code 0 when all of it holds.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.events import read_events
from arena_jax.runtime.checkpoint_info import complete_steps
from tests.toy_job import ENV_PAUSE

TOLERANCE = 1e-9
LIMIT_S = 30.0
GRIDS = ("cpu:4x1/s1", "cpu:2x1/s1", "cpu:2x1/s2")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_group", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), options.kills, random.Random(options.seed))
    report(result, write=options.write)
    return 0 if result["ok"] else 1


def run(folder: Path, num_kills: int, rng: random.Random) -> dict[str, Any]:
    """Train, kill, and compare with an undisturbed training."""
    job = start(folder / "group", "--processes", "2", "--devices", "2", "plan.stages=1", "--steps", "1000000")
    kills = []
    try:
        path = wait(lambda: next((p.parent for p in (folder / "group").glob("*/events.jsonl")), None), job)
        wait(lambda: last_step(path), job)
        for number in range(num_kills):
            aim = ("anywhere", "in a save", "in a relaunch")[number % 3]
            kills.append(kill(path, job, aim, rng))
            print(json.dumps(kills[-1]), file=sys.stderr)
            time.sleep(rng.uniform(0.5, 3.0))
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=120)
        assert job.returncode == 75, err
    finally:
        job.kill()
    trained = json.loads(out.splitlines()[-1])
    alone = start(folder / "alone", "plan.grid=cpu:1", "--steps", str(trained["steps"]), pause_s=0.0)
    expected = json.loads(alone.communicate(timeout=600)[0].splitlines()[-1])
    pairs = list(zip(trained["losses"], expected["losses"], strict=True))
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    slowest_s = max(k["back_s"] for k in kills)
    return {
        "ok": difference <= TOLERANCE and slowest_s <= LIMIT_S and all(k["from_complete"] for k in kills),
        "kills": kills,
        "steps": trained["steps"],
        "num_restarts": trained["num_restarts"],
        "num_swaps": len(trained["swaps"]),
        "largest_difference": difference,
        "slowest_s": slowest_s,
    }


def kill(path: Path, job: "subprocess.Popen[str]", aim: str, rng: random.Random) -> dict[str, Any]:
    """Kill one process at the moment meant, and wait until the job trains again."""
    if aim == "in a relaunch":
        now = json.loads((path / "processes" / "group.json").read_text())["grid"]
        grid = rng.choice([g for g in GRIDS if g != now])
        command = [sys.executable, "-m", "arena_jax", "resize", str(path), grid]
        subprocess.run(command, check=False, capture_output=True)
        time.sleep(rng.uniform(0.0, 8.0))
    elif aim == "in a save":
        wait(lambda: any("tmp" in p.name for p in (path / "checkpoints").glob("*")), job)
    else:
        time.sleep(rng.uniform(0.0, 2.0))
    children = [int(c) for c in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    trainers = json.loads((path / "processes" / "group.json").read_text())["processes"]
    victim = rng.choice(children or trainers)
    killed_s = time.time()
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)

    def back() -> float | None:
        """When the first step after the kill was logged, by processes that live."""
        steps = [e["time"] for e in read_events(path) if e["kind"] == "step" and e["time"] > killed_s]
        restarts = [e["time"] for e in read_events(path) if e["kind"] in ("restart", "swap") and e["time"] > killed_s]
        if victim in trainers:
            return next((t for t in steps if restarts and t > restarts[0]), None)
        return steps[0] if steps else None

    back_s = wait(back, job, 120) - killed_s
    events = [e for e in read_events(path) if e["time"] > killed_s]
    restart = next((e for e in events if e["kind"] == "restart"), None)
    return {
        "aim": aim,
        "victim": f"process {trainers.index(victim)}" if victim in trainers else "one of the next group",
        "back_s": back_s,
        "restarted_at": None if restart is None else restart["step"],
        # The step of a restart is that of the checkpoint it was read from: only complete ones have a name.
        "from_complete": restart is None or restart["step"] == 0 or bool(complete_steps(path / "checkpoints")),
    }


def start(folder: Path, *arguments: str, pause_s: float = 0.05) -> "subprocess.Popen[str]":
    """Start a training of the toy."""
    command = [sys.executable, "-m", "arena_jax", "train", "tests.toy_job:job", "--json", *arguments]
    command += [f"checkpoint.dir={folder}", "tracking.enabled=false", "precision.parameter=float64"]
    command += ["checkpoint.every=20"]
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", ENV_PAUSE: str(pause_s)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_step(path: Path) -> int:
    return max((e["step"] for e in read_events(path) if e["kind"] == "step"), default=0)


def wait(found: Any, job: "subprocess.Popen[str]", seconds: float = 300.0) -> Any:
    """What ``found`` finds, in the end."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        value = found()
        if value:
            return value
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    raise TimeoutError("the job did not come back")


def report(result: dict[str, Any], *, write: bool) -> None:
    """Print the table, or keep it."""
    from benchmarks import _report

    rows = [
        (n + 1, k["aim"], k["victim"], f"{k['back_s']:.1f}", "" if k["restarted_at"] is None else k["restarted_at"])
        for n, k in enumerate(result["kills"])
    ]
    lines = [
        (
            f"{len(rows)} kills, {result['num_restarts']} restarts, {result['num_swaps']} changes of plan,"
            f" {result['steps']} steps; slowest back after {result['slowest_s']:.1f} s; losses differ from one"
            f" undisturbed process by {result['largest_difference']:.1e} at most."
        ),
        "",
        *_report.table(["kill", "aimed", "victim", "trains again after, s", "from step"], rows),
    ]
    if write:
        _report.write("kill_group", title="SIGKILL of processes of a job", lines=lines, data=result)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
