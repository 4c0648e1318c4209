"""What profiling costs against running: device seconds for all candidate plans of a recipe on 8 devices.

Profiling times each piece once however many plans hold it, on one device. Running times every plan on
all its devices. Both with the same number of repeats and the same warm-up. A second recipe that shares
layers pays for the new ones only. Plans' steps are those that :mod:`benchmarks._steps` keeps, where they
were measured; the others count as what they are estimated to take.

    python -m benchmarks.profile_cost [--on cpu:8] [--recipe gpt_tiny] [--second bert_tiny] [--store FILE]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from arena_jax.compiler import analyse
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.profiling.pieces import pieces_of
from arena_jax.compiler.profiling.profiler import REPEATS, profile
from arena_jax.grid import Allocation, ProfileStore
from arena_jax.start import start_jax
from benchmarks._plan_space import RECIPES, problem_of
from benchmarks._report import table, write
from benchmarks._steps import enumerated, kept

NAME = "profile_cost"
# Published for the system this one follows, as an average over its models.
WANTED = 18.1
# Runs before the repeats: one that compiles and fills caches, one that tells how long a run is.
WARM_UP = 2


def profile_into(store: ProfileStore, recipe: str, spec: str) -> dict[str, Any]:
    """Profile a recipe into a store; what that took."""
    problem, _ = problem_of(recipe)
    allocation = Allocation.parse(spec)
    pieces = pieces_of(analyse(problem), [allocation], hardware_of)
    began = time.perf_counter()
    outcome = profile(
        pieces,
        problem,
        allocation.device_type,
        store,
        num_devices=allocation.num_devices,
        progress=lambda done, total, left_s: print(f"  {done} of {total}, about {left_s:.0f} s left", flush=True),
    )
    return {
        "recipe": recipe,
        "timed": outcome.timed,
        "known": outcome.known,
        "device_s": outcome.device_s,
        "wall_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="cpu:8")
    parser.add_argument("--recipe", default="gpt_tiny", choices=list(RECIPES))
    parser.add_argument("--second", default="bert_tiny", choices=list(RECIPES))
    parser.add_argument("--store", type=Path, help="keep the profiles here, and go on where an earlier run stopped")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start_jax(8)
    problem, _ = problem_of(args.recipe)
    allocation = Allocation.parse(args.on)
    plans = kept(args.recipe, args.on) or enumerated(args.recipe, args.on, problem)
    times = [plan.step_s if plan.steps_s else plan.estimate_s for plan in plans]
    measured = sum(bool(plan.steps_s) for plan in plans)
    running_s = (REPEATS + WARM_UP) * allocation.num_devices * sum(times)
    with tempfile.TemporaryDirectory() as folder:
        store = ProfileStore(args.store or Path(folder) / "profiles.sqlite")
        first = profile_into(store, args.recipe, args.on)
        second = profile_into(store, args.second, args.on)
    ratio = running_s / first["device_s"]
    rows = [
        [f"run {len(plans)} plans of {args.recipe} on {args.on}", "", f"{running_s:.0f}", ""],
        ["profile it", f"{first['timed']} ({first['known']} known)", f"{first['device_s']:.1f}", f"{ratio:.1f}"],
        [
            f"profile {args.second} then",
            f"{second['timed']} ({second['known']} known)",
            f"{second['device_s']:.1f}",
            "",
        ],
    ]
    lines = [
        *table(["", "pieces timed", "device seconds", "times less"], rows),
        "",
        (
            f"{REPEATS} repeats and {WARM_UP} runs before them, for pieces as for plans; wanted {WANTED} times less."
            f" {measured} of {len(plans)} plans' steps were measured, the others are estimated. Compiling is counted on"
            " neither side."
        ),
    ]
    data = {
        "on": args.on,
        "num_plans": len(plans),
        "num_measured": measured,
        "running_device_s": running_s,
        "ratio": ratio,
        "profiling": [first, second],
    }
    write(NAME, title="What profiling costs", lines=lines, data=data)


if __name__ == "__main__":
    main()
