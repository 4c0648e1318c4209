"""How good the chosen plan is: every plan of an enumerated space, measured beside it in interleaved rounds.

The space is that of :mod:`benchmarks._plan_space`, its steps those of :mod:`benchmarks._steps`, measured now
or kept. A plan is compared with the chosen one round by round, for a shared machine's speed changes between rounds; the
figure is the median of the ratios.

    python -m benchmarks.plan_quality [--recipe gpt_tiny]... [--on cpu:4]... [--rounds 7]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from arena_jax.grid import Allocation
from arena_jax.start import start_jax
from benchmarks._machine import describe
from benchmarks._plan_space import RECIPES
from benchmarks._report import RESULTS, table, write
from benchmarks._steps import measure

NAME = "plan_quality"
ALLOCATIONS = ("cpu:2", "cpu:4", "cpu:8")
WANTED_MEAN, WANTED_WORST, WANTED_BY_HAND = 0.95, 0.90, 1.02


def by_hand(name: str, allocation: Allocation) -> str | None:
    """What people would call a plan of the space."""
    n = allocation.num_devices
    return {f"{n}x1 M1": "dp", f"{n}x1 M1 zero3": "fsdp", f"1x{n} M1": "tp"}.get(name)


def run(recipe: str, spec: str, rounds: int) -> dict[str, Any]:
    plans = measure(recipe, spec, rounds)
    chosen, allocation = plans[0], Allocation.parse(spec)
    # How many times as long as the chosen plan each takes.
    ratios = {p.name: float(np.median(np.array(p.steps_s) / np.array(chosen.steps_s))) for p in plans}
    hand = [ratios[p.name] for p in plans if by_hand(p.name, allocation)]
    rows = [
        {
            "plan": p.name,
            "by_hand": by_hand(p.name, allocation),
            "chosen": p is chosen,
            "step_s": p.step_s,
            "estimate_s": p.estimate_s,
            "ratio": ratios[p.name],
        }
        for p in sorted(plans, key=lambda p: ratios[p.name])
    ]
    return {
        "recipe": recipe,
        "allocation": spec,
        "machine": chosen.machine,
        "num_plans": len(rows),
        "num_rounds": len(chosen.steps_s),
        "chosen": chosen.name,
        "best": rows[0]["plan"],
        "share_of_best": min(ratios.values()),
        "against_by_hand": 1 / min(hand) if hand else None,
        "plans": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--on", action="append")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start_jax(8)
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    found = {(r["recipe"], r["allocation"]): r for r in known}
    for recipe in args.recipe or RECIPES:
        for spec in args.on or ALLOCATIONS:
            found[recipe, spec] = result = run(recipe, spec, args.rounds)
            for row in result["plans"]:
                mark = "*" if row["chosen"] else " "
                print(f"{mark} {row['plan']:24} {row['step_s'] * 1e3:8.1f} ms, est. {row['estimate_s'] * 1e3:8.1f}")
            report(list(found.values()))


def report(results: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            r["recipe"],
            r["allocation"],
            r["num_plans"],
            r["chosen"],
            r["best"],
            f"{r['share_of_best']:.3f}",
            f"{r['against_by_hand']:.3f}" if r["against_by_hand"] else "-",
        ]
        for r in results
    ]
    shares = [r["share_of_best"] for r in results]
    hand = [r["against_by_hand"] for r in results if r["against_by_hand"]]
    lines = [
        *table(["recipe", "on", "plans", "chosen", "fastest", "throughput of it", "time / best by hand"], rows),
        "",
        (
            f"Chosen against fastest: mean {np.mean(shares):.3f} (wanted {WANTED_MEAN}), worst {min(shares):.3f}"
            f" (wanted {WANTED_WORST}); against the best by hand at worst {max(hand):.3f} (wanted {WANTED_BY_HAND})."
        ),
        *_elsewhere(results),
    ]
    write(NAME, title="The chosen plan against every plan of a space", lines=lines, data={"results": list(results)})


def _elsewhere(results: Sequence[dict[str, Any]]) -> list[str]:
    """Which rows are from other machines than this one."""
    lines = []
    for machine in sorted({r["machine"] for r in results} - {describe()}):
        names = ", ".join(f"{r['recipe']} {r['allocation']}" for r in results if r["machine"] == machine)
        lines += ["", f"Measured on another machine ({machine}): {names}."]
    return lines


if __name__ == "__main__":
    main()
