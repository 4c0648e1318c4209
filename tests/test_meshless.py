"""Programs that name a mesh compute the same of whole arrays, derivatives included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import arena_jax
from arena_jax.compiler.meshless import CONSTRAINT, names_a_mesh, run_without_mesh
from tests.test_dims import normal


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def collectives(x: Any, w: Any) -> Any:
    """One of everything a device may do with others."""
    y = lax.psum(x @ w, "model")
    here = lax.axis_index("data").astype(y.dtype)
    swapped = lax.ppermute(y, "data", [(0, 1), (1, 0)]) * (1 + here)
    everyone = lax.all_gather(y, "data", tiled=True).sum(0)
    carried, _ = lax.scan(lambda c, _: (jnp.sin(c) + lax.pmean(c, "data"), None), y, None, length=2)
    exchanged = lax.all_to_all(y, "model", 1, 0, tiled=True)
    share = lax.psum_scatter(jnp.tanh(y), "model", scatter_dimension=1, tiled=True)
    return y + swapped + everyone[None] + carried, exchanged, share


SPECS = {
    "in_specs": (P("data", "model"), P("model", None)),
    "out_specs": (P("data", None), P(("data", "model"), None), P("data", "model")),
}


def test_a_shard_map_becomes_a_map_over_parts() -> None:
    mapped = jax.shard_map(collectives, mesh=mesh(AxisType.Auto), **SPECS, check_vma=False)
    x, w = normal(4, 6), normal(6, 8)
    closed = jax.make_jaxpr(mapped)(x, w)
    assert names_a_mesh(closed.jaxpr)
    whole = jax.make_jaxpr(lambda *a: run_without_mesh(closed.jaxpr, closed.consts, a))(x, w)
    assert not names_a_mesh(whole.jaxpr)
    ours = jax.jit(jex_core.jaxpr_as_fun(whole))(x, w)
    for a, b in zip(ours, jax.jit(mapped)(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_its_derivative_is_the_same() -> None:
    specs = {"in_specs": (P("data", "model"), P("model", None)), "out_specs": P("data")}
    mapped = jax.shard_map(lambda x, w: lax.psum(jax.nn.relu(x) @ w, "model"), mesh=mesh(AxisType.Auto), **specs)
    x, w = normal(4, 6), normal(6, 8)
    closed = jax.make_jaxpr(mapped)(x, w)

    def gradient(run: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1)))(x, w)

    ours = gradient(lambda *a: run_without_mesh(closed.jaxpr, closed.consts, a)[0])
    for a, b in zip(ours, gradient(mapped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@jax.custom_vjp
def twice(x: Any) -> Any:
    return 2 * x


twice.defvjp(lambda x: (2 * x, x.sum()), lambda total, g: (3 * g + 0 * total,))


def placed(x: Any, w: Any) -> Any:
    """Explicit axes in products, control flow, rematerialised blocks and functions with rules of their own."""
    y = jnp.einsum("ab,bc->ac", x, w, out_sharding=P("data", None))
    y = jax.sharding.reshard(jax.nn.silu(twice(y)), P("data", "model"))
    y, sums = lax.scan(lambda c, _: (jnp.sin(c), c.sum(1)), y, length=3)
    y = lax.cond(sums.sum() > 0, lambda y: y * 2, jnp.cos, y)
    y = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 0.5), (0, lax.stop_gradient(y)))[1] + y
    return jax.checkpoint(lambda y: jnp.tanh(y.reshape(2, 2, 8, out_sharding=P("data", None, None))))(y)


def test_explicit_axes_are_taken_off() -> None:
    x, w = normal(4, 6), normal(6, 8)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        closed = jax.make_jaxpr(placed)(x, w)
        theirs = jax.jit(placed)(x, w)
        their_gradient = jax.jit(jax.grad(lambda *a: (placed(*a) ** 2).sum(), (0, 1)))(x, w)

    def whole(x: Any, w: Any) -> Any:
        (out,) = run_without_mesh(closed.jaxpr, closed.consts, (x, w))
        return out

    flat = jax.make_jaxpr(whole)(x, w)
    assert names_a_mesh(closed.jaxpr)
    assert not names_a_mesh(flat.jaxpr)
    assert f"{CONSTRAINT}('data', 'model')" in [e.params.get("name") for e in flat.jaxpr.eqns]
    np.testing.assert_allclose(jax.jit(whole)(x, w), theirs, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda *a: (whole(*a) ** 2).sum(), (0, 1)))(x, w)
    for a, b in zip(gradient, their_gradient, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Placed(nnx.Module):
    """A block whose author placed everything by hand."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        explicit = jax.sharding.get_abstract_mesh().axis_types[:1] == (AxisType.Explicit,)
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
        x = place(x, P("data", None))
        hidden = place(jax.nn.gelu(self.up(x)), P("data", "model"))
        return self.out(x + self.down(hidden))


def score(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_model_written_for_a_mesh_trains_on_any_grid(kind: AxisType) -> None:
    rng = np.random.default_rng(0)
    data = [{"x": rng.standard_normal((8, 8)).astype("float32"), "y": np.arange(8, dtype="int32") % 3}] * 3

    def losses(grid: str) -> list[float]:
        result = arena_jax.fit(Placed, optax.adam(1e-2), score, data, steps=3, grid=grid, num_microbatches=2)
        return [record.loss for record in result.history]

    with jax.set_mesh(mesh(kind)):
        one = losses("cpu:1")
        assert len(set(one)) == 3
        assert losses("cpu:2/s2") == pytest.approx(one, rel=1e-5)
        index = arena_jax.plan(Placed, optax.adam(1e-2), score, data[0], on=["h100:8"])
        assert any(row.feasible for row in index)
