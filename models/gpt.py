"""A GPT decoder: learned positions, pre-norm blocks, a head that may be tied to the embedding."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from .stack import Stack
from .transformer import Block, LayerNorm, add_positions, cross_entropy, dropout_or_identity, embed, normal


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a GPT.

    Attributes:
        vocabulary: number of token ids.
        sequence_length: longest sequence, in tokens.
        hidden: width of the residual stream.
        num_layers, num_heads: depth, and attention heads per layer.
        feed_forward: width of the feed-forward layer; ``None`` is four times ``hidden``.
        dropout: rate on the embedding and on every residual branch.
        tie_embeddings: use the embedding as the output head too.
        scan_layers: run the layers as one ``lax.scan`` over stacked parameters.
        remat: recompute each layer in the backward pass.
        dtype: dtype to compute in; ``None`` is that of the parameters.
        param_dtype: dtype the parameters are made in.
    """

    vocabulary: int = 256
    sequence_length: int = 1024
    hidden: int = 768
    num_layers: int = 12
    num_heads: int = 12
    feed_forward: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = True
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.num_heads} heads")


class GPT(nnx.Module):
    """Tokens (B, S) -> logits (B, S, V)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        param_dtype = config.param_dtype
        self.embedding = normal(rngs, (config.vocabulary, config.hidden), param_dtype)
        self.positions = normal(rngs, (config.sequence_length, config.hidden), param_dtype)
        self.dropout = dropout_or_identity(config.dropout, rngs)
        self.blocks = Stack(
            lambda block_rngs: Block(
                hidden=config.hidden,
                num_heads=config.num_heads,
                feed_forward=config.feed_forward or 4 * config.hidden,
                num_layers=config.num_layers,
                causal=True,
                dropout=config.dropout,
                param_dtype=param_dtype,
                rngs=block_rngs,
            ),
            config.num_layers,
            scan=config.scan_layers,
            remat=config.remat,
            rngs=rngs,
        )
        self.norm = LayerNorm(config.hidden, param_dtype=param_dtype)
        if not config.tie_embeddings:
            self.head = normal(rngs, (config.hidden, config.vocabulary), param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = add_positions(embed(self.embedding, tokens, self.config.dtype), self.positions)
        x = self.norm(self.blocks(self.dropout(x)))
        if self.config.tie_embeddings:
            return jnp.einsum("bsd,vd->bsv", x, self.embedding[...].astype(x.dtype))
        return x @ self.head[...].astype(x.dtype)


Model = GPT


def loss_fn(model: GPT, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of the next token, in nats; ``tokens`` and ``targets`` are (B, S) integers."""
    return cross_entropy(model(batch["tokens"]), batch["targets"]).mean()
