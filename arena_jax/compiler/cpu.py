"""What this machine's CPU does, measured (``python -m arena_jax.compiler.cpu`` prints it as JSON).

The node's rate is shared by the virtual devices in use; its memory is 80 % of RAM.
"""

import json
import os
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from arena_jax.cpu_memory import keep_freed_memory
from arena_jax.grid import DeviceType
from arena_jax.node_rates import node_rates

_MEMORY_SHARE = 0.8


def measured_cpu(row: DeviceType, num_devices: float) -> DeviceType:
    """A CPU row with this node's measured rates, split over ``num_devices`` or by the threads of its own."""
    rates = node_rates()
    if row.threads is not None:
        num_devices = max(1.0, rates["cores"]) / row.threads  # of which the node would hold so many
    return replace(
        row,
        peak_flops={"float32": rates["float32"] / num_devices, "float64": rates["float64"] / num_devices},
        memory_bandwidth=rates["bytes_per_s"] / num_devices,
        intra_node_bandwidth=rates["bytes_per_s"] / 4 / num_devices,
        memory_bytes=int(_ram_bytes() * _MEMORY_SHARE / num_devices),
    )


def convolution_share() -> float:
    """Rate of convolutions as a share of that of matrix products, on this machine."""
    rates = node_rates()
    return rates["convolution"] / rates["float32"]


def measure_node_rates() -> dict[str, float]:
    """FLOP/s by dtype and bytes/s of the whole node. For a process of its own, in which jax has not started."""
    keep_freed_memory()  # as a run does
    float32 = _matmul_rate("float32")
    return {
        "float32": float32,
        "float64": float32 / 2,
        "convolution": _convolution_rate("float32"),
        "bytes_per_s": _stream_rate(),
    }


def _matmul_rate(dtype: str, size: int = 768, repeats: int = 7) -> float:
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    return 2.0 * size**3 / min(_time(lambda: product(a).block_until_ready()) for _ in range(repeats))


def _convolution_rate(dtype: str, images: int = 16, side: int = 16, channels: int = 64, repeats: int = 7) -> float:
    """FLOP/s of a 3 x 3 convolution with both of its gradients; the kernel's runs at a fraction of the others' rate."""
    x = jnp.ones((images, side, side, channels), dtype)
    kernel = jnp.ones((3, 3, channels, channels), dtype)

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def train(x: jax.Array, kernel: jax.Array) -> Any:
        result, pull_back = jax.vjp(convolve, x, kernel)
        return result, pull_back(result)

    run = jax.jit(train)
    jax.block_until_ready(run(x, kernel))
    flops = 3 * 2.0 * images * side**2 * channels**2 * 9
    return flops / min(_time(lambda: jax.block_until_ready(run(x, kernel))) for _ in range(repeats))


def _stream_rate(num_bytes: int = 1 << 26, repeats: int = 7) -> float:
    a = jnp.ones((num_bytes // 4,), "float32")
    add = jax.jit(lambda x: x + 1)
    add(a).block_until_ready()
    return 2.0 * num_bytes / min(_time(lambda: add(a).block_until_ready()) for _ in range(repeats))


def _time(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    print(json.dumps(measure_node_rates()))
