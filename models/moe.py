"""A GPT-like decoder whose every second feed-forward is a mixture of experts (GShard's formulation).

Tokens are gathered into groups; within a group each expert takes at most its capacity of tokens, and
each token goes to its two best experts while they have room. Dispatch and combination are einsums
over one-hot tensors, so every step has static shapes: G groups, N tokens per group, E experts,
C capacity, D hidden, F feed-forward.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from .stack import Stack
from .transformer import (
    INIT_STDDEV,
    Attention,
    Block,
    LayerNorm,
    add_positions,
    at_least_float32,
    cross_entropy,
    dropout_or_identity,
    embed,
    normal,
    zeros,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a mixture of experts.

    Attributes:
        vocabulary: number of token ids.
        sequence_length: longest sequence, in tokens.
        hidden: width of the residual stream.
        num_layers: depth, an even number: layers alternate between dense and mixture.
        num_heads: attention heads per layer.
        num_experts: experts per mixture layer.
        feed_forward: width of the dense feed-forward and of each expert; ``None`` is eight times ``hidden``.
        expert_group_size: tokens that compete for the same expert slots; a batch with fewer is one group.
        capacity_factor: slots per expert, as a multiple of an even share of the two choices.
        balance_weight: weight of the load-balancing loss.
        dropout: rate on the embedding and on every residual branch.
        scan_layers: run the pairs of layers as one ``lax.scan`` over stacked parameters.
        remat: recompute each pair of layers in the backward pass.
        dtype: dtype to compute in; ``None`` is that of the parameters.
        param_dtype: dtype the parameters are made in.
    """

    vocabulary: int = 32000
    sequence_length: int = 1024
    hidden: int = 768
    num_layers: int = 8
    num_heads: int = 16
    num_experts: int = 16
    feed_forward: int | None = None
    expert_group_size: int = 2048
    capacity_factor: float = 2.0
    balance_weight: float = 1e-2
    dropout: float = 0.0
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.num_heads} heads")
        if self.num_layers % 2:
            raise ValueError(f"num_layers must be even, as layers alternate; got {self.num_layers}")
        if self.num_experts < 2:
            raise ValueError(f"top-2 gating needs at least 2 experts, got {self.num_experts}")


def top2(gates_GNE: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Assign tokens to their two best experts while these have room.

    Args:
        gates_GNE: gate probabilities, summing to 1 over experts.
        capacity: slots per expert and group.

    Returns:
        The combination weights (G, N, E, C), zero where a token has no slot, and the scalar
        load-balancing loss, 1 when every expert gets an even share.
    """
    num_experts = gates_GNE.shape[-1]
    dtype = gates_GNE.dtype
    first = jax.nn.one_hot(gates_GNE.argmax(-1), num_experts, dtype=dtype)
    second = jax.nn.one_hot((gates_GNE * (1 - first)).argmax(-1), num_experts, dtype=dtype)
    share, probability = first.mean(axis=1), gates_GNE.mean(axis=1)
    balance = (share * probability).sum(-1).mean() * num_experts

    # First choices are served before second ones, each in the order of the tokens.
    place_first = first.cumsum(axis=1) - first
    place_second = second.cumsum(axis=1) - second + first.sum(axis=1, keepdims=True)
    gate_first = (gates_GNE * first).sum(-1)
    gate_second = (gates_GNE * second).sum(-1)
    total = gate_first + gate_second
    combine = jnp.zeros((*gates_GNE.shape, capacity), dtype)
    for choice, place, gate in ((first, place_first, gate_first), (second, place_second, gate_second)):
        slot = (place * choice).sum(-1).astype(jnp.int32)
        # one_hot of a slot beyond the capacity is all zeros: the token is dropped.
        slots = jax.nn.one_hot(slot, capacity, dtype=dtype)
        combine = combine + (gate / total)[..., None, None] * choice[..., None] * slots[..., None, :]
    return combine, balance


class Mixture(nnx.Module):
    """Experts with top-2 gating, (B, S, D) -> (B, S, D) and the load-balancing loss."""

    def __init__(self, config: Config, *, out_stddev: float, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.feed_forward or 8 * config.hidden
        param_dtype = config.param_dtype
        self.gate = normal(rngs, (config.hidden, config.num_experts), param_dtype)
        self.up = normal(rngs, (config.num_experts, config.hidden, width), param_dtype)
        self.up_bias = zeros((config.num_experts, width), param_dtype)
        self.down = normal(rngs, (config.num_experts, width, config.hidden), param_dtype, out_stddev)
        self.down_bias = zeros((config.num_experts, config.hidden), param_dtype)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, x.dtype
        num_tokens = x.shape[0] * x.shape[1]
        group = math.gcd(num_tokens, min(config.expert_group_size, num_tokens))
        capacity = max(1, math.ceil(2 * group * config.capacity_factor / (2 * config.num_experts)))
        x_GND = x.reshape(num_tokens // group, group, config.hidden)
        logits = at_least_float32(x_GND) @ at_least_float32(self.gate[...])
        combine, balance = top2(jax.nn.softmax(logits, axis=-1), capacity)
        dispatch = (combine > 0).astype(dtype)
        inner = jnp.einsum("gnec,gnd->egcd", dispatch, x_GND)
        inner = jnp.einsum("egcd,edf->egcf", inner, self.up[...].astype(dtype))
        inner = jax.nn.gelu(inner + self.up_bias[...].astype(dtype)[:, None, None])
        inner = jnp.einsum("egcf,efd->egcd", inner, self.down[...].astype(dtype))
        inner = inner + self.down_bias[...].astype(dtype)[:, None, None]
        out = jnp.einsum("gnec,egcd->gnd", combine.astype(dtype), inner)
        return out.reshape(x.shape), balance


class MixtureBlock(nnx.Module):
    """A transformer block whose feed-forward is a mixture of experts."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        out_stddev = INIT_STDDEV * (2 * config.num_layers) ** -0.5
        param_dtype = config.param_dtype
        self.attention_norm = LayerNorm(config.hidden, param_dtype=param_dtype)
        self.attention = Attention(
            config.hidden, config.num_heads, causal=True, out_stddev=out_stddev, param_dtype=param_dtype, rngs=rngs
        )
        self.mixture_norm = LayerNorm(config.hidden, param_dtype=param_dtype)
        self.mixture = Mixture(config, out_stddev=out_stddev, rngs=rngs)
        self.dropout = dropout_or_identity(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        mixed, balance = self.mixture(self.mixture_norm(x))
        return x + self.dropout(mixed), balance


class Pair(nnx.Module):
    """A dense block, then a mixture block: the unit that repeats."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.dense = Block(
            hidden=config.hidden,
            num_heads=config.num_heads,
            feed_forward=config.feed_forward or 8 * config.hidden,
            num_layers=config.num_layers,
            causal=True,
            dropout=config.dropout,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.mixture = MixtureBlock(config, rngs=rngs)

    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, total_balance = carry
        x, balance = self.mixture(self.dense(x))
        return x, total_balance + balance


class MoE(nnx.Module):
    """Tokens (B, S) -> logits (B, S, V) and the mean load-balancing loss of the mixture layers."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        param_dtype = config.param_dtype
        self.embedding = normal(rngs, (config.vocabulary, config.hidden), param_dtype)
        self.positions = normal(rngs, (config.sequence_length, config.hidden), param_dtype)
        self.dropout = dropout_or_identity(config.dropout, rngs)
        self.pairs = Stack(
            lambda pair_rngs: Pair(config, rngs=pair_rngs),
            config.num_layers // 2,
            scan=config.scan_layers,
            remat=config.remat,
            rngs=rngs,
        )
        self.norm = LayerNorm(config.hidden, param_dtype=param_dtype)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = add_positions(embed(self.embedding, tokens, self.config.dtype), self.positions)
        balance = jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))
        x, balance = self.pairs((self.dropout(x), balance))
        logits = jnp.einsum("bsd,vd->bsv", self.norm(x), self.embedding[...].astype(x.dtype))
        return logits, balance / (self.config.num_layers // 2)


Model = MoE


def loss_fn(model: MoE, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross entropy of the next token, in nats, plus the weighted load-balancing loss.

    ``tokens`` and ``targets`` are (B, S) integers. The metrics hold the two terms apart.
    """
    logits, balance = model(batch["tokens"])
    likelihood = cross_entropy(logits, batch["targets"]).mean()
    return likelihood + model.config.balance_weight * balance, {"cross_entropy": likelihood, "balance": balance}
