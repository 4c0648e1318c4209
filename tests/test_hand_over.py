"""What a forward program hands to its backward one: only what depends on the microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arena_jax.compiler import analyse
from arena_jax.runtime.pipeline import Pipeline
from arena_jax.runtime.residuals import hand_over
from tests.problems import compile_program, make_plan, recipe_problem

ROWS, WIDTH = 3, 5


def masked_loss(weight: jax.Array, x: jax.Array) -> jax.Array:
    past = jnp.arange(ROWS)[:, None] >= jnp.arange(WIDTH)[None]
    narrow = weight.astype("bfloat16").astype("float32").T
    return jnp.where(past, jnp.sin(x @ narrow), 0).sum()


def test_casts_views_and_constants_are_made_again() -> None:
    def run(weight: Any, x: Any) -> Any:
        value, back = jax.vjp(masked_loss, weight, x)
        return value, back

    weight, x = (np.random.default_rng(0).standard_normal(s).astype("float32") for s in ((WIDTH, WIDTH), (ROWS, WIDTH)))
    split = hand_over(run, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (weight, x)], lasting=1, fixed=1)
    value, kept = jax.jit(split.forward)(weight, x)
    # x for the gradient of the weight, and the slope of the sine.
    assert [k.shape for k in kept] == [(ROWS, WIDTH)] * 2
    assert split.from_inputs == (0,)

    def backward(kept: Any, inputs: Any) -> Any:
        return split.linearisation(kept, inputs)(jnp.ones(()))

    np.testing.assert_allclose(value, masked_loss(weight, x), rtol=1e-5)
    expected = jax.jit(jax.grad(masked_loss, (0, 1)))(weight, x)
    for mine, theirs in zip(jax.jit(backward)(kept, [weight]), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scan", ["true", "false"])
def test_no_microbatch_in_flight_holds_parameters_or_masks(scan: str) -> None:
    problem = recipe_problem("gpt", f"model.scan_layers={scan}", "precision.compute=bfloat16")
    plan = make_plan(analyse(problem), "cpu:4", [(2, 1), (2, 1)], num_microbatches=2)
    program = compile_program(problem, plan)
    (engine,) = (x for x in vars(program).values() if isinstance(x, Pipeline))
    first = engine.stages[0]
    dims = {entry.shape for entry in first.layout.params if np.prod(entry.shape) > 1000}
    assert dims
    assert first.kept_structs
    for struct in first.kept_structs:
        assert struct.dtype != bool
        # Behind the layers and the shards of rows, where there are such dims.
        assert not {struct.shape, struct.shape[1:], struct.shape[:1] + struct.shape[2:]} & dims
