"""``arena-jax plan --explain``: where the time and memory of a plan go, beside another, and what bound it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arena_jax.cli.plan_report import fit
from arena_jax.cli.progress import seconds
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, GridShape, IndexRow, PlanIndex

if TYPE_CHECKING:
    from arena_jax.compiler.by_hand import HandWritten
    from arena_jax.compiler.intra_op.binding import Binding

_LABEL, _CELL = 30, 18
# What the keys of an estimate's breakdowns mean to a person.
CAUSES = {
    "compute_s": "compute",
    "communication_s": "communication",
    "boundary_s": "between stages",
    "gradients_and_update_s": "gradients and update",
}
HELD = {"optimizer": "optimizer state"}


@dataclass(frozen=True)
class Named:
    """A plan and what it goes by: its grid, or its allocation and a hand-written plan's name."""

    name: str
    row: IndexRow


def named(index: PlanIndex, compared: Sequence["HandWritten"]) -> list[Named]:
    """All plans there are, by name."""
    grids = [Named(str(row.grid), row) for row in index]
    return grids + [Named(f"{plan.row.grid.allocation} {plan.name}", plan.row) for plan in compared]


def find_other(text: str | None, best: Named, plans: Sequence[Named], catalogue: Catalogue = CATALOGUE) -> Named | None:
    """The plan to set ``best`` against.

    Args:
        text: a grid, an allocation (its best), a hand-written plan's name, or the start of a plan id;
            ``None`` is the next best on the same allocation.

    Raises:
        UsageError: nothing goes by that name.
    """
    allocation = best.row.grid.allocation
    others = [plan for plan in plans if plan is not best]
    if text is None:
        near = [plan for plan in others if plan.row.grid.allocation == allocation and plan.row.feasible]
        # A hand-written plan may be the very same plan under another name.
        unlike = [plan for plan in near if _id(plan.row) != _id(best.row)]
        return min(unlike or near, key=lambda plan: plan.row.step_time_s or 0.0, default=None)
    found = [plan for plan in others if plan.name == f"{allocation} {text}"]
    try:
        if "/" in text:
            found += [plan for plan in others if plan.name == str(GridShape.parse(text, catalogue))]
        elif ":" in text:
            wanted = Allocation.parse(text, catalogue)
            there = [plan for plan in others if plan.row.grid.allocation == wanted and plan.row.feasible]
            found += [min(there, key=lambda plan: plan.row.step_time_s or 0.0)] if there else []
        else:
            found += [plan for plan in others if len(text) >= 4 and _id(plan.row).startswith(text)]
    except ArenaError as error:
        raise UsageError(f"--against: {error.message}", hint=error.hint) from error
    if not found:
        known = ", ".join(plan.name for plan in others)
        raise UsageError(
            f"--against {text}: no such plan beside {best.name}",
            hint=f"name one of {known}" if known else "plan more grids with --on, or add --compare dp,fsdp,tp",
        )
    return found[0]


def explanation(best: Named, other: Named | None, bindings: Sequence["Binding"]) -> dict[str, Any]:
    """What ``--json`` says of one allocation's best plan."""
    return {
        "allocation": str(best.row.grid.allocation),
        "best": _facts(best),
        "other": None if other is None else _facts(other),
        "bound_by": [
            {
                "constraint": binding.constraint,
                "step_time_s": binding.freed.step_time_s,
                "memory_bytes": None if binding.freed.estimate is None else binding.freed.estimate.memory_bytes,
            }
            for binding in bindings
        ],
    }


def _facts(plan: Named) -> dict[str, Any]:
    from arena_jax.runtime.timeline import idle_share, timeline

    row = plan.row
    facts: dict[str, Any] = {"name": plan.name, "plan_id": _id(row) or None, "reason": row.reason}
    if row.plan is None or row.estimate is None:
        return facts
    estimate = row.estimate
    fullest = max(estimate.stages, key=lambda stage: stage.memory_bytes)
    return facts | {
        "step_time_s": estimate.step_time_s,
        "measured_step_time_s": row.measured_step_time_s,
        "breakdown": dict(estimate.breakdown),
        "idle_share": idle_share(
            timeline(estimate.stages, row.num_microbatches, step_time_s=estimate.step_time_s), len(estimate.stages)
        ),
        "imbalance": estimate.imbalance,
        "num_microbatches": row.num_microbatches,
        "memory_bytes": estimate.memory_bytes,
        "device_memory_bytes": estimate.device_memory_bytes,
        "memory": dict(fullest.memory),
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
                "update_s": cost.update_s,
                "transfer_s": cost.transfer_s,
                "communication": dict(cost.communication),
                "memory_bytes": cost.memory_bytes,
                "memory": dict(cost.memory),
            }
            for stage, cost in zip(row.plan.stages, estimate.stages, strict=True)
        ],
    }


def explain_lines(said: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person, in 80 columns."""
    best, other = said["best"], said["other"]
    shown = other if other is not None and other.get("step_time_s") is not None else None
    yield f"why {best['name']}, plan {best['plan_id']}"
    if shown is not None:
        yield fit(f"  {_ratio(best['step_time_s'], shown['step_time_s'])} {shown['name']}", 80)
    yield from _side_by_side(best, shown)
    if other is None:
        yield "  there is no other plan to set it against; plan more, or --compare dp,fsdp,tp"
    elif shown is None:
        yield fit(f"  {other['name']} does not run: {other['reason']}", 80)
    yield ""
    yield from _stages(best)
    yield ""
    yield from _bound(said)


def _side_by_side(best: Mapping[str, Any], other: Mapping[str, Any] | None) -> Iterator[str]:
    def line(label: str, cells: Sequence[str], difference: str = "") -> str:
        shown = "".join(f"{fit(cell, _CELL - 1):>{_CELL}}" for cell in cells)
        return f"  {label:{_LABEL}}{shown}{difference:>12}".rstrip()

    def times(label: str, values: Sequence[float]) -> str:
        return line(label, [seconds(v) for v in values], _signed(values[1] - values[0]) if len(values) > 1 else "")

    plans = [best] if other is None else [best, other]
    yield line("", [plan["name"] for plan in plans], "" if other is None else "difference")
    causes = dict.fromkeys(cause for plan in plans for cause in plan["breakdown"])
    for cause in causes:
        yield times(cause_text(cause), [plan["breakdown"].get(cause, 0.0) for plan in plans])
    yield times("one step", [plan["step_time_s"] for plan in plans])
    yield line("stages wait", [f"{plan['idle_share']:.0%}" for plan in plans])
    yield line("slowest / mean stage", [f"{plan['imbalance']:.2f}" for plan in plans])
    yield line("microbatches", [str(plan["num_microbatches"]) for plan in plans])
    yield line("memory of the fullest device", [size(plan["memory_bytes"]) for plan in plans])
    for part in dict.fromkeys(part for plan in plans for part in plan["memory"]):
        yield line(f"  {HELD.get(part, part)}", [size(plan["memory"].get(part, 0)) for plan in plans])
    yield line("usable", [size(plan["device_memory_bytes"]) for plan in plans])


def _stages(best: Mapping[str, Any]) -> Iterator[str]:
    head = ("stage", "layers", "dp x tp", "zero", "remat", "compute", "comm.", "update", "memory")
    rows = [head]
    for number, stage in enumerate(best["stages"]):
        first, last = stage["layers"]
        rows.append(
            (
                str(number),
                f"{first}-{last}" if last > first else str(first),
                f"{stage['dp']}x{stage['tp']}",
                str(stage["zero"]),
                "yes" if stage["remat"] else "no",
                seconds(stage["compute_s"]),
                seconds(stage["communication_s"]),
                seconds(stage["update_s"]),
                size(stage["memory_bytes"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        yield "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    yield "  compute and communication are of one microbatch, the update is once a step"


def _bound(said: Mapping[str, Any]) -> Iterator[str]:
    best = said["best"]
    yield "what bound it:"
    for binding in said["bound_by"]:
        name = f"{binding['constraint']} ({size(best['device_memory_bytes'])} usable)"
        name = name if binding["constraint"] == "memory" else binding["constraint"]
        yield fit(
            f"  {name}: without it, {seconds(binding['step_time_s'])} a step "
            f"and {size(binding['memory_bytes'])} a device",
            80,
        )
    if not said["bound_by"]:
        yield "  neither memory nor a pin: without them, this grid's plan is no faster"
    slowest = max(best["stages"], key=lambda stage: stage["compute_s"] + stage["communication_s"])
    whole = slowest["compute_s"] + slowest["communication_s"]
    where = f"stage {best['stages'].index(slowest)}, the slowest" if len(best["stages"]) > 1 else "a microbatch"
    if whole:
        yield f"  time: of {where}, {slowest['compute_s'] / whole:.0%} is compute and the rest communication"


def cause_text(cause: str) -> str:
    """A key of an estimate's breakdown in words."""
    return CAUSES.get(cause, cause.removesuffix("_s").replace("_", " "))


def size(num_bytes: float) -> str:
    """Bytes as people write them: ``1.5 GiB``, ``20 MiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.995 * factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 2**10:.3g} KiB"


def _ratio(best_s: float, other_s: float) -> str:
    if best_s == other_s:
        return "takes as long as"
    return (
        f"{other_s / best_s:.2f} times as fast as" if best_s < other_s else f"{best_s / other_s:.2f} times slower than"
    )


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}" if value else "0"


def _id(row: IndexRow) -> str:
    return "" if row.plan is None else row.plan.plan_id
