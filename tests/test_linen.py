"""A Linen module through NNX's bridge trains like any other, batch statistics and dropout included."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import arena_jax


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(32)(x))
        return nn.Dense(3)(nn.Dropout(0.1, deterministic=False)(nn.relu(x)))


def make(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.bridge.ToNNX(Classifier(), rngs=rngs).lazy_init(jnp.ones((4, 8)))


def loss_fn(model: nnx.Module, batch: Any) -> Any:
    logits = model(batch["x"], mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def losses(grid: str) -> list[float]:
    rng = np.random.default_rng(0)
    data = [
        {"x": rng.standard_normal((16, 8)).astype("float32"), "y": rng.integers(0, 3, 16).astype("int32")}
        for _ in range(3)
    ]
    result = arena_jax.fit(make, optax.adam(1e-2), loss_fn, data, steps=3, grid=grid, num_microbatches=2)
    return [record.loss for record in result.history]


def test_linen_module_gives_the_same_losses_on_one_and_two_stages() -> None:
    one = losses("cpu:1")
    assert len(set(one)) == 3
    assert losses("cpu:2") == pytest.approx(one, rel=1e-5)
    assert losses("cpu:2/s2") == pytest.approx(one, rel=1e-5)
