"""Measure what this machine's CPU does in a training step (``python -m arena_jax.compiler.cpu_rates`` prints JSON).

Each rate is that of one part of a small model's layer with its gradients, not the best the machine can do: what a
step takes is three times what peak rates say of it, and all plans are misjudged alike in compute, so that
communication would weigh too much among them.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from arena_jax.compiler.intra_op.partition import passed_bytes
from arena_jax.compiler.trace import inline
from arena_jax.cpu_memory import keep_freed_memory


def measure_node_rates() -> dict[str, float]:
    """FLOP/s by dtype and bytes/s of the whole node. For a process of its own, in which jax has not started."""
    keep_freed_memory()  # as a run does
    float32 = _product_rate("float32")
    return {
        "float32": float32,
        "float64": float32 / 2,
        "convolution": _convolution_rate("float32"),
        "pass_bytes_per_s": _pass_rate(),
        "bytes_per_s": _stream_rate(),
    }


def _product_rate(dtype: str, rows: int = 2048, inside: int = 256, columns: int = 1024, repeats: int = 21) -> float:
    """FLOP/s of a product of a small model's layer with both of its gradients."""
    x, weights = jnp.ones((rows, inside), dtype), jnp.ones((inside, columns), dtype)
    seconds = _training_s(jnp.dot, x, weights, repeats=repeats)
    return 3 * 2.0 * rows * inside * columns / seconds


def _convolution_rate(dtype: str, images: int = 16, side: int = 16, channels: int = 64, repeats: int = 21) -> float:
    """FLOP/s of a 3 x 3 convolution with both of its gradients; the kernel's runs at a fraction of the others' rate."""
    x = jnp.ones((images, side, side, channels), dtype)
    kernel = jnp.ones((3, 3, channels, channels), dtype)

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    flops = 3 * 2.0 * images * side**2 * channels**2 * 9
    return flops / _training_s(convolve, x, kernel, repeats=repeats)


def _pass_rate(rows: int = 8192, columns: int = 256, repeats: int = 21) -> float:
    """Bytes/s of what is no product, with its gradient, in bytes as the search counts them: a layer's normalisation,
    activation and softmax. Their arithmetic and their passes over rows keep a CPU longer than the bytes do."""

    def layer(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.nn.gelu(jax.nn.standardize(x)))

    x = jnp.ones((rows, columns), "float32")
    forward_bytes = _counted_bytes(layer, x)
    return 3 * forward_bytes / _training_s(layer, x, repeats=repeats)


def _counted_bytes(call: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Bytes of a forward pass in which nothing is a product, as the search counts them."""
    called = jax.make_jaxpr(call)(x)
    flat = jax.make_jaxpr(lambda x: inline(called.jaxpr, called.consts, [x]))(x)
    return sum(
        passed_bytes(eqn.primitive.name, sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars))
        for eqn in flat.eqns
    )


def _stream_rate(num_bytes: int = 1 << 26, repeats: int = 7) -> float:
    a = jnp.ones((num_bytes // 4,), "float32")
    add = jax.jit(lambda x: x + 1)
    add(a).block_until_ready()
    return 2.0 * num_bytes / min(_time(lambda: add(a).block_until_ready()) for _ in range(repeats))


def _training_s(call: Callable[..., jax.Array], *args: jax.Array, repeats: int) -> float:
    """Seconds of a call with the gradients of all of its arguments: the lower quartile of its repeats."""

    def train(*args: jax.Array) -> Any:
        result, pull_back = jax.vjp(call, *args)
        return result, pull_back(result)

    run = jax.jit(train)
    jax.block_until_ready(run(*args))
    return statistics.quantiles((_time(lambda: jax.block_until_ready(run(*args))) for _ in range(repeats)), n=4)[0]


def _time(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure_node_rates()))
