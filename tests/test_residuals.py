"""What the account says a backward pass needs, against what jax itself keeps when it differentiates."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex_core

from arena_jax.compiler import _compat
from arena_jax.compiler.intra_op.flat import flatten
from tests.problems import recipe_analysis


def kept_by_jax(trace: Any, num_layers: int) -> float:
    """Bytes of one layer that the forward scan of the differentiated loss hands to the backward one."""
    run = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(trace.jaxpr, []))
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in trace.jaxpr.invars]
    smooth = [i for i, s in enumerate(structs) if jnp.issubdtype(s.dtype, jnp.floating)]

    def gradient(*arrays: Any) -> Any:
        def loss(values: list[Any]) -> Any:
            inputs = list(arrays)
            for i, value in zip(smooth, values, strict=True):
                inputs[i] = value
            return run(*inputs)[0]

        return jax.grad(loss)([arrays[i] for i in smooth])

    scans = [e for e in jax.make_jaxpr(gradient)(*structs).jaxpr.eqns if e.primitive.name == "scan"]
    _, num_carry = _compat.scan_sizes(scans[0])
    stacked = scans[0].outvars[num_carry:]
    return sum(math.prod(v.aval.shape) * jnp.dtype(v.aval.dtype).itemsize for v in stacked) / num_layers


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_layer_keeps_what_jax_keeps(model: str) -> None:
    analysis = recipe_analysis(model, "model.scan_layers=true")
    ops = flatten(analysis.graph).ops
    num_layers = max(op.times for op in ops)
    ours = sum(v.num_bytes * k for op in ops if op.times > 1 for v, k in zip(op.results, op.kept, strict=True))
    assert ours == pytest.approx(kept_by_jax(analysis.trace, int(num_layers)), rel=0.15)
