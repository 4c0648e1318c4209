"""What a virtual device of this machine's CPU does: the node's measured rates are shared by the devices in use.

Its memory is 80 % of RAM.
"""

import os
from dataclasses import replace

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


def pass_share() -> float:
    """Seconds of what is no product over those of copying the bytes that the search counts of it, on this machine."""
    rates = node_rates()
    return rates["bytes_per_s"] / rates["pass_bytes_per_s"]


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
