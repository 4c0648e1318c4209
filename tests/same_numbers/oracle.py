"""One device, written by hand: the numbers every plan must reproduce.

Shares nothing with the compiler or the runtime: flax, optax and a Python loop over microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from arena_jax.values import Weighted


@dataclass(frozen=True)
class Run:
    """Losses, the first mean gradient and the final parameters, by path."""

    losses: list[float]
    first_gradient: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    samples_seen: int = 0


def name_of(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return "/".join(parts[:-1] if parts[-1] == "value" else parts)


def named(tree: Any) -> dict[str, np.ndarray]:
    return {name_of(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def perturbation(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same small noise for a parameter wherever it is added, so that no zero head hides an error."""
    seed = int.from_bytes(name.encode(), "little") % (2**63)
    return 0.02 * np.random.default_rng(seed).standard_normal(shape)


def train(
    make_model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: Any,
    batches: Sequence[Any],
    *,
    num_microbatches: int,
    seed: int = 0,
    parameter_dtype: str | None = None,
    compute_dtype: str | None = None,
    accumulation_dtype: str = "float32",
    trainable: Any = None,
) -> Run:
    """Train on one device, one microbatch after the other."""
    wrt = nnx.Param if trainable is None else nnx.All(nnx.Param, trainable)
    graphdef, params, rest = nnx.split(make_model(nnx.Rngs(seed)), wrt, ...)
    if parameter_dtype:
        params = jax.tree.map(lambda x: x.astype(parameter_dtype), params)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x + jnp.asarray(perturbation(name_of(path), x.shape), x.dtype), params
    )

    def cast(tree: Any) -> Any:
        def one(x: Any) -> Any:
            return x.astype(compute_dtype) if compute_dtype and jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, tree)

    def cast_frozen(rest: Any) -> Any:
        frozen, other = nnx.split_state(rest, nnx.Param, ...)
        return nnx.merge_state(cast(frozen), other)

    @jax.jit
    def microbatch(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            # Rebuilt here, for flax refuses to write to variables of an outer trace.
            model = nnx.merge(graphdef, cast(params), jax.tree.map(lambda x: x, cast_frozen(rest)))
            out = loss_fn(model, cast(batch))
            value = out[0] if isinstance(out, tuple) else out
            total, weight = (value.sum, value.weight) if isinstance(value, Weighted) else (value, 1.0)
            after = nnx.state(model, nnx.Not(nnx.Param))
            return total.astype(jnp.promote_types(total.dtype, "float32")), (jnp.asarray(weight), after)

        (total, (weight, after)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        frozen = nnx.filter_state(rest, nnx.Param)
        after = jax.tree.map(
            lambda new, old: new.astype(old.dtype) if new.dtype != old.dtype else new,
            after,
            nnx.filter_state(rest, nnx.Not(nnx.Param)),
        )
        return total, weight, gradient, nnx.merge_state(frozen, after)

    @jax.jit
    def update(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    losses: list[float] = []
    first: dict[str, np.ndarray] = {}
    for batch in batches:
        rows = max(len(x) for x in jax.tree.leaves(batch) if np.ndim(x))
        size = rows // num_microbatches
        totals, weights, gradients = [], [], None
        for m in range(num_microbatches):
            part = jax.tree.map(lambda x, m=m, size=size: x[m * size : (m + 1) * size] if np.ndim(x) else x, batch)
            total, weight, gradient, rest = microbatch(params, rest, part)
            gradient = jax.tree.map(lambda g: g.astype(jnp.promote_types(accumulation_dtype, g.dtype)), gradient)
            gradients = gradient if gradients is None else jax.tree.map(jnp.add, gradients, gradient)
            totals.append(float(total))
            weights.append(float(weight))
        weight = sum(weights)
        mean = jax.tree.map(lambda g, p, weight=weight: (g / weight).astype(p.dtype), gradients, params)
        first = first or named(mean)
        losses.append(sum(totals) / weight)
        params, state = update(params, state, mean)
    return Run(losses=losses, first_gradient=first, parameters=named(params))
