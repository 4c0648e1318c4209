"""A Flax model of one's own, given to the cluster service: ``python examples/own_model.py``."""

import numpy as np
import optax
from flax import nnx

import arena_jax

rng = np.random.default_rng(0)
x = rng.normal(size=(32, 256, 256)).astype("float32")  # 32 batches of 256 rows
data = [{"x": rows, "y": np.sin(rows[:, :1])} for rows in x]


def make_model(rngs):
    return nnx.Sequential(nnx.Linear(256, 2048, rngs=rngs), nnx.gelu, nnx.Linear(2048, 1, rngs=rngs))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


print(arena_jax.submit(make_model, optax.adam(1e-3), loss_fn, data, steps=500, name="own_model", max_devices=4))
