"""Flax NNX models that recipes load by name; the arena_jax package never imports them.

A model file defines ``Config`` (a frozen dataclass whose fields are the recipe's ``model.*`` keys),
``Model`` (``Model(config, rngs=rngs)`` is an ``nnx.Module``) and ``loss_fn(model, batch)``.
"""
