"""Estimates made from profiles against measured steps: the tiny recipes on 1, 2, 4 and 8 CPU devices.

The plans are those of :mod:`benchmarks._plan_space`. ``compile`` chooses the plans and fills the compile cache,
before any profile could change the choice. ``measure`` times the pieces as `arena-jax profile run` does and rounds of
all plans of the allocation (:mod:`benchmarks._steps`) by turns, since the speed of a shared machine drifts by more
than the errors that are looked for. ``report`` compares. Each part is resumable: steps and pieces are kept under
``$ARENA_JAX_HOME``.

    python -m benchmarks.profile_accuracy [PART]... [--recipe gpt_tiny]... [--on cpu:4]... [--rounds 5]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from arena_jax.compiler import analyse
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.inter_op.grid_search import estimate_plan
from arena_jax.compiler.profiling.pieces import pieces_of
from arena_jax.compiler.profiling.profiler import profile
from arena_jax.grid import Allocation, ProfileStore
from arena_jax.home import profiles
from arena_jax.node_rates import node_rates
from arena_jax.start import start_jax
from benchmarks._plan_space import RECIPES, problem_of
from benchmarks._report import table, write
from benchmarks._steps import Turns, kept

NAME = "profile_accuracy"
ALLOCATIONS = ("cpu:1", "cpu:2", "cpu:4", "cpu:8")
PARTS = ("compile", "measure", "report")
WANTED = {"cpu:1": 0.05, "cpu:2": 0.08, "cpu:4": 0.15, "cpu:8": 0.15}
# An error below this many times the spread of repeats says nothing.
SPREADS = 1.5


def measure(recipe: str, spec: str, rounds: int, budget_s: float | None) -> None:
    """Time the pieces that are not known and, in between, rounds of steps."""
    allocation = Allocation.parse(spec)
    turns = Turns(recipe, spec)
    turns.compile()
    first = turns.rounds

    def turn(done: int, total: int, left_s: float) -> None:
        print(f"  {done} of {total} pieces, about {left_s:.0f} s left", flush=True)
        turns.until(first + math.ceil((rounds - first) * done / total))

    outcome = profile(
        pieces_of(analyse(turns.problem), [allocation], hardware_of),
        turns.problem,
        allocation.device_type,
        ProfileStore(profiles()),
        num_devices=allocation.num_devices,
        budget_s=budget_s,
        progress=turn,
    )
    turns.until(rounds)
    print(
        f"{recipe} on {spec}: {len(turns.plans)} plans, {rounds} rounds,"
        f" {outcome.timed} pieces timed, {outcome.known} known, {outcome.device_s:.1f} s on devices",
        flush=True,
    )


def compare(recipe: str, spec: str) -> list[dict[str, Any]]:
    """Estimate and measurement of every plan that was measured."""
    plans = [p for p in kept(recipe, spec) if p.steps_s]
    if not plans:
        return []
    problem, _ = problem_of(recipe)
    analysis = analyse(problem)
    hardware = hardware_of(Allocation.parse(spec))
    rows = []
    for p in plans:
        found = estimate_plan(analysis, p.plan, hardware)
        rows.append(
            {
                "recipe": recipe,
                "on": spec,
                "plan": p.name,
                "step_s": p.step_s,
                "spread": p.spread,
                "estimate_s": found.step_time_s,
                "error": found.step_time_s / p.step_s - 1,
                "measured_share": found.measured_share,
                "breakdown": dict(found.breakdown),
            }
        )
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    head = ["on", "plans", "mean error", "wanted", "spread of repeats", "bias", "worst", "measured share"]
    cells = []
    for spec in ALLOCATIONS:
        for recipe in (None, *RECIPES):
            mine = [r for r in rows if r["on"] == spec and recipe in (None, r["recipe"])]
            if not mine:
                continue
            errors = np.array([r["error"] for r in mine])
            spread = float(np.median([r["spread"] for r in mine]))
            worst = mine[int(np.abs(errors).argmax())]
            cells.append(
                [
                    spec if recipe is None else f"  {recipe}",
                    len(mine),
                    f"{np.abs(errors).mean():.1%}",
                    f"{max(WANTED[spec], SPREADS * spread):.1%}" if recipe is None else "",
                    f"{spread:.1%}",
                    f"{errors.mean():+.1%}",
                    f"{worst['error']:+.1%} {worst['plan']}",
                    f"{np.mean([r['measured_share'] for r in mine]):.2f}",
                ]
            )
    lines += table(head, cells)
    lines += [
        "",
        (
            "Mean error is the mean over plans of |estimate / measured - 1|, the measured step the median of its"
            f" rounds; the spread is half the range of the rounds. Wanted is the target or {SPREADS} times the median"
            " spread, whichever is larger."
        ),
        "",
        *table(
            ["recipe", "on", "plan", "measured ms", "estimate ms", "error"],
            [
                [
                    *(r["recipe"], r["on"], r["plan"]),
                    *(f"{1e3 * r['step_s']:.1f}", f"{1e3 * r['estimate_s']:.1f}", f"{r['error']:+.1%}"),
                ]
                for r in rows
            ],
        ),
    ]
    write(NAME, title="Steps estimated from profiles", lines=lines, data={"results": list(rows)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--on", action="append", choices=ALLOCATIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, help="seconds of profiling for each recipe and allocation")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start_jax(8)
    pairs = [(recipe, spec) for recipe in args.recipe or RECIPES for spec in args.on or ALLOCATIONS]
    parts = args.parts or PARTS
    if "compile" in parts:
        for recipe, spec in pairs:
            Turns(recipe, spec).compile()
            print(f"{recipe} on {spec}: compiled", flush=True)
    if "measure" in parts:
        node_rates()  # of the whole node, before this process is kept on some of its cores
        for recipe, spec in pairs:
            measure(recipe, spec, args.rounds, args.budget)
    if "report" in parts:
        report([row for recipe, spec in pairs for row in compare(recipe, spec)])


if __name__ == "__main__":
    main()
