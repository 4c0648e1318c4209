"""A wide residual network with bottleneck blocks and batch normalisation, so with running statistics.

Images are (B, height, width, channels). A bottleneck of ``filters`` f narrows to f, widens its 3 x 3
convolution to ``width_factor`` f, and leaves with 4 f channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from .stack import Stack
from .transformer import along, at_least_float32, cross_entropy, normal, zeros

EXPANSION = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a wide residual network.

    Attributes:
        image_size: height and width in pixels.
        image_channels: channels of the input.
        num_classes: labels.
        blocks: bottleneck blocks per resolution; (3, 4, 6, 3) is the 50-layer network.
        width_factor: how much wider the 3 x 3 convolutions are.
        base_channels: filters at the first resolution; they double at each of the next.
        large_stem: begin with a 7 x 7 convolution and a pooling that quarter the image, or a plain 3 x 3.
        scan_layers: run the equal blocks of each resolution as one ``lax.scan``.
        remat: recompute each block in the backward pass.
        dtype: dtype to compute in; ``None`` is that of the parameters.
        param_dtype: dtype the parameters are made in.
    """

    image_size: int = 224
    image_channels: int = 3
    num_classes: int = 1024
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width_factor: int = 2
    base_channels: int = 224
    large_stem: bool = True
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"every resolution needs a block, got blocks {list(self.blocks)}")


class Convolution(nnx.Module):
    """A convolution without bias, then batch normalisation."""

    def __init__(
        self, channels_in: int, channels_out: int, size: int, *, stride: int = 1, config: Config, rngs: nnx.Rngs
    ) -> None:
        self.convolution = nnx.Conv(
            channels_in,
            channels_out,
            (size, size),
            strides=stride,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            channels_out, momentum=0.9, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        if config.param_dtype == "float64":
            # nnx keeps running statistics in float32 whatever the parameters are, which would round these.
            self.norm.mean = nnx.BatchStat(self.norm.mean[...].astype("float64"))
            self.norm.var = nnx.BatchStat(self.norm.var[...].astype("float64"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.convolution(x))


class Bottleneck(nnx.Module):
    """Narrow, convolve wide, expand, and add to the input; ``stride`` 2 halves the resolution."""

    def __init__(self, channels: int, filters: int, *, stride: int = 1, config: Config, rngs: nnx.Rngs) -> None:
        wide = filters * config.width_factor
        self.narrow = Convolution(channels, filters, 1, config=config, rngs=rngs)
        self.widen = Convolution(filters, wide, 3, stride=stride, config=config, rngs=rngs)
        self.expand = Convolution(wide, EXPANSION * filters, 1, config=config, rngs=rngs)
        self.shortcut: Convolution | None = nnx.data(None)
        if stride != 1 or channels != EXPANSION * filters:
            self.shortcut = Convolution(channels, EXPANSION * filters, 1, stride=stride, config=config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = nnx.relu(self.widen(nnx.relu(self.narrow(x))))
        return nnx.relu(self.expand(inner) + (x if self.shortcut is None else self.shortcut(x)))


class Resolution(nnx.Module):
    """The blocks at one resolution: one that changes the shape, then equal ones."""

    def __init__(
        self, channels: int, filters: int, num_blocks: int, *, stride: int, config: Config, rngs: nnx.Rngs
    ) -> None:
        switches = {"scan": config.scan_layers and num_blocks > 2, "remat": config.remat, "rngs": rngs}
        first = {**switches, "scan": False}
        self.first = Stack(lambda r: Bottleneck(channels, filters, stride=stride, config=config, rngs=r), 1, **first)
        self.rest = Stack(
            lambda r: Bottleneck(EXPANSION * filters, filters, config=config, rngs=r), num_blocks - 1, **switches
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest(self.first(x))


class WideResNet(nnx.Module):
    """Images (B, height, width, channels) -> logits (B, classes)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        channels = config.base_channels
        size, stride = (7, 2) if config.large_stem else (3, 1)
        self.stem = Convolution(config.image_channels, channels, size, stride=stride, config=config, rngs=rngs)
        resolutions = []
        for number, num_blocks in enumerate(config.blocks):
            filters = config.base_channels * 2**number
            stride = 1 if number == 0 else 2
            resolutions.append(Resolution(channels, filters, num_blocks, stride=stride, config=config, rngs=rngs))
            channels = EXPANSION * filters
        self.resolutions = nnx.List(resolutions)
        self.head = normal(rngs, (channels, config.num_classes), config.param_dtype, channels**-0.5)
        self.head_bias = zeros((config.num_classes,), config.param_dtype)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(images if self.config.dtype is None else images.astype(self.config.dtype)))
        if self.config.large_stem:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for resolution in self.resolutions:
            x = resolution(x)
        pooled = x.mean(axis=(1, 2))
        return pooled @ self.head[...].astype(x.dtype) + along(self.head_bias, pooled)


Model = WideResNet


def loss_fn(model: WideResNet, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross entropy of ``labels`` (B,) given ``images``, in nats, and the accuracy."""
    logits = at_least_float32(model(batch["images"]))
    hits = (logits.argmax(-1) == batch["labels"]).astype(logits.dtype)
    return cross_entropy(logits, batch["labels"]).mean(), {"accuracy": hits.mean()}
