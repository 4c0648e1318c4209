"""Partition specs for a plan that says only its stages and meshes."""

from dataclasses import replace

from arena_jax.compiler.analysis import Analysis
from arena_jax.compiler.inter_op.stage_cost import Option
from arena_jax.compiler.inter_op.stage_plan import stage_plan
from arena_jax.grid import Plan


def with_specs(analysis: Analysis, plan: Plan) -> Plan:
    """The plan with the specs that the search would give its stages, such as one read by ``Plan.from_alpa``."""
    return replace(
        plan,
        stages=tuple(
            stage_plan(
                analysis,
                layers=stage.layers,
                submesh=stage.submesh,
                sharding=analysis.shardings.find(stage.dp, stage.tp),
                option=Option(zero=stage.zero, remat=stage.remat),
            )
            for stage in plan.stages
        ),
    )
