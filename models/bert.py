"""A BERT encoder trained on masked tokens: bidirectional pre-norm blocks and a tied head."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from arena_jax.values import Weighted

from .stack import Stack
from .transformer import (
    Block,
    LayerNorm,
    add_positions,
    along,
    cross_entropy,
    dropout_or_identity,
    embed,
    normal,
    zeros,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a BERT.

    Attributes:
        vocabulary: number of token ids, the mask token among them.
        sequence_length: longest sequence, in tokens.
        hidden: width of the residual stream.
        num_layers, num_heads: depth, and attention heads per layer.
        feed_forward: width of the feed-forward layer; ``None`` is four times ``hidden``.
        dropout: rate on the embedding and on every residual branch.
        scan_layers: run the layers as one ``lax.scan`` over stacked parameters.
        remat: recompute each layer in the backward pass.
        dtype: dtype to compute in; ``None`` is that of the parameters.
        param_dtype: dtype the parameters are made in.
    """

    vocabulary: int = 51200
    sequence_length: int = 1024
    hidden: int = 768
    num_layers: int = 12
    num_heads: int = 12
    feed_forward: int | None = None
    dropout: float = 0.0
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.num_heads} heads")


class Bert(nnx.Module):
    """Tokens (B, S), some of them masked -> logits (B, S, V)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        param_dtype = config.param_dtype
        self.embedding = normal(rngs, (config.vocabulary, config.hidden), param_dtype)
        self.positions = normal(rngs, (config.sequence_length, config.hidden), param_dtype)
        self.embedding_norm = LayerNorm(config.hidden, param_dtype=param_dtype)
        self.dropout = dropout_or_identity(config.dropout, rngs)
        self.blocks = Stack(
            lambda block_rngs: Block(
                hidden=config.hidden,
                num_heads=config.num_heads,
                feed_forward=config.feed_forward or 4 * config.hidden,
                num_layers=config.num_layers,
                causal=False,
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
        self.head_bias = zeros((config.vocabulary,), param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = add_positions(embed(self.embedding, tokens, self.config.dtype), self.positions)
        x = self.norm(self.blocks(self.dropout(self.embedding_norm(x))))
        logits = jnp.einsum("bsd,vd->bsv", x, self.embedding[...].astype(x.dtype))
        return logits + along(self.head_bias, logits)


Model = Bert


def loss_fn(model: Bert, batch: Mapping[str, jax.Array]) -> tuple[Weighted, dict[str, Weighted]]:
    """Cross entropy over the masked positions, in nats, and how often the likeliest token is right.

    ``tokens`` (as shown to the model) and ``targets`` are (B, S) integers; ``weights`` is 1 where the
    model has to predict. Their number differs from batch to batch, so the mean is ``Weighted``.
    """
    logits = model(batch["tokens"])
    losses = cross_entropy(logits, batch["targets"])
    weights = batch["weights"].astype(losses.dtype)
    hits = (logits.argmax(-1) == batch["targets"]).astype(losses.dtype)
    loss = Weighted(sum=(losses * weights).sum(), weight=weights.sum())
    return loss, {"accuracy": Weighted(sum=(hits * weights).sum(), weight=weights.sum())}
