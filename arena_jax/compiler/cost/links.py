"""Seconds of collectives: alpha-beta with a bandwidth that grows with the message.

A ring moves ``2 (n - 1) / n`` of the bytes for an all-reduce and half of that for all-gather and
reduce-scatter (Thakur, Rabenseifner, Gropp 2005). Starting costs a launch, a ramp that messages pay
once they are too long for the low-latency protocol, and a step per neighbour; what a link then
reaches of its datasheet depends on its kind. docs/cost_model.md names the fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from arena_jax.grid import DeviceType, Submesh

if TYPE_CHECKING:
    from arena_jax.compiler.cost.hardware import Hardware

# A number, or an array of them that is worked on elementwise.
Floats = Any
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# Share of a link's datasheet bandwidth that rings reach with large messages.
_RING_SHARE = {
    "nvlink-switch": 0.76,
    "nvlink-mesh": 0.8,
    "pcie": 0.42,
    "ici": 0.8,
    "memory": 1.0,
    "infiniband": 0.6,
    "ethernet": 0.4,
}
# The same for all-to-all, which is made of many pairs.
_PAIRS_SHARE = {
    "nvlink-switch": 0.44,
    "nvlink-mesh": 0.44,
    "pcie": 0.37,
    "ici": 0.4,
    "memory": 0.7,
    "infiniband": 0.5,
    "ethernet": 0.35,
}
# Seconds to launch, and what messages beyond about _RAMP_BYTES pay besides.
_LAUNCH_S = {"cuda": 2e-5, "tpu": 2e-6, "cpu": 2e-6}
_RAMP_S = {"cuda": 2.5e-5, "tpu": 0.0, "cpu": 0.0}
_RAMP_BYTES = 65536.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """One group of devices that communicate.

    Attributes:
        size: devices of the group.
        bandwidth: bytes/s that each sends in a ring with large messages.
        pairs_bandwidth: bytes/s that each sends in an all-to-all; ``None`` for ``bandwidth``.
        latency_s: seconds one step takes to start.
        launch_s: seconds before the first step.
        ramp_s: seconds that messages beyond about 64 KiB pay besides.
        meets: whether the group meets in one memory, where every kind of collective takes about as long as an
            all-reduce: all of them read and write what all members hold.
        measured: by collective, sizes in bytes and seconds of it, both ascending; they replace the
            formula, between them by log-log interpolation and beyond them at their ends' rates.
    """

    size: int
    bandwidth: float
    latency_s: float
    pairs_bandwidth: float | None = None
    launch_s: float = 0.0
    ramp_s: float = 0.0
    meets: bool = False
    measured: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)

    def all_reduce_s(self, num_bytes: Floats) -> Floats:
        return self._seconds("all_reduce", num_bytes, 2.0, self.bandwidth)

    def all_gather_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is the gathered size."""
        return self._seconds("all_gather", num_bytes, 1.0, self.bandwidth)

    def reduce_scatter_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is the size before scattering."""
        return self._seconds("reduce_scatter", num_bytes, 1.0, self.bandwidth)

    def all_to_all_s(self, num_bytes: Floats) -> Floats:
        """``num_bytes`` is what one device holds."""
        return self._seconds("all_to_all", num_bytes, 1.0, self.pairs_bandwidth or self.bandwidth)

    def _seconds(self, kind: str, num_bytes: Floats, rounds: float, bandwidth: float) -> Floats:
        num_bytes = np.asarray(num_bytes, float) if np.ndim(num_bytes) else float(num_bytes)
        if self.size == 1:
            return num_bytes * 0.0
        if kind in self.measured:
            return interpolated_s(self.measured[kind], num_bytes)
        steps = (2.0 if self.meets else rounds) * (self.size - 1)
        start_s = self.launch_s + self.ramp_s * num_bytes / (num_bytes + _RAMP_BYTES) + steps * self.latency_s
        return start_s + steps / self.size * num_bytes / bandwidth


def interpolated_s(points: tuple[tuple[float, ...], tuple[float, ...]], num_bytes: Floats) -> Floats:
    """Seconds at sizes between measured ones; below the first its own, above the last at its rate."""
    sizes, seconds = np.asarray(points[0]), np.asarray(points[1])
    at = np.maximum(np.asarray(num_bytes, float), 1.0)
    inside = np.exp(np.interp(np.log(at), np.log(sizes), np.log(seconds)))
    result = inside * np.maximum(at / sizes[-1], 1.0)
    return result if np.ndim(num_bytes) else float(result)


def links_of(hardware: "Hardware", submesh: Submesh, dp: int, tp: int) -> tuple[Link, Link]:
    """The groups of the dp and the tp axis; tensor-parallel neighbours share a node where they can."""
    return group_link(hardware, submesh, dp, tp), group_link(hardware, submesh, tp, 1)


def group_link(hardware: "Hardware", submesh: Submesh, size: int, stride: int) -> Link:
    """Groups of ``size`` devices, ``stride`` apart, that fill a submesh."""
    device, per_node = hardware.device, submesh.devices_per_node
    common: dict[str, Any] = {"launch_s": _LAUNCH_S[device.platform], "ramp_s": _RAMP_S[device.platform]}
    inside = submesh.num_nodes == 1 or size * stride <= per_node
    # Virtual devices of a CPU are all alike near to each other.
    measured = hardware.collectives.get((size, 1 if device.platform == "cpu" else stride, inside), {})
    if inside:
        kind = device.intra_node_link
        bandwidth = device.intra_node_bandwidth * _reachable(device, size)
        return Link(
            size=size,
            bandwidth=bandwidth * _RING_SHARE[kind],
            pairs_bandwidth=bandwidth * _PAIRS_SHARE[kind],
            latency_s=device.intra_node_latency_s,
            meets=kind == "memory",
            measured=measured,
            **common,
        )
    # Groups that cross nodes share the node's network: one ring each passes through it.
    kind, sharing = device.inter_node_link, max(1, min(stride, per_node))
    ring = device.inter_node_bandwidth * _RING_SHARE[kind] / sharing
    # All but a node's own part of an all-to-all leaves the node, of every member in it.
    members = max(1, per_node // sharing)
    pairs = device.inter_node_bandwidth * _PAIRS_SHARE[kind] / (sharing * members)
    return Link(
        size=size,
        bandwidth=min(ring, device.intra_node_bandwidth * _RING_SHARE[device.intra_node_link]),
        pairs_bandwidth=pairs,
        latency_s=device.inter_node_latency_s,
        measured=measured,
        **common,
    )


def _reachable(device: DeviceType, size: int) -> float:
    """Share of a device's links that lead into a group of ``size``: in a mesh, one peer each."""
    if device.intra_node_link != "nvlink-mesh":
        return 1.0
    return min(1.0, (size - 1) / max(1, min(device.devices_per_node, 8) - 1))


def transfer_s(hardware: "Hardware", num_bytes: Floats, same_node: bool) -> Floats:
    """Point-to-point transfer between two stages."""
    if hardware.pieces.transfers is not None and same_node:
        return interpolated_s(hardware.pieces.transfers, num_bytes)
    device = hardware.device
    if same_node:
        kind, bandwidth, latency_s = device.intra_node_link, device.intra_node_bandwidth, device.intra_node_latency_s
    else:
        kind, bandwidth, latency_s = device.inter_node_link, device.inter_node_bandwidth, device.inter_node_latency_s
    return num_bytes / (bandwidth * _RING_SHARE[kind]) + latency_s + _LAUNCH_S[device.platform]
