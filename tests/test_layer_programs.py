"""Layers as programs of one device: they compute the loss, they divide the work, and equal ones are one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arena_jax.compiler import Analysis
from arena_jax.compiler.flops import jaxpr_flops
from arena_jax.compiler.intra_op.sharding import Sharding
from arena_jax.compiler.profiling.layer_programs import LayerProgram
from tests.problems import random_batch, recipe_analysis, recipe_problem


def programs(analysis: Analysis, dp: int, tp: int, microbatches: int = 1) -> tuple[LayerProgram | None, ...]:
    sharding: Sharding = analysis.shardings.find(dp, tp)
    return analysis.programs.of(sharding, microbatches)


@pytest.fixture(scope="module")
def gpt() -> Analysis:
    return recipe_analysis("gpt")


def test_layers_one_after_the_other_compute_the_loss(gpt: Analysis) -> None:
    trace = gpt.trace
    rngs = np.random.default_rng(0)
    leaves = [jnp.asarray(0.1 * rngs.standard_normal(leaf.shape), leaf.dtype) for leaf in trace.leaves]
    batch = jax.tree.leaves(random_batch(recipe_problem("gpt")))
    values = dict(zip(trace.jaxpr.invars, [*leaves, *batch, *trace.consts], strict=True))
    expected = jax.core.eval_jaxpr(trace.jaxpr, (), *values.values())[0]
    for program in programs(gpt, 1, 1):
        assert program is not None
        stage = program._stage
        others = [values[v] for v in (*stage.frozen, *stage.state, *stage.batch, *stage.consts)]
        outs = program.forward([values[v] for v in stage.params], others, [values[v] for v in stage.received])
        values.update(zip(stage.sent, outs, strict=False))
    assert float(outs[0]) == pytest.approx(float(expected), rel=1e-5)


def test_gradients_of_a_layer_are_those_of_its_function(gpt: Analysis) -> None:
    program = programs(gpt, 1, 1)[2]
    assert program is not None
    draw: Callable[[Any], Any] = lambda s: jnp.asarray(np.random.default_rng(1).standard_normal(s.shape), s.dtype)  # noqa: E731
    params, others, received = ([draw(s) for s in x] for x in (program.params, program.others, program.received))
    cotangents = [draw(s) for s in program.cotangents()]
    sums, back, _ = program.both(params, others, received, cotangents, [jnp.zeros_like(p) for p in params])
    _, pull = jax.vjp(lambda p, r: program.forward(p, others, r), params, received)
    expected = pull(cotangents)
    for ours, theirs in zip([*sums, *back], [*expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "dp", "tp"), [("gpt", 2, 1), ("gpt", 1, 2), ("gpt", 2, 2), ("moe", 2, 1), ("wide_resnet", 1, 2)]
)
def test_devices_together_do_the_work_of_one(model: str, dp: int, tp: int) -> None:
    analysis = recipe_analysis(model)
    found = 0.0
    for program in programs(analysis, dp, tp):
        assert program is not None
        jaxpr = jax.make_jaxpr(program.forward)(program.params, program.others, program.received).jaxpr
        found += jaxpr_flops(jaxpr) * dp * tp
    whole = jaxpr_flops(analysis.trace.jaxpr)
    # Some small operations run alike on all devices.
    assert 0.99 * whole <= found <= 1.35 * whole


def test_equal_layers_share_a_key(gpt: Analysis) -> None:
    keys = [p.key for p in programs(gpt, 1, 1) if p is not None]
    assert len(keys) == gpt.layers.num_layers
    assert len(set(keys)) < len(keys)
    # The same rows on one device: half the batch on each of two, or in each of two microbatches.
    assert [p.key for p in programs(gpt, 2, 1) if p] == [p.key for p in programs(gpt, 1, 1, 2) if p]
    assert not set(keys) & {p.key for p in programs(gpt, 2, 1) if p}
    # Whatever the sizes, they look alike.
    assert len(set(gpt.programs.likes())) == len(set(keys))
