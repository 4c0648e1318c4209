"""Small problems and plans for tests of the compiler and the runtime."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from arena_jax.compiler import Analysis, Problem, analyse, make_problem
from arena_jax.compiler.inter_op.stage_cost import Option
from arena_jax.compiler.inter_op.stage_plan import stage_plan
from arena_jax.grid import GridShape, Plan, Submesh
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from arena_jax.runtime import Program, compile_program
from tests.same_numbers.cases import SMALL

BATCH = 8


@cache
def recipe_problem(model: str, *overrides: str) -> Problem:
    """The tiny recipe of a model, smaller still, at a global batch of 8."""
    job = build(load_recipe(f"{model}_tiny", [*SMALL[model], f"global_batch={BATCH}", *overrides]))
    return job.problem()


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


WIDTH = 8


class Tower(nnx.Module):
    """Four residual blocks with dropout and a counter: every kind of leaf, in little."""

    def __init__(self, rngs: nnx.Rngs, num_blocks: int = 4) -> None:
        self.up = nnx.List([nnx.Linear(WIDTH, 16, rngs=rngs) for _ in range(num_blocks)])
        self.down = nnx.List([nnx.Linear(16, WIDTH, rngs=rngs) for _ in range(num_blocks)])
        self.table = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH)))
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, kind: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls[...] + 1)
        x = x + self.table[...][kind]
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.dropout(down(jnp.tanh(up(x))))
        return x


def tower_loss(model: Tower, batch: Any) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((model(batch["x"], batch["kind"]) - batch["y"]) ** 2)


def not_the_table(path: Any, value: Any) -> bool:
    """A filter that freezes the tower's table."""
    return "table" not in path


@cache
def tower_problem() -> Problem:
    """The tower with its table frozen, trained by adam."""
    return make_problem(
        Tower, optax.adam(1e-2), tower_loss, jax.eval_shape(tower_batch), trainable=not_the_table, seed=0
    )


def tower_batch(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, BATCH, WIDTH)).astype("float32")
    return {"x": x, "y": y, "kind": rng.integers(0, 4, BATCH).astype("int32")}


@cache
def tower_analysis() -> Analysis:
    return analyse(tower_problem())


@cache
def tower_program(grid: str, meshes: tuple[tuple[int, int], ...], zero: int = 0) -> Program:
    """A compiled plan for the tower, two microbatches a step."""
    return compile_program(tower_problem(), make_plan(tower_analysis(), grid, meshes, zero=zero, num_microbatches=2))
