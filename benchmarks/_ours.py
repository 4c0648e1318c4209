"""A compiled plan in the form of the steps written by hand."""

from typing import Any

import jax

from arena_jax.compiler import Analysis, analyse, make_problem
from arena_jax.compiler.inter_op.stage_cost import Option
from arena_jax.compiler.inter_op.stage_plan import stage_plan
from arena_jax.grid import GridShape, Plan, Submesh
from arena_jax.runtime import compile_program
from benchmarks._handwritten import Task, optimizer
from models.gpt import GPT, loss_fn

Meshes = tuple[tuple[int, int], ...]
"""(dp, tp) of each stage."""


class Ours:
    """The program of a task under a plan, and its state."""

    def __init__(self, task: Task, meshes: Meshes) -> None:
        problem = make_problem(
            lambda rngs: GPT(task.config, rngs=rngs), optimizer(), loss_fn, task.batch(0), seed=task.seed
        )
        analysis = analyse(problem)
        self.program = compile_program(problem, plan_of(analysis, task, meshes))
        self.state = self.program.init()

    def step(self, batch: Any) -> jax.Array:
        self.state, metrics = self.program.step(self.state, batch)
        return metrics["loss"]


def plan_of(analysis: Analysis, task: Task, meshes: Meshes) -> Plan:
    """Even cuts, sharded as the search would shard each (dp, tp); no ZeRO, no remat."""
    count, num_stages = analysis.layers.num_layers, len(meshes)
    cuts = [round(i * count / num_stages) for i in range(num_stages + 1)]
    num_devices = sum(dp * tp for dp, tp in meshes)
    return Plan(
        model_fingerprint=analysis.trace.fingerprint,
        global_batch=task.global_batch,
        grid=GridShape.parse(f"cpu:{num_devices}/s{num_stages}"),
        num_microbatches=task.num_microbatches,
        precision=analysis.problem.precision,
        stages=tuple(
            stage_plan(
                analysis,
                layers=(cuts[i], cuts[i + 1] - 1),
                submesh=Submesh(1, dp * tp),
                sharding=analysis.shardings.find(dp, tp),
                option=Option(zero=0, remat=False),
            )
            for i, (dp, tp) in enumerate(meshes)
        ),
    )
