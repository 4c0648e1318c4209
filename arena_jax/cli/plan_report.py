"""What ``arena-jax plan`` says: its ``--json`` object, and the table for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arena_jax.cli.console import width
from arena_jax.cli.progress import meshes, seconds
from arena_jax.grid import CATALOGUE, Catalogue, IndexRow, PlanIndex

if TYPE_CHECKING:
    from arena_jax.compiler import Problem
    from arena_jax.compiler.by_hand import HandWritten
    from arena_jax.job import Job

_MIN_LAYOUT = 9


def report_of(
    job: "Job",
    problem: "Problem",
    index: PlanIndex,
    compared: Sequence["HandWritten"] | None = None,
    catalogue: Catalogue = CATALOGUE,
) -> dict[str, Any]:
    """The object of ``--json``; what an infeasible grid does not have is ``None``.

    ``compared`` are hand-written plans, which stand under a key of their own where any were asked for.
    """
    items, _ = job.items_per_batch
    best = {}
    for allocation in dict.fromkeys(row.grid.allocation for row in index):
        row = index.best(allocation)
        if row is not None and row.plan is not None:
            best[str(allocation)] = row.plan.plan_id
    dtype = compute_dtype(problem)
    report = {
        "model": job.name,
        "num_parameters": problem.num_parameters,
        "global_batch": problem.global_batch,
        "grids": [_grid(row, items, dtype, catalogue) for row in index],
        "best": best,
        "search_s": index.search_s,
        "num_programs_solved": index.num_programs_solved,
    }
    if compared is not None:
        report["compared"] = [{"name": plan.name} | _grid(plan.row, items, dtype, catalogue) for plan in compared]
    return report


def compute_dtype(problem: "Problem") -> str:
    """Dtype of the large products: the policy's, or that of most of the parameters."""
    if problem.precision.compute is not None:
        return problem.precision.compute
    held: dict[str, int] = {}
    for leaf in problem.of_kind("params"):
        held[str(leaf.dtype)] = held.get(str(leaf.dtype), 0) + leaf.num_bytes
    return max(held, key=lambda dtype: held[dtype])


def _grid(row: IndexRow, items: int, dtype: str, catalogue: Catalogue) -> dict[str, Any]:
    from arena_jax.compiler.cost import hardware_of

    hardware = hardware_of(row.grid.allocation, catalogue)
    facts: dict[str, Any] = {
        "grid": str(row.grid),
        "feasible": row.feasible,
        "reason": row.reason,
        "step_time_s": None,
        "tokens_or_samples_per_s": None,
        "mfu": None,
        "memory_bytes": row.least_memory_bytes,
        "device_memory_bytes": hardware.usable_bytes,
        "num_microbatches": row.num_microbatches,
        "stages": [],
        "imbalance": None,
        "measured_share": None,
        "plan_id": None,
        "engine": row.engine,
        "objectives": dict(row.objectives),
    }
    plan, estimate, step_time_s = row.plan, row.estimate, row.step_time_s
    if plan is None or estimate is None or step_time_s is None:
        return facts
    peak = hardware.device.peak(dtype) * row.grid.num_devices
    return facts | {
        "step_time_s": step_time_s,
        "tokens_or_samples_per_s": items / step_time_s,
        "mfu": estimate.flops / step_time_s / peak,
        "memory_bytes": estimate.memory_bytes,
        "device_memory_bytes": estimate.device_memory_bytes,
        "stages": [
            {
                "layers": list(stage.layers),
                "devices": stage.submesh.num_devices,
                "dp": stage.dp,
                "tp": stage.tp,
                "zero": stage.zero,
                "remat": stage.remat,
                "compute_s": cost.compute_s,
                "communication_s": cost.communication_s,
                "memory_bytes": cost.memory_bytes,
            }
            for stage, cost in zip(plan.stages, estimate.stages, strict=True)
        ],
        "imbalance": estimate.imbalance,
        "measured_share": estimate.measured_share,
        "plan_id": plan.plan_id,
    }


def table_lines(report: Mapping[str, Any], unit: str) -> Iterator[str]:
    """The grids as a table no wider than the terminal; ``*`` marks the best of each allocation."""
    best = set(report["best"].values())
    rows = [_cells(row, not row.get("name") and row["plan_id"] in best) for row in table_rows(report)]
    head = ["", "grid", "dp x tp", "micro", "step", "GiB/usable", f"{unit}/s", "MFU"]
    widths = [max(len(row[i]) for row in [head, *(r for r in rows if len(r) > 3)]) for i in range(len(head))]
    widths[1] = max(len(row[1]) for row in [head, *rows])
    room = width() - sum(widths) - 2 * (len(widths) - 1) + widths[2]
    widths[2] = max(_MIN_LAYOUT, min(widths[2], room))
    for row in [head, *rows]:
        cells = [f"{row[0]:{widths[0]}}", f"{row[1]:{widths[1]}}"]
        if len(row) == 3:
            cells.append(fit(row[2], width() - len("  ".join(cells)) - 2))
        else:
            cells.append(f"{fit(row[2], widths[2]):{widths[2]}}")
            cells += [f"{cell:>{w}}" for cell, w in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join(cells).rstrip()


def engine_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Where several engines were asked: the objective of each, grid by grid, and how far apart they are."""
    rows = [row for row in report["grids"] if len(row["objectives"]) > 1]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row["objectives"]))
    table = [["grid", *(f"{name} finds" for name in names), "apart by"]]
    for row in rows:
        values = row["objectives"].values()
        apart = (max(values) - min(values)) / max(values)
        cells = [seconds(row["objectives"][name]) if name in row["objectives"] else "-" for name in names]
        table.append([row["grid"], *cells, f"{apart:.1g}" if apart else "0"])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    yield ""
    for first, *rest in table:
        cells = [f"{cell:>{w}}" for cell, w in zip(rest, widths[1:], strict=True)]
        yield "  ".join(["", f"{first:{widths[0]}}", *cells])


def table_rows(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The grids in order, after those of each allocation its hand-written plans, which have a ``name``."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for grid in report["grids"]:
        rows.setdefault(grid["grid"].partition("/")[0], []).append(grid)
    for plan in report.get("compared", ()):
        allocation = plan["grid"].partition("/")[0]
        rows.setdefault(allocation, []).append(dict(plan) | {"grid": f"{allocation} {plan['name']}"})
    return [row for group in rows.values() for row in group]


def _cells(row: Mapping[str, Any], is_best: bool) -> list[str]:
    """The cells of a row; of an infeasible one only mark, grid and reason."""
    if not row["feasible"]:
        return ["-", row["grid"], _why(row)]
    layout = meshes([(stage["dp"], stage["tp"]) for stage in row["stages"]])
    return [
        "*" if is_best else "",
        row["grid"],
        layout,
        str(row["num_microbatches"]),
        seconds(row["step_time_s"]),
        f"{row['memory_bytes'] / 2**30:.3g}/{row['device_memory_bytes'] / 2**30:.3g}",
        f"{row['tokens_or_samples_per_s']:,.0f}",
        f"{row['mfu']:.0%}",
    ]


def _why(row: Mapping[str, Any]) -> str:
    """The reason, kept short where memory is the reason."""
    if row["memory_bytes"] is None:
        return str(row["reason"])
    needs, usable = row["memory_bytes"] / 2**30, row["device_memory_bytes"] / 2**30
    return f"needs {needs:.4g} GiB a device, {usable:.4g} usable: {needs - usable:.3g} too much"


def fit(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 3)].rstrip() + "..."
