"""Plans in the terms of Alpa (0.2.3), as its ``ManualStageOption`` and ``PipeshardParallel`` take them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arena_jax.errors import PlanError, nearest

if TYPE_CHECKING:
    from arena_jax.grid.plan import Plan

# One entry per stage each; what `alpa.ManualStageOption` is made of.
STAGE_OPTION = (
    "forward_stage_layer_ids",
    "submesh_physical_shapes",
    "submesh_logical_shapes",
    "submesh_autosharding_option_dicts",
)
_TERMS = (*STAGE_OPTION, "num_micro_batches", "pipeline_schedule", "remat_layers")
# Alpa shards what an update needs by reduce-scatters instead of all-reduces: ZeRO-2, as its `Zero2Parallel`.
_REDUCE_SCATTER = "prefer_reduce_scatter"
_ZERO_3 = "force_zero_stage_3"
_ROWS = "force_batch_dim_to_mesh_dim"


def to_alpa(plan: "Plan") -> dict[str, Any]:
    """See :meth:`~arena_jax.grid.Plan.to_alpa`."""
    return {
        "num_micro_batches": plan.num_microbatches,
        "pipeline_schedule": plan.schedule,
        "forward_stage_layer_ids": [list(range(s.layers[0], s.layers[1] + 1)) for s in plan.stages],
        "submesh_physical_shapes": [[s.submesh.num_nodes, s.submesh.devices_per_node] for s in plan.stages],
        "submesh_logical_shapes": [[s.dp, s.tp] for s in plan.stages],
        "submesh_autosharding_option_dicts": [
            {_ROWS: 0, _REDUCE_SCATTER: s.zero in (1, 2), _ZERO_3: s.zero == 3} for s in plan.stages
        ],
        "remat_layers": [s.remat for s in plan.stages],
    }


def stages_from_alpa(terms: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per stage its layers (first, last), physical shape, dp, tp, zero and remat.

    Raises:
        PlanError: a term is missing, unknown, or says what no plan can.
    """
    for name in terms:
        if name not in _TERMS:
            raise PlanError(f"{name!r} is no term of Alpa's{nearest(name, _TERMS)}")
    missing = [name for name in STAGE_OPTION[:3] if name not in terms]
    if missing:
        raise PlanError(f"{missing[0]!r} is missing", hint=f"give {', '.join(STAGE_OPTION[:3])}")
    schedule = terms.get("pipeline_schedule", "1f1b")
    if schedule != "1f1b":
        raise PlanError(f"pipeline_schedule {schedule!r} is not run here", hint="use 1f1b")
    count = len(terms["forward_stage_layer_ids"])
    options = terms.get("submesh_autosharding_option_dicts", [{}] * count)
    remats = terms.get("remat_layers", [False] * count)
    lists = {name: terms[name] for name in STAGE_OPTION[:3]} | {STAGE_OPTION[3]: options, "remat_layers": remats}
    for name, values in lists.items():
        if len(values) != count:
            raise PlanError(f"{name} has {len(values)} entries for {count} stages")
    stages = []
    for i in range(count):
        dp, tp = _pair(terms["submesh_logical_shapes"][i], f"submesh_logical_shapes[{i}]")
        stages.append(
            {
                "layers": _run(terms["forward_stage_layer_ids"][i], i),
                "physical": _pair(terms["submesh_physical_shapes"][i], f"submesh_physical_shapes[{i}]"),
                "dp": dp,
                "tp": tp,
                "zero": 3 if options[i].get(_ZERO_3) else 2 if options[i].get(_REDUCE_SCATTER) and dp > 1 else 0,
                "remat": bool(remats[i]),
            }
        )
    return stages


def _pair(shape: Sequence[int], name: str) -> tuple[int, int]:
    if len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise PlanError(f"{name} is {shape!r} where two positive numbers are due")
    return shape[0], shape[1]


def _run(ids: Sequence[int], stage: int) -> tuple[int, int]:
    if not ids or list(ids) != list(range(ids[0], ids[0] + len(ids))):
        raise PlanError(f"forward_stage_layer_ids[{stage}] is {list(ids)!r}, which is no run of layers")
    return ids[0], ids[-1]
