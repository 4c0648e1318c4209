"""Seconds for computing and moving bytes on a device type: a roofline and alpha-beta collectives.

The first form of the cost model. Rates are datasheet peaks times a constant share that large
operations reach; a ring moves ``2 (n - 1) / n`` of the bytes for an all-reduce and half of that for
all-gather and reduce-scatter (Thakur, Rabenseifner, Gropp 2005).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from arena_jax.grid import CATALOGUE, Allocation, Catalogue, DeviceType, Submesh

# A number, or an array of them that is worked on elementwise.
Floats = Any
# What operations are told apart by.
OP_KINDS = ("dot", "conv", "elementwise", "reduce", "gather", "scatter", "sort", "other")

# Share of peak that large matrix products, and streaming kernels, reach; a round figure of public
# GPU benchmarks. Measured CPU rates are what they are.
_COMPUTE_SHARE = {"cpu": 1.0, "cuda": 0.5, "tpu": 0.55}
_BANDWIDTH_SHARE = {"cpu": 1.0, "cuda": 0.75, "tpu": 0.75}
# Devices keep some memory for the runtime, and fragmentation costs some.
_MEMORY_SHARE = {"cpu": 1.0, "cuda": 0.9, "tpu": 0.95}
# Issuing one stage program from Python, with its transfers, seconds.
_DISPATCH_S = {"cpu": 6e-4, "cuda": 2e-4, "tpu": 2e-4}
# Starting one program or one fused kernel, seconds.
_LAUNCH_S = {"cpu": 2e-6, "cuda": 4e-6, "tpu": 2e-6}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device type as the cost model sees it, inside one allocation."""

    device: DeviceType
    allocation: Allocation

    @property
    def usable_bytes(self) -> int:
        return int(self.device.memory_bytes * _MEMORY_SHARE[self.device.platform])

    @property
    def launch_s(self) -> float:
        return _LAUNCH_S[self.device.platform]

    @property
    def dispatch_s(self) -> float:
        return _DISPATCH_S[self.device.platform]

    def op_s(self, kind: str, dtype: str, flops: Floats, num_bytes: Floats) -> Floats:
        """Seconds of one execution of an operation on one device, elementwise over arrays.

        Args:
            kind: one of :data:`OP_KINDS`.
            dtype: numpy name of the type that is computed in.
            flops: FLOPs of one device, float64.
            num_bytes: bytes one device reads and writes when the operation runs on its own.
        """
        if kind not in OP_KINDS:
            raise ValueError(f"unknown kind of operation {kind!r}; kinds: {', '.join(OP_KINDS)}")
        moved_s = self.memory_s(np.asarray(num_bytes, float))
        if kind not in ("dot", "conv"):
            return moved_s + self.launch_s
        return np.maximum(self.compute_s(np.asarray(flops, float), dtype), moved_s) + self.launch_s

    def compute_s(self, flops: Floats, dtype: str) -> Floats:
        """Seconds for FLOPs of large matrix products in a dtype."""
        return flops / (self.device.peak(dtype) * _COMPUTE_SHARE[self.device.platform])

    def memory_s(self, num_bytes: Floats) -> Floats:
        """Seconds to stream bytes through device memory."""
        return num_bytes / (self.device.memory_bandwidth * _BANDWIDTH_SHARE[self.device.platform])


@dataclass(frozen=True, kw_only=True)
class Link:
    """One group of devices that communicate: size, bytes/s of each, seconds to start."""

    size: int
    bandwidth: float
    latency_s: float

    def all_reduce_s(self, num_bytes: Floats) -> Floats:
        return self._ring_s(2 * num_bytes, 2)

    def all_gather_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is the gathered size."""
        return self._ring_s(num_bytes, 1)

    def reduce_scatter_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is the size before scattering."""
        return self._ring_s(num_bytes, 1)

    def all_to_all_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is what one device holds. Dearer than its share of bytes, as messages are small."""
        return self._ring_s(num_bytes, 1)

    def _ring_s(self, num_bytes: Floats, rounds: int) -> Floats:
        if self.size == 1:
            return np.zeros_like(num_bytes, float) if np.ndim(num_bytes) else 0.0
        share = (self.size - 1) / self.size
        return num_bytes * share / self.bandwidth + rounds * (self.size - 1) * self.latency_s


def hardware_of(allocation: Allocation, catalogue: Catalogue = CATALOGUE) -> Hardware:
    """Look a type up; the type ``cpu`` is replaced by what was measured on this machine."""
    device = catalogue[allocation.device_type]
    if device.platform == "cpu" and device.threads is None:
        from arena_jax.compiler.cpu import measured_cpu

        device = measured_cpu(device, allocation.num_devices)
    return Hardware(device=device, allocation=allocation)


def links_of(hardware: Hardware, submesh: Submesh, dp: int, tp: int) -> tuple[Link, Link]:
    """The groups of the dp and the tp axis; tensor-parallel neighbours share a node where they can."""
    device, per_node = hardware.device, submesh.devices_per_node

    def link(size: int, stride: int) -> Link:
        if submesh.num_nodes == 1 or size * stride <= per_node:
            return Link(size=size, bandwidth=device.intra_node_bandwidth, latency_s=device.intra_node_latency_s)
        # Groups that cross nodes share the node's network: one ring each passes through it.
        sharing = max(1, min(stride, per_node))
        return Link(
            size=size,
            bandwidth=min(device.inter_node_bandwidth / sharing, device.intra_node_bandwidth),
            latency_s=device.inter_node_latency_s,
        )

    return link(dp, tp), link(tp, 1)


def transfer_s(hardware: Hardware, num_bytes: float, same_node: bool) -> float:
    """Point-to-point transfer between two stages."""
    device = hardware.device
    if same_node:
        return num_bytes / device.intra_node_bandwidth + device.intra_node_latency_s
    return num_bytes / device.inter_node_bandwidth + device.inter_node_latency_s
