"""How good the chosen plan is: every plan of an enumerated space, measured beside it in interleaved rounds.

On each allocation the space holds, for one stage, every (dp, tp) with no ZeRO and with ZeRO-3, and for
2 to 4 stages every (dp, tp) that is alike in all stages, at each number of microbatches, with the
layers cut where that plan is best. Pure data parallelism, FSDP and Megatron tensor parallelism are in
it. All compiled plans of an allocation run in turn, round after round, in one process; the figure of a
plan is the median of its steps.

    python -m benchmarks.plan_quality [--recipe gpt_tiny]... [--on cpu:4]... [--rounds 7]
"""

import argparse
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from arena_jax.compiler import Analysis, Problem, analyse, make_problem
from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.search import plan_problem
from arena_jax.grid import Allocation, GridShape, Plan, grids_of
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from arena_jax.runtime import compile_program
from benchmarks._report import RESULTS, table, write

NAME = "plan_quality"
# Overrides that bring a step to 50 ms and more on two cores.
RECIPES = {
    "gpt_tiny": (),
    "bert_tiny": (),
    "moe_tiny": (),
    "wide_resnet_tiny": ("global_batch=96",),
}
ALLOCATIONS = ("cpu:2", "cpu:4", "cpu:8")
MAX_STAGES = 4
MICROBATCHES = (1, 2, 4, 8)
WANTED_MEAN, WANTED_WORST, WANTED_BY_HAND = 0.95, 0.90, 1.02


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, what people call it, and what it is estimated to take."""

    name: str
    plan: Plan
    estimate_s: float


def problem_of(recipe: str) -> tuple[Problem, Any]:
    """The problem of a recipe, and one batch of its data."""
    job = build(load_recipe(recipe, list(RECIPES[recipe])))
    problem = make_problem(
        job.make_model, job.optimizer, job.loss_fn, job.example_batch, precision=job.precision, seed=job.seed
    )
    return problem, next(iter(job.make_data()))


def name_of(plan: Plan) -> str:
    stages = "+".join(f"{s.dp}x{s.tp}" for s in plan.stages)
    extra = "".join(f" zero{s.zero}" for s in plan.stages[:1] if s.zero) + " remat" * any(s.remat for s in plan.stages)
    return f"{stages} M{plan.num_microbatches}{extra}"


def pins_of(allocation: Allocation, coupled: bool, chosen_microbatches: int) -> Iterator[tuple[Constraints, int]]:
    """Pins of every plan of the space; a model that couples samples keeps its number of microbatches."""
    for grid in grids_of(allocation, MAX_STAGES):
        if grid.num_devices % grid.num_stages:
            continue
        per_stage = grid.num_devices // grid.num_stages
        numbers = (1,) if grid.num_stages == 1 else MICROBATCHES[1:]
        for tp in (1, 2, 4, 8):
            if per_stage % tp:
                continue
            for zero in (0, 3) if grid.num_stages == 1 and per_stage > tp else (0,):
                for m in (chosen_microbatches,) if coupled else numbers:
                    yield Constraints(stages=grid.num_stages, dp=per_stage // tp, tp=tp, zero=zero, remat="off"), m


def candidates(analysis: Analysis, allocation: Allocation) -> tuple[Candidate, list[Candidate]]:
    """The plan that is chosen, and all plans of the space without repeats, the chosen one first."""
    rows = [row for row in plan_problem(analysis.problem, [allocation], analysis=analysis) if row.feasible]
    best = min(rows, key=lambda row: row.step_time_s or np.inf)
    assert best.plan is not None
    assert best.step_time_s is not None
    chosen = Candidate(name=name_of(best.plan), plan=best.plan, estimate_s=best.step_time_s)
    found = {chosen.plan.plan_id: chosen}
    for pins, m in pins_of(allocation, bool(analysis.coupling), best.plan.num_microbatches):
        assert pins.stages is not None
        grid = GridShape(allocation, pins.stages)
        (row,) = plan_problem(analysis.problem, [grid], constraints=pins, num_microbatches=m, analysis=analysis)
        if row.plan is not None and row.step_time_s is not None:
            found.setdefault(
                row.plan.plan_id, Candidate(name=name_of(row.plan), plan=row.plan, estimate_s=row.step_time_s)
            )
    return chosen, list(found.values())


def by_hand(name: str, allocation: Allocation) -> str | None:
    """What people would call a plan of the space."""
    n = allocation.num_devices
    return {f"{n}x1 M1": "dp", f"{n}x1 M1 zero3": "fsdp", f"1x{n} M1": "tp"}.get(name)


def measure(problem: Problem, batch: Any, plans: Sequence[Candidate], rounds: int) -> dict[str, float]:
    """Plan id -> median seconds of a step; all plans take turns."""
    running = []
    for candidate in plans:
        program = compile_program(problem, candidate.plan)
        running.append([candidate.plan.plan_id, program, program.init()])
    times: dict[str, list[float]] = {c.plan.plan_id: [] for c in plans}
    for turn in range(rounds + 1):
        for entry in running:
            plan_id, program, state = entry
            began = time.perf_counter()
            for _ in range(2):
                state, metrics = program.step(state, batch)
                jax.block_until_ready(metrics)
            jax.block_until_ready(state.stages)
            entry[2] = state
            if turn:
                times[plan_id].append((time.perf_counter() - began) / 2)
    return {plan_id: float(np.median(t)) for plan_id, t in times.items()}


def run(recipe: str, spec: str, rounds: int) -> dict[str, Any]:
    problem, batch = problem_of(recipe)
    allocation = Allocation.parse(spec)
    chosen, plans = candidates(analyse(problem), allocation)
    seconds = measure(problem, batch, plans, rounds)
    rows = [
        {
            "plan": c.name,
            "by_hand": by_hand(c.name, allocation),
            "chosen": c is chosen,
            "step_s": seconds[c.plan.plan_id],
            "estimate_s": c.estimate_s,
        }
        for c in plans
    ]
    rows.sort(key=lambda row: float(row["step_s"]))  # type: ignore[arg-type]
    best, mine = rows[0]["step_s"], seconds[chosen.plan.plan_id]
    hand = [row["step_s"] for row in rows if row["by_hand"]]
    return {
        "recipe": recipe,
        "allocation": spec,
        "num_plans": len(rows),
        "chosen": chosen.name,
        "best": rows[0]["plan"],
        "share_of_best": best / mine,  # type: ignore[operator]
        "against_by_hand": mine / min(hand) if hand else None,  # type: ignore[type-var]
        "plans": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--on", action="append")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
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
    ]
    write(NAME, title="The chosen plan against every plan of a space", lines=lines, data={"results": list(results)})


if __name__ == "__main__":
    main()
