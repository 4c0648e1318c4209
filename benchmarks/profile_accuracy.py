"""Estimates made from profiles against measured steps: the tiny recipes on 1, 2, 4 and 8 CPU devices.

The plans are those of :mod:`benchmarks._plan_space`. Three parts, each resumable, which may run apart
from each other: ``compile`` fills the compile cache, ``measure`` runs all plans of an allocation in
turn (:mod:`benchmarks._steps`), ``profile`` times the pieces as `arena-jax profile run` does. ``report``
compares. Steps and pieces are kept under ``$ARENA_JAX_HOME``.

    python -m benchmarks.profile_accuracy [PART]... [--recipe gpt_tiny]... [--on cpu:4]... [--rounds 3]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from arena_jax.compiler import analyse
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.inter_op.grid_search import estimate_plan
from arena_jax.grid import Allocation
from arena_jax.start import start_jax
from benchmarks._plan_space import RECIPES, problem_of
from benchmarks._report import table, write
from benchmarks._steps import kept, measure

NAME = "profile_accuracy"
ALLOCATIONS = ("cpu:1", "cpu:2", "cpu:4", "cpu:8")
PARTS = ("compile", "measure", "profile", "report")
WANTED = {"cpu:1": 0.05, "cpu:2": 0.08, "cpu:4": 0.15, "cpu:8": 0.15}
# An error below this many times the spread of repeats says nothing.
SPREADS = 1.5


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, help="seconds of profiling for each recipe and allocation")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start_jax(8)
    pairs = [(recipe, spec) for recipe in args.recipe or RECIPES for spec in args.on or ALLOCATIONS]
    parts = args.parts or PARTS
    for recipe, spec in pairs:
        if "compile" in parts:
            measure(recipe, spec, 0)
        if "measure" in parts:
            measure(recipe, spec, args.rounds)
        if "profile" in parts:
            command = [sys.executable, "-m", "arena_jax", "profile", "run", recipe, *RECIPES[recipe], "--on", spec]
            command += ["--budget", str(args.budget)] if args.budget is not None else []
            subprocess.run(command, check=True)
    if "report" in parts:
        report([row for recipe, spec in pairs for row in compare(recipe, spec)])


if __name__ == "__main__":
    main()
