"""What profiling costs against running: device seconds for all candidate plans of a recipe on 8 devices.

Profiling times each piece once however many plans hold it, on one device. Running times every plan on
all its devices. Both with the same number of repeats and the same warm-up. Candidates are the plans that the pieces
are made for, as far as all their stages are alike: every number of stages, mesh of a stage, number of microbatches,
ZeRO level and rematerialisation. Their steps are those that :mod:`benchmarks._steps` keeps, where they were measured;
the others count as what they are estimated to take. A second recipe that shares layers pays for the new ones only.

    python -m benchmarks.profile_cost [--on cpu:8] [--recipe gpt_tiny] [--second bert_tiny] [--store FILE]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arena_jax.compiler import Analysis, analyse
from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.profiling.pieces import pieces_of
from arena_jax.compiler.profiling.profiler import REPEATS, profile
from arena_jax.compiler.search import MAX_STAGES, microbatch_choices
from arena_jax.grid import Allocation, ProfileStore, grids_of, logical_meshes
from arena_jax.start import start_jax
from benchmarks._plan_space import RECIPES, name_of, planned, problem_of
from benchmarks._report import table, write
from benchmarks._steps import kept

NAME = "profile_cost"
# Published for the system this one follows, as an average over its models.
WANTED = 18.1
# Runs before the repeats: one that compiles and fills caches, one that tells how long a run is.
WARM_UP = 2


def candidates(analysis: Analysis, allocation: Allocation) -> dict[str, float]:
    """Estimated step seconds of every plan whose stages are alike, by the plan's name."""
    found: dict[str, float] = {}
    for grid in grids_of(allocation, MAX_STAGES):
        if grid.num_devices % grid.num_stages:
            continue
        for dp, tp in logical_meshes(grid.num_devices // grid.num_stages):
            for m in microbatch_choices(analysis.problem, None):
                for option in Constraints().options():
                    if option.zero and dp == 1:
                        continue
                    remat = "on" if option.remat else "off"
                    pins = Constraints(stages=grid.num_stages, dp=dp, tp=tp, zero=option.zero, remat=remat)
                    plan = planned(analysis, allocation, pins, m)
                    if plan is not None:
                        found[name_of(plan[0])] = plan[1]
    return found


def running_s(steps_s: Iterable[float], allocation: Allocation) -> float:
    """Device seconds to run plans as often as pieces are."""
    return (REPEATS + WARM_UP) * allocation.num_devices * sum(steps_s)


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
    measured = [plan for plan in kept(args.recipe, args.on) if plan.steps_s]
    steps_s = candidates(analyse(problem), allocation) | {p.name: p.step_s for p in measured}
    all_s, measured_s = running_s(steps_s.values(), allocation), running_s([p.step_s for p in measured], allocation)
    with tempfile.TemporaryDirectory() as folder:
        store = ProfileStore(args.store or Path(folder) / "profiles.sqlite")
        first = profile_into(store, args.recipe, args.on)
        second = profile_into(store, args.second, args.on)
    ratio = all_s / first["device_s"]
    few = measured_s / first["device_s"]
    rows = [
        [f"run {len(steps_s)} plans of {args.recipe} on {args.on}", "", f"{all_s:.0f}", ""],
        [f"of these the {len(measured)} that were measured", "", f"{measured_s:.0f}", ""],
        [
            "profile it",
            f"{first['timed']} ({first['known']} known)",
            f"{first['device_s']:.1f}",
            f"{ratio:.1f} ({few:.1f} than the measured)",
        ],
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
            f" {len(measured)} of {len(steps_s)} plans' steps were measured, the others are estimated. Compiling is"
            " counted on neither side."
        ),
    ]
    data = {
        "on": args.on,
        "num_plans": len(steps_s),
        "num_measured": len(measured),
        "running_device_s": all_s,
        "running_measured_device_s": measured_s,
        "ratio": ratio,
        "profiling": [first, second],
    }
    write(NAME, title="What profiling costs", lines=lines, data=data)


if __name__ == "__main__":
    main()
