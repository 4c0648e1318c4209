"""A running gpt_tiny goes from the CPU to a GPU and back, asked by its hook: what each change costs, and the losses.

Needs an NVIDIA GPU that jax can use (the extra `cuda12`); under 4 minutes. Without one it says so and leaves the
results as they are. The run is `arena-jax train` in a process of its own, as a user starts it.

    python -m benchmarks.gpu_swap
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import table, write

STEPS, TO_GPU, TO_CPU = 60, 15, 45
TIME_LIMIT_S = 220.0
CPU = "cpu:1"
FIND = "import jax; from arena_jax.planner import allocation_of; print(allocation_of(jax.devices('cuda')[:1]))"


def find_gpu() -> str:
    """The allocation of one GPU, or an empty string."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", FIND], env=environment, capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 and done.stdout.strip() else ""


def train(folder: Path, script: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train through a script; the report of the run, and its events."""
    command = [sys.executable, "-m", "arena_jax", "train", "gpt_tiny", f"steps={STEPS}", f"plan.grid={CPU}", "--json"]
    settings = ["tracking.enabled=false", "eval.every=0", f"checkpoint.dir={folder}"]
    done = subprocess.run(
        [*command, *settings, f"hook.script={json.dumps(list(script))}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIME_LIMIT_S,
    )
    (log,) = folder.glob("*/events.jsonl")
    return json.loads(done.stdout.splitlines()[-1]), [json.loads(line) for line in log.read_text().splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    gpu = find_gpu()
    if not gpu:
        print("no NVIDIA GPU that jax can use: nothing was measured", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        moved, events = train(Path(folder) / "moved", [f"{TO_GPU}: {gpu}", f"{TO_CPU}: {CPU}"])
        stayed, _ = train(Path(folder) / "stayed", [])
    steps = {event["step"]: event["step_time_s"] for event in events if event["kind"] == "step"}
    differences = [abs(a - b) / abs(b) for a, b in zip(moved["losses"], stayed["losses"], strict=True)]
    rows = []
    for swap in moved["swaps"]:
        after = [steps[s] for s in range(swap["step"] + 2, swap["step"] + 12)]
        rows.append(
            [
                *(swap["step"], swap["from"], swap["to"], f"{swap['background_s']:.1f} s", f"{swap['stall_s']:.1f} s"),
                f"{statistics.median(after) * 1e3:.1f} ms",
            ]
        )
    lines = [
        *table(["step", "from", "to", "compiled ahead in", "stalled", "step after it"], rows),
        "",
        f"{len(differences)} steps; losses differ from a run that stayed on the CPU by at most {max(differences):.1e}.",
    ]
    write(
        "gpu_swap",
        title="A running training goes to a GPU and back",
        lines=lines,
        data={"gpu": gpu, "swaps": moved["swaps"], "losses": moved["losses"], "losses_on_cpu": stayed["losses"]},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
