"""Plan a problem: the best plan of every grid of some allocations."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from arena_jax.compiler.analysis import Analysis, Constraints, analyse
from arena_jax.compiler.cost import Hardware, hardware_of
from arena_jax.compiler.engines import check_engine
from arena_jax.compiler.inter_op.grid_search import plan_grid
from arena_jax.compiler.job_key import job_key
from arena_jax.compiler.problem import Problem
from arena_jax.errors import UsageError
from arena_jax.grid import (
    CATALOGUE,
    Allocation,
    Catalogue,
    GridShape,
    IndexRow,
    PlanIndex,
    SearchInterrupted,
    grids_of,
    tilings,
)

MAX_STAGES = 8
MAX_MICROBATCHES = 32
# How a reason ends that only another type or precision takes away.
PINNED = "the run's precision is pinned"
# More than any device has.
UNLIMITED_BYTES = 1 << 60


def plan_problem(
    problem: Problem,
    targets: Iterable[Allocation | GridShape],
    *,
    constraints: Constraints | None = None,
    num_microbatches: int | None = None,
    catalogue: Catalogue = CATALOGUE,
    analysis: Analysis | None = None,
) -> PlanIndex:
    """Plan every grid of the allocations.

    Args:
        targets: allocations, each at every number of stages, and single grids.
        num_microbatches: pinned number; ``None`` chooses one per grid where nothing couples samples,
            and otherwise one for all allocations.

    Returns:
        One row per grid: its best plan, or why none fits.

    Raises:
        UsageError: pins that contradict each other or the batch.
        SearchInterrupted: Ctrl-C; holds what was found until then.
    """
    started = time.perf_counter()
    constraints = constraints or Constraints()
    check_pins(problem, constraints, num_microbatches)
    analysis = analysis or analyse(problem)
    choices = microbatch_choices(problem, num_microbatches)
    grids = [(grid, hardware_of(grid.allocation, catalogue)) for grid in grids_of_targets(targets, constraints)]
    rows: dict[tuple[GridShape, int], IndexRow] = {}
    interrupted = False
    try:
        for grid, hardware in grids:
            lacking = _lacking(analysis, hardware)
            for m in choices:
                if lacking:
                    rows[grid, m] = IndexRow(grid=grid, num_microbatches=m, plan=None, estimate=None, reason=lacking)
                else:
                    rows[grid, m] = plan_grid(analysis, grid, hardware, constraints, m)
    except KeyboardInterrupt:
        interrupted = True
    done = [grid for grid, _ in grids if all((grid, m) in rows for m in choices)]
    together = num_microbatches is None and bool(analysis.coupling)
    if together:
        chosen = _common_microbatches(rows, done, choices) if done else 0
        picked = [rows[grid, chosen] for grid in done]
    else:
        picked = [fastest([rows[grid, m] for m in choices]) for grid in done]
    key = job_key(
        problem,
        analysis.trace,
        [grid for grid, _ in grids],
        constraints=constraints,
        num_microbatches=num_microbatches,
        coupled=bool(analysis.coupling),
        catalogue=catalogue,
    )
    index = PlanIndex(
        picked,
        key=key,
        search_s=time.perf_counter() - started,
        num_programs_solved=len(rows),
        lower_bounds_s={grid: _at_least_s(analysis, hardware) for grid, hardware in grids if grid not in done},
    )
    if interrupted:
        raise SearchInterrupted(index)
    return index


def _lacking(analysis: Analysis, hardware: Hardware) -> str:
    """Why a device type cannot honour the dtypes that the job computes in; empty where it can."""
    if not hardware.device.lacks:
        return ""
    used = {leaf.dtype for leaf in analysis.problem.leaves} | {
        out.aval.dtype for eqn in analysis.trace.jaxpr.eqns for out in eqn.outvars if hasattr(out.aval, "dtype")
    }
    names = {str(dtype) for dtype in used} | {analysis.problem.precision.accumulation}
    missing = sorted(names.intersection(hardware.device.lacks))
    if not missing:
        return ""
    return f"{hardware.device.name} has no {' or '.join(missing)} arithmetic, and {PINNED}"


def _at_least_s(analysis: Analysis, hardware: Hardware) -> float:
    """Seconds below which no plan's step is estimated: what one device computes, split evenly, never waiting."""
    endless = replace(hardware, device=replace(hardware.device, memory_bytes=UNLIMITED_BYTES))
    one = GridShape(Allocation(hardware.device.name, 1, 1), 1)
    row = plan_grid(analysis, one, endless, Constraints(zero=0, remat="off"), 1)
    computed_s = 0.0 if row.estimate is None else row.estimate.breakdown["compute_s"]
    return computed_s / hardware.allocation.num_devices


def check_pins(problem: Problem, constraints: Constraints, num_microbatches: int | None) -> None:
    """Raise :class:`UsageError` for pins that no grid can satisfy, and :class:`ArenaError` for an engine not there."""
    check_engine(constraints.engine)
    if constraints.space == "alpa" and constraints.zero not in ("search", 0):
        raise UsageError(
            f"plan.space=alpa has no ZeRO, and plan.zero={constraints.zero} is pinned",
            hint="use plan.space=full, or leave plan.zero out",
        )
    batch = problem.global_batch
    if num_microbatches is not None and (num_microbatches < 1 or batch % num_microbatches):
        nearest = min((m for m in range(1, batch + 1) if batch % m == 0), key=lambda m: abs(m - num_microbatches))
        raise UsageError(
            f"a global batch of {batch} does not split into {num_microbatches} microbatches",
            hint=f"use {nearest}, which divides it",
        )


def microbatch_choices(problem: Problem, pinned: int | None) -> list[int]:
    """The numbers of microbatches that are tried."""
    if pinned is not None:
        return [pinned]
    batch = problem.global_batch
    # A microbatch of one row may be traced into other equations than a larger one.
    return [m for m in (1, 2, 4, 8, 16, 32) if m == 1 or (batch % m == 0 and m <= min(batch // 2, MAX_MICROBATCHES))]


def grids_of_targets(targets: Iterable[Allocation | GridShape], constraints: Constraints) -> list[GridShape]:
    """The grids meant, each once.

    Raises:
        UsageError: a number of stages that the allocation cannot be cut into.
    """
    grids: dict[GridShape, None] = {}
    for target in targets:
        if isinstance(target, Allocation):
            if constraints.stages is None:
                grids.update(dict.fromkeys(grids_of(target, MAX_STAGES)))
                continue
            target = GridShape(target, constraints.stages)
        if target.num_stages > target.num_devices or not tilings(target):
            possible = ", ".join(str(g.num_stages) for g in grids_of(target.allocation, MAX_STAGES))
            raise UsageError(
                f"{target.allocation} cannot be cut into {target.num_stages} stages",
                hint=f"use one of {possible} stages",
            )
        grids[target] = None
    return list(grids)


def fastest(rows: Sequence[IndexRow]) -> IndexRow:
    """The fastest row of one grid, or the one that comes closest to fitting."""
    feasible = [row for row in rows if row.feasible]
    if feasible:
        return min(feasible, key=lambda row: row.step_time_s or 0.0)
    return min(rows, key=lambda row: row.least_memory_bytes or float("inf"))


def _common_microbatches(
    rows: dict[tuple[GridShape, int], IndexRow], grids: Sequence[GridShape], choices: Sequence[int]
) -> int:
    """One number for all allocations: most allocations served, then least geometric mean of step times."""

    def quality(m: int) -> tuple[int, float]:
        best: dict[Allocation, float] = {}
        for grid in grids:
            seconds = rows[grid, m].step_time_s
            if seconds is not None:
                best[grid.allocation] = min(seconds, best.get(grid.allocation, seconds))
        return len(best), -float(np.mean(np.log(list(best.values())))) if best else 0.0

    return max(choices, key=quality)
