"""A job small enough to be started three times in a test; its nodes can be made to fail."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

NUM_BATCHES = 8


class Net(nnx.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(jnp.tanh(self.up(x))))


def loss_fn(model: Net, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(8, 16)).astype("float32") for _ in range(NUM_BATCHES)]
    return [{"x": x, "y": np.roll(x, 1, axis=1)} for x in rows]


def job() -> dict[str, Any]:
    """What ``arena-jax train tests.relaunch_job:job`` trains."""
    broken = os.environ.get("BROKEN_TYPE")
    if broken and os.environ.get("ARENA_JAX_RELAUNCH") and os.environ.get("ARENA_JAX_DEVICE_TYPE") == broken:
        raise RuntimeError("this node is on fire")
    return {"make_model": Net, "optimizer": optax.adam(1e-2), "loss_fn": loss_fn, "make_data": batches}
