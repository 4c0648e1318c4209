"""``arena-jax plan --aot``: the best plans as XLA's own compilers build them for their targets."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from arena_jax.cli import console
from arena_jax.cli.progress import seconds
from arena_jax.deviceless.extras import CompilerMissing
from arena_jax.errors import counted
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, IndexRow, Plan, PlanIndex

if TYPE_CHECKING:
    from arena_jax.deviceless.client import CompiledPlan, Program
    from arena_jax.deviceless.correction import Corrected


def compile_best(
    recipe: str, overrides: Sequence[str], index: PlanIndex, catalogue: Catalogue = CATALOGUE
) -> tuple[PlanIndex, list[dict[str, Any]]]:
    """Compile the best plan of each allocation, and the next best where it does not fit.

    Returns:
        The index with corrected rows, and what ``--json`` says of every plan that was compiled.
    """
    reports: list[dict[str, Any]] = []
    for allocation in dict.fromkeys(row.grid.allocation for row in index):
        platform = catalogue[allocation.device_type].platform
        if platform == "cpu":
            console.note(f"{allocation}: --aot is for GPUs and TPUs; `train` compiles for a CPU itself")
            continue
        try:
            index = _compile_allocation(recipe, overrides, index, allocation, catalogue, reports)
        except CompilerMissing as missing:
            console.note(f"{allocation}: {missing}")
            reports.append({"allocation": str(allocation), "missing": missing.message, "hint": missing.hint})
    return index, reports


def _compile_allocation(
    recipe: str,
    overrides: Sequence[str],
    index: PlanIndex,
    allocation: Allocation,
    catalogue: Catalogue,
    reports: list[dict[str, Any]],
) -> PlanIndex:
    from arena_jax.compiler.cost import hardware_of
    from arena_jax.deviceless.client import compile_plans
    from arena_jax.deviceless.correction import correct

    hardware = hardware_of(allocation, catalogue)
    tried: list[Plan] = []
    # What is compiled may turn out slower than a plan that was not, or not fit: go on until the best is one that was.
    while True:
        row = index.best(allocation)
        if row is None or row.plan is None or row.plan in tried:
            return index
        tried.append(row.plan)
        for compiled in compile_plans(recipe, overrides, [row.plan], catalogue=catalogue, progress=_progress):
            corrected = correct(row, compiled, hardware)
            reports.append(_report(row, corrected, compiled))
            index = _with_row(index, corrected.row)
            if corrected.missing_bytes:
                console.note(f"{row.grid}: {corrected.row.reason}")


def _progress(plan: Plan, program: "Program") -> None:
    how = "known" if program.known else f"compiled in {program.compile_s:.1f} s"
    console.note(f"{plan.grid}: {program.name} {how}")


def _with_row(index: PlanIndex, row: IndexRow) -> PlanIndex:
    rows = [row if (r.grid, r.num_microbatches) == (row.grid, row.num_microbatches) else r for r in index]
    return PlanIndex(
        rows,
        key=index.key,
        search_s=index.search_s,
        num_programs_solved=index.num_programs_solved,
        lower_bounds_s=index.lower_bounds_s,
    )


def _report(before: IndexRow, after: "Corrected", compiled: "CompiledPlan") -> dict[str, Any]:
    assert before.estimate is not None
    estimate = after.row.estimate
    return {
        "grid": str(before.grid),
        "plan_id": compiled.plan.plan_id,
        "fits": not after.missing_bytes,
        "missing_bytes": after.missing_bytes,
        "memory_bytes": after.memory_bytes,
        "estimated_memory_bytes": before.estimate.memory_bytes,
        "step_time_s": None if estimate is None else estimate.step_time_s,
        "estimated_step_time_s": before.estimate.step_time_s,
        "communication_s": after.communication_s,
        "hidden_s": after.hidden_s,
        "stages": [asdict(stage) for stage in compiled.stages],
        "programs": [asdict(program) for program in compiled.programs],
    }


def aot_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """What the compilers said of each plan, against the estimate."""
    done = [report for report in reports if "programs" in report]
    if not done:
        return []
    head = ["compiled", "memory GiB", "estimated", "step", "estimated", "hidden"]
    rows = [head]
    for report in done:
        share = report["hidden_s"] / report["communication_s"] if report["communication_s"] else 0.0
        rows.append(
            [
                report["grid"],
                f"{report['memory_bytes'] / 2**30:.4g}",
                f"{report['estimated_memory_bytes'] / 2**30:.4g}",
                "does not fit" if report["step_time_s"] is None else seconds(report["step_time_s"]),
                seconds(report["estimated_step_time_s"]),
                f"{share:.0%}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [""]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:{widths[0]}}", *cells]))
    programs = [program for report in done for program in report["programs"]]
    fresh = [program for program in programs if not program["known"]]
    spent = sum(program["compile_s"] for program in fresh)
    lines.append(f"{counted(len(programs), 'program')}, {len(fresh)} compiled in {spent:.1f} s, the others known")
    return lines
