"""The pieces that gpt, bert and moe share: attention, feed-forward, a stack of blocks, cross entropy.

Shapes are written with B batch, S sequence, D hidden, H heads, K head width, F feed-forward, L layers.
Every dimension that a planner may want to shard is a dimension of the parameter itself: the three
projections of attention are one (D, 3, H, K) array, not a (D, 3D) one that hides the heads.

Modules compute in the dtype of their input, except that softmax and normalisation never use less
than float32. ``dtype`` on the embedding therefore sets the compute dtype of a whole model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# GPT-2's choice; residual outputs are scaled down with depth by their callers.
INIT_STDDEV = 0.02


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str, stddev: float = INIT_STDDEV) -> nnx.Param:
    """Return a parameter drawn from a normal distribution."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, dtype))


def zeros(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """Return a parameter of zeros."""
    return nnx.Param(jnp.zeros(shape, dtype))


def at_least_float32(x: jax.Array) -> jax.Array:
    """Widen half precision to float32; leave float32 and float64 alone."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class LayerNorm(nnx.Module):
    """Normalise the last dimension, in float32 or wider."""

    def __init__(self, width: int, *, param_dtype: str) -> None:
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))
        self.bias = zeros((width,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = at_least_float32(x)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        normed = (centred * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)
        return normed * self.scale[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head self-attention, (B, S, D) -> (B, S, D)."""

    def __init__(
        self, hidden: int, num_heads: int, *, causal: bool, out_stddev: float, param_dtype: str, rngs: nnx.Rngs
    ) -> None:
        head_width = hidden // num_heads
        self.causal = causal
        self.qkv = normal(rngs, (hidden, 3, num_heads, head_width), param_dtype)
        self.qkv_bias = zeros((3, num_heads, head_width), param_dtype)
        self.out = normal(rngs, (num_heads, head_width, hidden), param_dtype, out_stddev)
        self.out_bias = zeros((hidden,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        qkv = jnp.einsum("bsd,dchk->cbshk", x, self.qkv[...].astype(dtype))
        qkv = qkv + self.qkv_bias[...].astype(dtype)[:, None, None]
        query, key, value = qkv[0], qkv[1], qkv[2]
        scores = at_least_float32(jnp.einsum("bqhk,bshk->bhqs", query, key)) * query.shape[-1] ** -0.5
        if self.causal:
            position = jnp.arange(x.shape[1])
            scores = jnp.where(position[:, None] >= position[None, :], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bhqs,bshk->bqhk", weights, value)
        return jnp.einsum("bqhk,hkd->bqd", mixed, self.out[...].astype(dtype)) + self.out_bias[...].astype(dtype)


class FeedForward(nnx.Module):
    """Two linear maps with a GELU between, (..., D) -> (..., D)."""

    def __init__(self, hidden: int, width: int, *, out_stddev: float, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.up = normal(rngs, (hidden, width), param_dtype)
        self.up_bias = zeros((width,), param_dtype)
        self.down = normal(rngs, (width, hidden), param_dtype, out_stddev)
        self.down_bias = zeros((hidden,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        inner = jax.nn.gelu(x @ self.up[...].astype(dtype) + self.up_bias[...].astype(dtype))
        return inner @ self.down[...].astype(dtype) + self.down_bias[...].astype(dtype)


class Block(nnx.Module):
    """A pre-norm transformer block: attention, then a feed-forward, each on a residual branch."""

    def __init__(
        self,
        *,
        hidden: int,
        num_heads: int,
        feed_forward: int,
        num_layers: int,
        causal: bool,
        dropout: float,
        param_dtype: str,
        rngs: nnx.Rngs,
    ) -> None:
        # 2 residual branches a layer: their sum keeps the variance of one.
        out_stddev = INIT_STDDEV * (2 * num_layers) ** -0.5
        self.attention_norm = LayerNorm(hidden, param_dtype=param_dtype)
        self.attention = Attention(
            hidden, num_heads, causal=causal, out_stddev=out_stddev, param_dtype=param_dtype, rngs=rngs
        )
        self.feed_forward_norm = LayerNorm(hidden, param_dtype=param_dtype)
        self.feed_forward = FeedForward(hidden, feed_forward, out_stddev=out_stddev, param_dtype=param_dtype, rngs=rngs)
        self.dropout = dropout_or_identity(dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def dropout_or_identity(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Return a dropout that holds no random state when it never drops anything."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


class Stack(nnx.Module):
    """``num_blocks`` equal blocks applied in turn: unrolled, or as one ``lax.scan`` over stacked parameters.

    Under ``scan`` every parameter of a block gains a leading dimension L, and the stacked arrays are
    the scan's direct inputs, so that a compiler can cut the stack between any two layers.

    Args:
        make_block: ``rngs -> module``; the module maps a carry (any pytree) to the next one.
        num_blocks: L.
        scan: compile one block and loop, rather than L of them.
        remat: recompute each block in the backward pass instead of keeping its activations.
        rngs: source of keys; every block draws keys of its own.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        num_blocks: int,
        *,
        scan: bool,
        remat: bool,
        rngs: nnx.Rngs,
    ) -> None:
        self.scan = scan
        self.remat = remat
        if scan:
            stacked = nnx.vmap(make_block, in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=num_blocks)(stacked)(rngs)
        else:
            self.blocks = nnx.List([make_block(rngs) for _ in range(num_blocks)])

    def __call__(self, carry: Any) -> Any:
        if self.scan:
            graphdef, parameters, other = nnx.split(self.blocks, nnx.Param, ...)
            apply = _applier(graphdef, self.remat)
            carry, other = jax.lax.scan(lambda c, state: apply(c, *state), carry, (parameters, other))
            nnx.update(self.blocks, other)
            return carry
        for block in self.blocks:
            if self.remat:
                graphdef, parameters, other = nnx.split(block, nnx.Param, ...)
                carry, other = _applier(graphdef, remat=True)(carry, parameters, other)
                nnx.update(block, other)
            else:
                carry = block(carry)
        return carry


def _applier(graphdef: Any, remat: bool) -> Callable[..., tuple[Any, nnx.State]]:
    """One block as a pure function: (carry, parameters, other state) -> (carry, other state)."""

    def apply(carry: Any, parameters: nnx.State, other: nnx.State) -> tuple[Any, nnx.State]:
        block = nnx.merge(graphdef, parameters, other)
        carry = block(carry)
        return carry, nnx.state(block, nnx.Not(nnx.Param))

    return jax.checkpoint(apply) if remat else apply


def embed(table: nnx.Param, tokens: jax.Array, dtype: str | None) -> jax.Array:
    """Look up rows of a (V, D) table; ``dtype=None`` keeps the table's own dtype."""
    rows = table[...][tokens]
    return rows if dtype is None else rows.astype(dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log likelihood in nats, one per position, in float32 or wider: (..., V), (...) -> (...)."""
    wide = at_least_float32(logits)
    picked = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(wide, axis=-1) - picked
