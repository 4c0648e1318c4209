"""The strangers: how each model is built, fed and scored, in a few lines and without changing it.

Sizes are small; every dim that a real model shards stays divisible by two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS = 8
VOCABULARY = 64
PIXELS = 16


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """One model from elsewhere.

    Attributes:
        package: the distribution it comes from.
        model: factory ``rngs -> module or tree of arrays``.
        batch: one global batch from a generator of random numbers.
        float32_inside: it computes in float32 whatever its parameters are.
    """

    name: str
    kind: str
    package: str
    model: Callable[[nnx.Rngs], Any]
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[np.random.Generator], Any]
    num_microbatches: int = 2
    float32_inside: bool = False

    def batches(self, count: int) -> list[Any]:
        """The first global batches of the model's data, always the same."""
        rng = np.random.default_rng(7)
        return [self.batch(rng) for _ in range(count)]


class Maker:
    """Makes a stranger, once its package is known to be there."""

    def __init__(self, make: Callable[[], Stranger], module: str) -> None:
        self._make, self._module = make, module

    def __call__(self) -> Stranger:
        return self._make()

    def missing(self) -> list[str]:
        """What is not installed."""
        return [] if find_spec(self._module) else [self._module]


STRANGERS: dict[str, Maker] = {}


def _stranger(module: str) -> Callable[[Callable[[], Stranger]], Callable[[], Stranger]]:
    def register(make: Callable[[], Stranger]) -> Callable[[], Stranger]:
        STRANGERS[make.__name__] = Maker(make, module)
        return make

    return register


def tokens(rng: np.random.Generator, length: int = 16, rows: int = ROWS) -> dict[str, np.ndarray]:
    ids = rng.integers(1, VOCABULARY, (rows, length + 1)).astype("int32")
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def images(rng: np.random.Generator, *, channels_first: bool = False, rows: int = ROWS) -> dict[str, np.ndarray]:
    shape = (rows, 3, PIXELS, PIXELS) if channels_first else (rows, PIXELS, PIXELS, 3)
    return {"images": rng.standard_normal(shape), "labels": rng.integers(0, 10, rows).astype("int32")}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def initial(model: Any, shape: tuple[int, ...]) -> Callable[[nnx.Rngs], Any]:
    """Factory of the parameters of a `transformers` model, which is made without any (``_do_init=False``)."""
    return lambda rngs: model.init_weights(rngs.params(), shape)


@_stranger("mamba2_jax")
def mamba2() -> Stranger:
    def make(rngs: nnx.Rngs) -> Any:
        from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

        config = Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, state_size=16, head_dim=16, chunk_size=8, num_hidden_layers=2
        )
        return Mamba2ForCausalLM(config, rngs=rngs)

    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["ids"])["logits"], batch["labels"])

    return Stranger(
        name="mamba2-jax",
        kind="state-space decoder (NNX)",
        package="mamba2-jax",
        float32_inside=True,
        model=make,
        loss_fn=loss,
        batch=partial(tokens, length=20),
    )


@_stranger("nano_moe")
def nano_moe() -> Stranger:
    def make(rngs: nnx.Rngs) -> Any:
        from nano_moe import NanoMoE, NanoMoEConfig

        config = NanoMoEConfig(vocab_size=VOCABULARY, n_layers=2, n_heads=4, d_model=16, d_ff=32, block_size=16)
        return nnx.bridge.ToNNX(NanoMoE(config), rngs=rngs).lazy_init(jnp.ones((1, 16), jnp.int32))

    def loss(model: Any, batch: Any) -> Any:
        logits, auxiliary = model(batch["ids"], deterministic=False)
        return cross_entropy(logits, batch["labels"]) + 0.01 * auxiliary

    return Stranger(
        name="nano-moe-jax",
        kind="mixture of experts with dropout (Linen)",
        package="nano-moe-jax",
        float32_inside=True,
        model=make,
        loss_fn=loss,
        batch=tokens,
    )


@_stranger("transformers")
def mistral() -> Stranger:
    from transformers import FlaxMistralForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        sliding_window=8,
    )
    model = FlaxMistralForCausalLM(config, dtype=jnp.float64, _do_init=False)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["ids"], params=params, train=True).logits, batch["labels"])

    return Stranger(
        name="transformers FlaxMistralForCausalLM",
        kind="decoder with grouped-query attention (Linen)",
        float32_inside=True,
        package="transformers",
        model=initial(model, (1, 16)),
        loss_fn=loss,
        batch=tokens,
    )


@_stranger("transformers")
def bert() -> Stranger:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    model = FlaxBertForMaskedLM(config, dtype=jnp.float64, _do_init=False)
    model.enable_gradient_checkpointing()

    def loss(params: Any, batch: Any) -> Any:
        key = jax.random.key(batch["step"])
        return cross_entropy(model(batch["ids"], params=params, train=True, dropout_rng=key).logits, batch["labels"])

    def batch(rng: np.random.Generator) -> Any:
        return {**tokens(rng), "step": np.int32(rng.integers(1000))}

    return Stranger(
        name="transformers FlaxBertForMaskedLM",
        kind="encoder with gradient checkpointing and dropout (Linen)",
        float32_inside=True,
        package="transformers",
        model=initial(model, (1, 16)),
        loss_fn=loss,
        batch=batch,
    )


@_stranger("transformers")
def whisper() -> Stranger:
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    frames, mels = 16, 8
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=mels,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=frames // 2,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = FlaxWhisperForConditionalGeneration(
        config, input_shape=(1, mels, frames), dtype=jnp.float64, _do_init=False
    )

    def loss(params: Any, batch: Any) -> Any:
        key = jax.random.key(batch["step"])
        out = model(batch["sound"], batch["ids"], params=params, train=True, dropout_rng=key)
        return cross_entropy(out.logits, batch["labels"])

    def batch(rng: np.random.Generator) -> Any:
        sound = rng.standard_normal((ROWS, mels, frames))
        return {**tokens(rng, 12), "sound": sound, "step": np.int32(rng.integers(1000))}

    return Stranger(
        name="transformers FlaxWhisperForConditionalGeneration",
        kind="speech encoder-decoder (Linen)",
        float32_inside=True,
        package="transformers",
        model=initial(model, (1, mels, frames)),
        loss_fn=loss,
        batch=batch,
    )


@_stranger("transformers")
def resnet() -> Stranger:
    from transformers import FlaxResNetForImageClassification, ResNetConfig

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck", num_labels=10
    )
    model = FlaxResNetForImageClassification(
        config, input_shape=(1, PIXELS, PIXELS, 3), dtype=jnp.float64, _do_init=False
    )

    def make(rngs: nnx.Rngs) -> Any:
        return nnx.bridge.ToNNX(model.module, rngs=rngs).lazy_init(jnp.ones((1, PIXELS, PIXELS, 3)))

    def loss(module: Any, batch: Any) -> Any:
        out = module(batch["images"], deterministic=False, mutable=["batch_stats"])
        return cross_entropy(out.logits, batch["labels"])

    return Stranger(
        name="transformers FlaxResNetForImageClassification",
        kind="convolutional classifier with batch statistics (Linen)",
        package="transformers",
        model=make,
        loss_fn=loss,
        batch=images,
    )


@_stranger("diffusers")
def unet() -> Stranger:
    from diffusers import FlaxUNet2DConditionModel

    model = FlaxUNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=16,
        dtype=jnp.float64,
    )

    def loss(params: Any, batch: Any) -> Any:
        out = model.apply({"params": params}, batch["noisy"], batch["times"], batch["text"])
        return jnp.mean((out.sample - batch["noise"]) ** 2)

    def batch(rng: np.random.Generator) -> Any:
        return {
            "noisy": rng.standard_normal((ROWS, 4, 8, 8)),
            "noise": rng.standard_normal((ROWS, 4, 8, 8)),
            "times": rng.integers(0, 1000, ROWS).astype("int32"),
            "text": rng.standard_normal((ROWS, 6, 16)),
        }

    return Stranger(
        name="diffusers FlaxUNet2DConditionModel",
        kind="diffusion U-Net with cross-attention (Linen)",
        package="diffusers",
        model=lambda rngs: model.init_weights(rngs.params()),
        loss_fn=loss,
        batch=batch,
    )


@_stranger("flax")
def lstm() -> Stranger:
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(VOCABULARY, 16)(ids)
            # Initial carries have the parameters' dtype, and the embedding's does not reach them.
            x = nn.RNN(nn.OptimizedLSTMCell(32, param_dtype=jnp.float64))(x)
            forward, backward = (nn.RNN(nn.GRUCell(16, param_dtype=jnp.float64)) for _ in range(2))
            x = nn.Bidirectional(forward, backward)(x)
            return nn.Dense(VOCABULARY)(x)

    model = Tagger()

    def make(rngs: nnx.Rngs) -> Any:
        return nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(jnp.ones((1, 12), jnp.int32))

    return Stranger(
        name="flax LSTM and bidirectional GRU",
        kind="recurrent (Linen)",
        package="flax",
        model=make,
        loss_fn=lambda model, batch: cross_entropy(model(batch["ids"]), batch["labels"]),
        batch=partial(tokens, length=12),
    )


@_stranger("transformers")
def vit() -> Stranger:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        image_size=PIXELS,
        patch_size=4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
    )
    shape = (1, PIXELS, PIXELS, 3)
    model = FlaxViTForImageClassification(config, input_shape=shape, dtype=jnp.float64, _do_init=False)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["images"], params=params, train=True).logits, batch["labels"])

    return Stranger(
        name="transformers FlaxViTForImageClassification",
        kind="vision transformer (Linen)",
        package="transformers",
        model=initial(model, shape),
        loss_fn=loss,
        batch=partial(images, channels_first=True),
    )
