"""Which process runs what: one process for each node of a plan's allocation."""

from arena_jax.errors import InfeasibleError
from arena_jax.grid import Allocation, GridShape, IndexRow, Plan, PlanIndex


def processes_of_stages(plan: Plan) -> tuple[int, ...]:
    """The process of each stage.

    Raises:
        InfeasibleError: a stage of several spans processes.
    """
    per_process = plan.grid.allocation.devices_per_node
    found = []
    for stage, numbers in enumerate(plan.device_numbers):
        processes = {number // per_process for number in numbers}
        if len(processes) > 1:
            raise InfeasibleError(
                f"stage {stage} of {plan.grid} spans {len(processes)} processes, which only a plan of one stage may",
                hint=f"use {plan.grid.allocation}/s1, or at least one stage for each node",
            )
        found.append(processes.pop())
    return tuple(found)


def check_assignable(plan: Plan) -> None:
    """Raise :class:`InfeasibleError` for a plan that cannot run in one process a node."""
    if plan.grid.num_stages > 1 and plan.grid.allocation.num_nodes > 1:
        processes_of_stages(plan)


def assignable(index: PlanIndex, target: GridShape | Allocation) -> IndexRow | None:
    """The fastest row of a target whose plan can run in one process a node; ``None`` where there is none."""
    best: IndexRow | None = None
    for row in index:
        if row.plan is None or row.estimate is None or (isinstance(target, GridShape) and row.grid != target):
            continue
        try:
            check_assignable(row.plan)
        except InfeasibleError:
            continue
        if best is None or best.estimate is None or row.estimate.step_time_s < best.estimate.step_time_s:
            best = row
    return best
