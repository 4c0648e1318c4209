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


def measure_node_rates() -> dict[str, float]:
    """FLOP/s by dtype and bytes/s of the whole node. For a process of its own, in which jax has not started."""
    keep_freed_memory()  # as a run does
    float32 = _matmul_rate("float32")
    return {"float32": float32, "float64": float32 / 2, "bytes_per_s": _stream_rate()}


def _matmul_rate(dtype: str, size: int = 768, repeats: int = 7) -> float:
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    return 2.0 * size**3 / min(_time(lambda: product(a).block_until_ready()) for _ in range(repeats))


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
