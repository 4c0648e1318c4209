"""A space of plans, enumerated. Shared by what compares plans with each other.

On each allocation the space holds, for one stage, every (dp, tp) with no ZeRO and with ZeRO-3, and for
2 to 4 stages every (dp, tp) that is alike in all stages, at each number of microbatches, with the
layers cut where that plan is best; on one device, every number of microbatches with and without
rematerialisation. Pure data parallelism, FSDP and Megatron tensor parallelism are in it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from arena_jax.compiler import Analysis, Problem
from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.search import plan_problem
from arena_jax.grid import Allocation, GridShape, Plan, grids_of
from arena_jax.job import build
from arena_jax.recipe import load_recipe

# Overrides that bring a step to 50 ms and more on two cores.
RECIPES = {
    "gpt_tiny": (),
    "bert_tiny": (),
    "moe_tiny": (),
    "wide_resnet_tiny": ("global_batch=96",),
}
MAX_STAGES = 4
MICROBATCHES = (1, 2, 4, 8)


def problem_of(recipe: str) -> tuple[Problem, Any]:
    """The problem of a recipe, and one batch of its data."""
    job = build(load_recipe(recipe, list(RECIPES[recipe])))
    problem = job.problem()
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
        alone = grid.num_devices == 1  # there is little else to choose
        numbers = MICROBATCHES if alone else (1,) if grid.num_stages == 1 else MICROBATCHES[1:]
        for tp in (1, 2, 4, 8):
            if per_stage % tp:
                continue
            for zero in (0, 3) if grid.num_stages == 1 and per_stage > tp else (0,):
                for m in (chosen_microbatches,) if coupled else numbers:
                    yield Constraints(stages=grid.num_stages, dp=per_stage // tp, tp=tp, zero=zero, remat="off"), m
                    if alone:
                        yield Constraints(stages=1, dp=1, tp=1, zero=0, remat="on"), m


def planned(analysis: Analysis, allocation: Allocation, pins: Constraints, m: int) -> tuple[Plan, float] | None:
    """The plan under pins that say its number of stages, and the seconds it is estimated to take; none may fit."""
    assert pins.stages is not None
    grid = GridShape(allocation, pins.stages)
    (row,) = plan_problem(analysis.problem, [grid], constraints=pins, num_microbatches=m, analysis=analysis)
    return None if row.plan is None or row.step_time_s is None else (row.plan, row.step_time_s)


def candidates(analysis: Analysis, allocation: Allocation) -> list[tuple[Plan, float]]:
    """All plans of the space without repeats, the chosen one first, and the seconds they are estimated to take."""
    rows = [row for row in plan_problem(analysis.problem, [allocation], analysis=analysis) if row.feasible]
    best = min(rows, key=lambda row: row.step_time_s or np.inf)
    assert best.plan is not None
    assert best.step_time_s is not None
    found = {best.plan.plan_id: (best.plan, best.step_time_s)}
    for pins, m in pins_of(allocation, bool(analysis.coupling), best.plan.num_microbatches):
        plan = planned(analysis, allocation, pins, m)
        if plan is not None:
            found.setdefault(plan[0].plan_id, plan)
    return list(found.values())
