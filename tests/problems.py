"""Small problems and plans for tests of the compiler and the runtime."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena_jax.compiler import Analysis, Problem, analyse, make_problem
from arena_jax.compiler.stage_cost import Option
from arena_jax.compiler.stage_plan import stage_plan
from arena_jax.grid import GridShape, Plan, Submesh
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from tests.same_numbers.cases import SMALL

BATCH = 8


@cache
def recipe_problem(model: str, *overrides: str) -> Problem:
    """The tiny recipe of a model, smaller still, at a global batch of 8."""
    job = build(load_recipe(f"{model}_tiny", [*SMALL[model], f"global_batch={BATCH}", *overrides]))
    return make_problem(
        job.make_model, job.optimizer, job.loss_fn, job.example_batch, precision=job.precision, seed=job.seed
    )


@cache
def recipe_analysis(model: str, *overrides: str) -> Analysis:
    return analyse(recipe_problem(model, *overrides))


def random_batch(problem: Problem, seed: int = 0) -> Any:
    """A batch of the problem's form; integers are small enough to be token ids and labels."""
    rng = np.random.default_rng(seed)
    leaves = []
    for leaf in problem.batch:
        struct = leaf.struct(problem.global_batch)
        if jnp.issubdtype(struct.dtype, jnp.floating):
            leaves.append(rng.standard_normal(struct.shape).astype(struct.dtype))
        else:
            leaves.append(rng.integers(0, 2, struct.shape).astype(struct.dtype))
    return jax.tree.unflatten(problem.batch_treedef, leaves)


def make_plan(
    analysis: Analysis,
    grid: str,
    meshes: Sequence[tuple[int, int]],
    *,
    zero: int = 0,
    num_microbatches: int = 1,
) -> Plan:
    """Even cuts over stages of the given (dp, tp), sharded as the search would."""
    count, num_stages = analysis.layers.num_layers, len(meshes)
    marks = [round(i * count / num_stages) for i in range(num_stages + 1)]
    return Plan(
        model_fingerprint=analysis.trace.fingerprint,
        global_batch=analysis.problem.global_batch,
        grid=GridShape.parse(f"{grid}/s{num_stages}"),
        num_microbatches=num_microbatches,
        precision=analysis.problem.precision,
        stages=tuple(
            stage_plan(
                analysis,
                layers=(marks[i], marks[i + 1] - 1),
                submesh=Submesh(1, dp * tp),
                sharding=analysis.shardings.find(dp, tp),
                option=Option(zero=zero, remat=False),
            )
            for i, (dp, tp) in enumerate(meshes)
        ),
    )
