"""What one plan does otherwise than another, in words for people."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from arena_jax.grid.plan import Plan, StagePlan

_STAGE: dict[str, Callable[[StagePlan], str]] = {
    "dp x tp": lambda stage: f"{stage.dp}x{stage.tp}",
    "zero": lambda stage: str(stage.zero),
    "remat": lambda stage: "on" if stage.remat else "off",
}


def plan_difference(before: Plan, after: Plan) -> str:
    """Say what changes from one plan to another: ``stages 2 -> 1; dp x tp 2x1 *2 -> 4x1``."""
    facts: list[tuple[str, Any, Any]] = [
        ("devices", before.grid.num_devices, after.grid.num_devices),
        ("type", before.grid.allocation.device_type, after.grid.allocation.device_type),
        ("stages", len(before.stages), len(after.stages)),
        ("microbatches", before.num_microbatches, after.num_microbatches),
    ]
    for name, of in _STAGE.items():
        old, new = (_runs([of(stage) for stage in plan.stages]) for plan in (before, after))
        facts.append((name, old, new))
    said = [f"{name} {was} -> {is_now}" for name, was, is_now in facts if was != is_now]
    cuts = [[stage.layers for stage in plan.stages] for plan in (before, after)]
    if len(cuts[0]) == len(cuts[1]) and cuts[0] != cuts[1]:
        said.append("other cuts")
    if not said and before != after:
        said.append("other shardings")
    return "; ".join(said)


def _runs(values: Sequence[str]) -> str:
    """Equal neighbours together: ``2x1 *3 1x2``."""
    counted = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(value if count == 1 else f"{value} *{count}" for value, count in counted)
