"""Kill a training again and again, and show that nothing was lost: ``python -m tests.kill``.

One training runs undisturbed. Another, of the same recipe, is killed with SIGKILL at random moments
(while it starts and compiles, between steps, while a checkpoint is being written) and started again
with the same command each time. At the end its parameters and optimizer state must be bit-equal, its
losses must be equal step by step, and every step must have drawn the same samples as the undisturbed
run. Then a run is killed half-way and resumed under another plan, in float64, where 1e-9 is asked for.

Prints one JSON object; exit code 0 when all of it holds.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.events import read_events
from tests.kill.data import ENV_LOG, SEQUENCE_LENGTH

CHECKPOINT_EVERY = 10
TOLERANCE = 1e-9
STEPS_PER_KILL = 25  # upper bound on the steps a victim is allowed, so that all kills fit into the run


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: its directory, plan and length."""

    folder: Path
    grid: str
    steps: int
    float64: bool = False

    @property
    def sample_log(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def run(self) -> Path:
        """The directory of the last run: one killed before its first checkpoint began anew in another."""
        return max(p.parent for p in (self.folder / "runs").glob("*/run.json"))

    def events(self) -> list[dict[str, Any]]:
        """Everything logged so far, in the order of time."""
        return [e for log in sorted((self.folder / "runs").glob("*/events.jsonl")) for e in read_events(log)]

    def start(self) -> subprocess.Popen[bytes]:
        """The same command every time."""
        overrides = {
            "model.num_layers": 2,
            "model.hidden": 32,
            "model.num_heads": 4,
            "model.sequence_length": SEQUENCE_LENGTH,
            "data.kind": "function",
            "data.function": "tests.kill.data:make",
            "global_batch": 12,
            "steps": self.steps,
            "optimizer.schedule": "constant",
            "plan.grid": self.grid,
            "checkpoint.every": CHECKPOINT_EVERY,
            "checkpoint.dir": self.folder / "runs",
            "eval.every": 0,
            "tracking.enabled": "false",
        }
        environment = {**os.environ, ENV_LOG: str(self.sample_log), "JAX_PLATFORMS": "cpu"}
        if self.float64:
            environment["JAX_ENABLE_X64"] = "1"
            for dtype in ("parameter", "compute", "accumulation", "output"):
                overrides[f"precision.{dtype}"] = "float64"
        pairs = [f"{key}={value}" for key, value in overrides.items()]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "stderr.txt").open("ab") as stderr:
            command = [sys.executable, "-m", "arena_jax", "train", "gpt_tiny", *pairs]
            return subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)

    def finish(self) -> None:
        """Run to the end."""
        code = self.start().wait()
        if code:
            raise SystemExit(f"training in {self.folder} failed with {code}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join((self.folder / "stderr.txt").read_text(errors="replace").splitlines()[-20:])

    def steps_done(self) -> int:
        """The largest step in the log so far."""
        return max((e["step"] for e in self.events() if e["kind"] == "step"), default=0)

    def unfinished(self) -> set[tuple[str, int]]:
        """The checkpoints being written, as (path, inode)."""
        found = set()
        for path in (self.folder / "runs").glob("*/checkpoints/*.orbax-checkpoint-tmp*"):
            with suppress(FileNotFoundError):  # finished meanwhile
                found.add((str(path), path.stat().st_ino))
        return found

    def losses(self) -> dict[int, float]:
        """Loss by step; of a step that was done again after a kill, the last."""
        return {e["step"]: e["loss"] for e in self.events() if e["kind"] == "step"}

    def samples(self) -> list[list[tuple[int, int]]]:
        """Per step the (epoch, sample) pairs that the surviving history trained on.

        A process draws its batches in order from the step it resumed at; where a later process did a
        step again, that one counts.
        """
        draws = self._draws()
        by_step: dict[int, list[tuple[int, int]]] = {}
        pid = 0
        for event in self.events():
            if event["kind"] == "run_start":
                pid = event["host"]["pid"]
            if event["kind"] == "plan":  # a process killed before it drew anything has no draws
                for number, line in enumerate(draws.get(pid, [])):
                    by_step[event["step"] + number + 1] = list(zip(line["epochs"], line["ids"], strict=True))
        return [by_step[step] for step in range(1, self.steps + 1)]

    def _draws(self) -> dict[int, list[dict[str, Any]]]:
        """The batches drawn for training, in order, by process.

        The first loader of a process only shows its first batch, for its shapes.
        """
        processes: dict[int, list[dict[str, Any]]] = {}
        for line in self.sample_log.read_text().splitlines():
            drawn = json.loads(line)
            if drawn["loader"] > 1:
                processes.setdefault(drawn["pid"], []).append(drawn)
        return processes

    def final(self) -> dict[str, np.ndarray]:
        """The arrays of the last checkpoint."""
        import jax

        from arena_jax.runtime.checkpoint import CheckpointStore

        store = CheckpointStore(self.run / "checkpoints")
        step = store.steps()[-1]
        if step != self.steps:
            raise SystemExit(f"the last checkpoint in {store.directory} is of step {step}, not {self.steps}")
        info = store.read_info(step)
        wanted = {k: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for k, (dtype, shape) in info.leaves.items()}
        return {name: np.asarray(leaf) for name, leaf in store.restore(step, wanted).items()}


def kill_once(case: Case, moment: str, rng: random.Random) -> str | None:
    """Start the training and kill it at a moment of the given kind; ``None`` when it ended before."""
    stale = case.unfinished()  # of the victim before; swept when training begins
    process = case.start()
    before = case.steps_done()
    deadline = time.monotonic() + 600
    give_up_after = rng.uniform(0.0, 12.0) if moment == "start" else None
    began = time.monotonic()
    target = before + rng.randint(1, STEPS_PER_KILL)
    hit = moment
    while True:
        if process.poll() is not None:
            if process.returncode:
                raise SystemExit(f"a victim ended by itself with {process.returncode}:\n{case.tail()}")
            return None
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"a victim did nothing for ten minutes:\n{case.tail()}")
        if give_up_after is not None and time.monotonic() - began > give_up_after:
            break
        saving = case.unfinished() - stale
        done = case.steps_done()
        if moment == "saving" and saving and done > before:
            time.sleep(rng.uniform(0, 0.03))
            break
        if moment == "step" and done >= target and not saving:
            break
        if moment == "saving" and done > before + 4 * STEPS_PER_KILL:
            hit = "step"  # every save was too quick to be seen
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return "saving" if case.unfinished() - stale else hit


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Over the leaves, relative to each leaf's norm, with an absolute floor of one."""
    if a.keys() != b.keys():
        raise SystemExit(f"unlike leaves: {sorted(a.keys() ^ b.keys())[:5]}")
    worst = 0.0
    for name in a:
        left, right = a[name].astype(np.float64), b[name].astype(np.float64)
        worst = max(worst, float(np.linalg.norm(left - right) / max(np.linalg.norm(left), 1.0)))
    return worst


def show_kills(folder: Path, grid: str, num_kills: int, rng: random.Random) -> dict[str, Any]:
    """The first half: many kills, one plan, bit-equal."""
    steps = num_kills * STEPS_PER_KILL
    whole = Case(folder=folder / "whole", grid=grid, steps=steps)
    killed = Case(folder=folder / "killed", grid=grid, steps=steps)
    whole.finish()
    moments = [("saving", "step", "start", "saving", "step")[i % 5] for i in range(num_kills)]
    rng.shuffle(moments)
    hits: list[str] = []
    for moment in moments:
        hit = kill_once(killed, moment, rng)
        if hit is None:
            raise SystemExit(f"the run ended after {len(hits)} kills; give it more steps")
        hits.append(hit)
        print(
            f"kill {len(hits)}/{num_kills}: {hit}, {killed.steps_done()} of {steps} steps", file=sys.stderr, flush=True
        )
    killed.finish()
    a, b = whole.final(), killed.final()
    unlike = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    drawn = [sample for step in killed.samples() for sample in step]
    return {
        "grid": grid,
        "steps": steps,
        "kills": {kind: hits.count(kind) for kind in sorted(set(hits))},
        "leaves": len(a),
        "unlike_leaves": unlike,
        "losses_equal": whole.losses() == killed.losses(),
        "samples_equal": whole.samples() == killed.samples(),
        "samples_drawn": len(drawn),
        "samples_repeated_within_an_epoch": len(drawn) - len(set(drawn)),
    }


def show_other_plan(folder: Path, grid: str, other: str, rng: random.Random) -> dict[str, Any]:
    """The second half: killed under one plan, resumed under another."""
    steps = 3 * STEPS_PER_KILL
    whole = Case(folder=folder / "whole64", grid=grid, steps=steps, float64=True)
    first = Case(folder=folder / "moved64", grid=grid, steps=steps, float64=True)
    whole.finish()
    while not any((first.folder / "runs").glob("*/checkpoints/[0-9]*")):
        if kill_once(first, "step", rng) is None:
            raise SystemExit("the run ended before it was killed; give it more steps")
    Case(folder=first.folder, grid=other, steps=steps, float64=True).finish()
    plans = [e["grid"] for e in first.events() if e["kind"] == "plan"]
    return {
        "grids": plans,
        "largest_difference": largest_difference(whole.final(), first.final()),
        "tolerance": TOLERANCE,
        "samples_equal": whole.samples() == first.samples(),
    }


def main() -> int:
    """Run both halves and print what they showed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--grid", default="cpu:2/s2")
    parser.add_argument("--other-grid", default="cpu:4/s1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything here instead of in a temporary folder")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="arena-jax-kill-") as temporary:
        folder = arguments.folder or Path(temporary)
        kills = show_kills(folder, arguments.grid, arguments.kills, rng)
        moved = show_other_plan(folder, arguments.grid, arguments.other_grid, rng)
    good = (
        not kills["unlike_leaves"]
        and kills["losses_equal"]
        and kills["samples_equal"]
        and kills["samples_repeated_within_an_epoch"] == 0
        and moved["largest_difference"] <= TOLERANCE
        and moved["samples_equal"]
    )
    print(json.dumps({"passed": good, "seed": arguments.seed, "killed": kills, "other_plan": moved}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
