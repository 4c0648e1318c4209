"""The pieces that gpt, bert and moe share: attention, feed-forward, a block of both, cross entropy.

Shapes are written with B batch, S sequence, D hidden, H heads, K head width, F feed-forward.
Every dimension that a planner may want to shard is a dimension of the parameter itself: the three
projections of attention are one (D, 3, H, K) array, not a (D, 3D) one that hides the heads.

Modules compute in the dtype of their input, except that softmax and normalisation never use less
than float32. The dtype of the embedding therefore sets the compute dtype of a whole model.
"""

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


def along(parameter: nnx.Param, x: jax.Array) -> jax.Array:
    """Return a parameter of x's last dims in x's dtype and rank, ready to be added or multiplied."""
    value = parameter[...].astype(x.dtype)
    return jnp.expand_dims(value, range(x.ndim - value.ndim))


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
        return normed * along(self.scale, x) + along(self.bias, x)


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
            past = position[:, None] >= position[None, :]
            scores = jnp.where(past[None, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bhqs,bshk->bqhk", weights, value)
        return jnp.einsum("bqhk,hkd->bqd", mixed, self.out[...].astype(dtype)) + along(self.out_bias, x)


class FeedForward(nnx.Module):
    """Two linear maps with a GELU between, (..., D) -> (..., D)."""

    def __init__(self, hidden: int, width: int, *, out_stddev: float, param_dtype: str, rngs: nnx.Rngs) -> None:
        self.up = normal(rngs, (hidden, width), param_dtype)
        self.up_bias = zeros((width,), param_dtype)
        self.down = normal(rngs, (width, hidden), param_dtype, out_stddev)
        self.down_bias = zeros((hidden,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        inner = jax.nn.gelu(x @ self.up[...].astype(dtype) + along(self.up_bias, x))
        return inner @ self.down[...].astype(dtype) + along(self.down_bias, x)


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


def embed(table: nnx.Param, tokens: jax.Array, dtype: str | None) -> jax.Array:
    """Look up rows of a (V, D) table; ``dtype=None`` keeps the table's own dtype."""
    rows = table[...][tokens]
    return rows if dtype is None else rows.astype(dtype)


def add_positions(x: jax.Array, positions: nnx.Param) -> jax.Array:
    """Add the first S rows of a table of positions to (B, S, D)."""
    return x + positions[...][None, : x.shape[1]].astype(x.dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log likelihood in nats, one per position, in float32 or wider: (..., V), (...) -> (...)."""
    wide = at_least_float32(logits)
    picked = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(wide, axis=-1) - picked
