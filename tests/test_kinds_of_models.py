"""Small models of many kinds train under tensor parallelism as on one device.

Each holds several of the things that real models do and that a sharding search may trip over.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import arena_jax
from tests.strangers.compare import compare
from tests.strangers.models import Stranger

ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


class Recurrent(nnx.Module):
    """LSTM by scan, tied embedding, dropout from a raw key, a branch, and a loop on the way."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(0.3 * jax.random.normal(rngs.params(), (24, 16)))
        self.gates = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, ids: Any, key: Any) -> Any:
        table = self.table[...]
        x = table[ids]

        def step(carry: Any, row: Any) -> Any:
            hidden, cell = carry
            i, f, g, o = jnp.split(self.gates(jnp.concatenate([hidden, row], -1)), 4, -1)
            cell = nnx.sigmoid(f) * cell + nnx.sigmoid(i) * jnp.tanh(g)
            hidden = nnx.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        start = jnp.zeros((x.shape[0], 16), x.dtype)
        _, y = lax.scan(step, (start, start), x.transpose(1, 0, 2))
        y = y.transpose(1, 0, 2)
        kept = jax.random.bernoulli(key, 0.9, y.shape)
        y = lax.cond(ids[0, 0] >= 0, lambda v: jnp.where(kept, v / 0.9, 0.0), lambda v: v, y)
        scale = lax.while_loop(lambda s: s.max() > 1.0, lambda s: s * 0.5, lax.stop_gradient(jnp.abs(y).sum(-1)) + 1.0)
        return (y * scale[..., None]) @ table.T


class Picture(nnx.Module):
    """U-Net: depthwise and pointwise convolutions, batch statistics, pooling, a transposed convolution, a skip."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.pointwise = nnx.Conv(8, 16, (1, 1), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.head = nnx.Conv(16, 4, (1, 1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        skip = nnx.relu(self.norm(self.stem(x)))
        low = nnx.silu(self.pointwise(self.depthwise(nnx.max_pool(skip, (2, 2), (2, 2)))))
        return self.head(jnp.concatenate([self.up(low), skip], -1))


class Routed(nnx.Module):
    """Encoder and decoder with cross-attention, and experts that tokens are scattered to and gathered from."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.source = nnx.Param(0.3 * jax.random.normal(rngs.params(), (24, 16)))
        self.target = nnx.Param(0.3 * jax.random.normal(rngs.params(), (24, 16)))
        self.query, self.keys = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.router = nnx.Linear(16, 4, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 16, 32)))
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 32, 16)))
        self.head = nnx.Linear(16, 24, rngs=rngs)

    def __call__(self, source: Any, target: Any) -> Any:
        memory, x = self.source[...][source], self.target[...][target]
        rows, length, width = x.shape
        q = self.query(x).reshape(rows, length, 4, 4)
        k, v = jnp.split(self.keys(memory).reshape(rows, -1, 4, 8), 2, -1)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(rows, length, width)
        return self.head(x + self.experts(x.reshape(-1, width)).reshape(x.shape))

    def experts(self, tokens: Any) -> Any:
        weights, chosen = lax.top_k(jax.nn.softmax(self.router(tokens)), 2)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        # The place of each choice among those of its expert; what exceeds the capacity is dropped.
        before = jnp.cumsum(jax.nn.one_hot(expert, 4, dtype=jnp.int32), 0)
        place = jnp.take_along_axis(before, expert[:, None], 1)[:, 0] - 1
        capacity = tokens.shape[0]
        inputs = jnp.zeros((4, capacity, tokens.shape[1]), tokens.dtype)
        inputs = inputs.at[expert, place].add(jnp.repeat(tokens, 2, 0), mode="drop")
        hidden = nnx.gelu(jnp.einsum("ecd,edf->ecf", inputs, self.up[...]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, self.down[...])
        back = outputs[expert[order], place[order]][jnp.argsort(order)]
        return (back.reshape(-1, 2, tokens.shape[1]) * weights[..., None]).sum(1)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def ids(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, 24, (ROWS, length)).astype("int32")


def make(name: str, **parts: Any) -> Stranger:
    return Stranger(name=name, kind="", package="", **parts)


KINDS = [
    make(
        "recurrent",
        model=Recurrent,
        loss_fn=lambda m, b: cross_entropy(m(b["ids"], jax.random.PRNGKey(b["step"])), b["labels"]),
        batch=lambda rng: {"ids": ids(rng, 6), "labels": ids(rng, 6), "step": np.int32(rng.integers(99))},
    ),
    make(
        "picture",
        model=Picture,
        loss_fn=lambda m, b: cross_entropy(m(b["x"]), b["labels"]),
        batch=lambda rng: {
            "x": rng.standard_normal((ROWS, 8, 8, 3)),
            "labels": rng.integers(0, 4, (ROWS, 8, 8)).astype("int32"),
        },
    ),
    make(
        "routed",
        model=Routed,
        float32_inside=True,
        loss_fn=lambda m, b: cross_entropy(m(b["source"], b["target"]), b["labels"]),
        batch=lambda rng: {"source": ids(rng, 7), "target": ids(rng, 5), "labels": ids(rng, 5)},
    ),
]


@pytest.mark.parametrize("stranger", KINDS, ids=lambda s: s.name)
def test_a_model_of_this_kind_trains_as_on_one_device(stranger: Stranger) -> None:
    found = compare(stranger, "tp=2")
    assert found.moved > 1e-3
    # jax's attention has its scores in float32.
    tolerance = 1e-6 if stranger.float32_inside else 1e-9
    assert found.difference < tolerance
    assert found.parameters < tolerance, found.worst_parameter
    # Where pictures are as small as here, splitting channels costs more than it saves.
    assert found.sharded > 0 or stranger.name == "picture"


def test_a_tree_of_arrays_trains_and_comes_back_as_one() -> None:
    """Parameters beside a pure function, as many libraries have them."""

    def init(rngs: nnx.Rngs) -> Any:
        return {"layers": [{"w": jax.random.normal(rngs.params(), (8, 8))} for _ in range(2)], "b": jnp.zeros(8)}

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean((x + params["b"][None] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    data = [{"x": rng.standard_normal((8, 8)), "y": rng.standard_normal((8, 8))} for _ in range(3)]
    result = arena_jax.fit(init, optax.sgd(0.1), loss, data, steps=3, grid="cpu:2")
    params, state = init(nnx.Rngs(0)), optax.sgd(0.1).init(init(nnx.Rngs(0)))
    for record, batch in zip(result.history, data, strict=True):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        assert record.loss == pytest.approx(float(value), rel=1e-6)
        updates, state = optax.sgd(0.1).update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    assert jax.tree.structure(result.model) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(result.model), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    again = arena_jax.fit(result.model, optax.sgd(0.1), loss, data, steps=1, grid="cpu:1")
    assert again.history[0].loss == pytest.approx(float(loss(params, data[0])), rel=1e-6)
