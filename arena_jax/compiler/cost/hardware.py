"""A device type as the search sees it, inside one allocation."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.cost.efficiency import FITTED, Efficiency
from arena_jax.compiler.cost.matmul import balanced_shape, matmul_s
from arena_jax.compiler.cost.pieces import NOTHING, Pieces
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, DeviceType

# A number, or an array of them that is worked on elementwise.
Floats = Any
# What operations are told apart by.
OP_KINDS = ("dot", "conv", "elementwise", "reduce", "gather", "scatter", "sort", "other")
# Share of the streaming rate, besides that of reductions, which is fitted: rows of an embedding are
# read nearly whole; scattered sums read, add and write; a sort passes over its input many times.
_KIND_SHARE = {"elementwise": 1.0, "gather": 0.6, "scatter": 0.35, "sort": 0.06, "other": 0.8}
# Devices keep some memory for the runtime, and fragmentation costs some.
_MEMORY_SHARE = {"cpu": 1.0, "cuda": 0.9, "tpu": 0.95}
# Issuing one stage program from Python, with its transfers, seconds.
_DISPATCH_S = {"cpu": 6e-4, "cuda": 2e-4, "tpu": 2e-4}
# Of a program on a CPU, what runs on one core however many there are.
_SERIAL_SHARE = 0.1
# Starting one fused kernel, seconds; GPUs: see Efficiency. On a CPU small products and convolutions take 1 to 7 us
# each, a mean and its subtraction 10 (2-core Xeon, jaxlib 0.10.2).
_LAUNCH_S = {"cpu": 5e-6, "tpu": 2e-6}
# Rates that are given for a CPU are those it reaches, with as few images as there are.
_OF_CPU = replace(FITTED, conv_share=1.0, conv_weight_passes=0.0, unfused_share=1.0)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device type as the cost model sees it, inside one allocation."""

    device: DeviceType
    allocation: Allocation
    efficiency: Efficiency = FITTED
    # Measured over computed seconds by kind of operation, where someone measured.
    corrections: Mapping[str, float] = field(default_factory=dict)
    # Measured seconds of products: (kind, dtype, (batch, m, k, n)).
    products: Mapping[tuple[str, str, tuple[float, float, float, float]], float] = field(default_factory=dict)
    # Names the state of the profile store that these came from.
    generation: str = ""
    # Measured collectives by group size, stride and whether the group stays in a node.
    collectives: Mapping[tuple[int, int, bool], Mapping[str, Any]] = field(default_factory=dict)
    # Measured layers, updates, transfers and dispatches.
    pieces: Pieces = NOTHING
    # What training runs have taught about estimates made of measured and of computed pieces, part by part.
    bias: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def usable_bytes(self) -> int:
        return int(self.device.memory_bytes * _MEMORY_SHARE[self.device.platform])

    @property
    def shares_cores(self) -> bool:
        """Whether devices are shares of one pool of cores: virtual CPU devices without threads of their own."""
        return self.device.platform == "cpu" and self.device.threads is None

    @property
    def launch_s(self) -> float:
        alone = _LAUNCH_S.get(self.device.platform, self.efficiency.launch_s)
        return alone * share_of_cores(self.allocation.num_devices)[1] if self.shares_cores else alone

    @property
    def dispatch_s(self) -> float:
        """Issuing one stage's program."""
        known = self.pieces.dispatches
        return known[min(known)] if known else _DISPATCH_S[self.device.platform]

    def learnt(self, part: str, *, measured: bool) -> float:
        """Factor on a part of an estimate, which errs otherwise where its pieces were measured."""
        return self.bias.get("measured" if measured else "computed", {}).get(part, 1.0)

    @property
    def speedup_alone(self) -> float:
        """How many times as fast as beside all others a virtual CPU device runs that has the node to itself."""
        cores = os.cpu_count() or 1
        share, slowdown = share_of_cores(self.allocation.num_devices)
        amdahl = 1 / (_SERIAL_SHARE + (1 - _SERIAL_SHARE) * share / cores)
        return slowdown * (self.pieces.speedup or amdahl)

    @property
    def without_measurements(self) -> "Hardware":
        """The same as the compile-time model alone sees it."""
        return replace(self, corrections={}, products={}, collectives={}, pieces=NOTHING, bias={}, generation="")

    def op_s(
        self,
        kind: str,
        dtype: str,
        flops: Floats,
        num_bytes: Floats,
        shape: tuple[Floats, Floats, Floats, Floats] | None = None,
    ) -> Floats:
        """Seconds of one execution of an operation on one device, elementwise over arrays.

        Args:
            kind: one of :data:`OP_KINDS`.
            dtype: numpy name of the type that is computed in.
            flops: FLOPs of one device.
            num_bytes: bytes one device reads and writes when the operation runs on its own.
            shape: of a ``dot`` or ``conv``, where known, its (batch, rows, depth, columns) on one
                device; else a product of FLOPs and bytes like these with a square output.
        """
        if kind not in OP_KINDS:
            raise ValueError(f"unknown kind of operation {kind!r}; kinds: {', '.join(OP_KINDS)}")
        times = self.correction(kind)
        if kind in ("dot", "conv"):
            itemsize = itemsize_of(dtype)
            if shape is None:
                side, depth = balanced_shape(flops, num_bytes, itemsize)
                shape = (np.ones_like(side), side, depth, side)
            seconds = matmul_s(self.device, self.efficiency, dtype, itemsize, *shape)
            if kind == "conv":
                seconds = seconds / self.efficiency.conv_share
            return times * seconds + self.launch_s
        share = self.efficiency.reduce_share if kind == "reduce" else _KIND_SHARE[kind]
        if self.device.platform == "cpu":
            share = 1.0
        return times * self.memory_s(np.asarray(num_bytes, float)) / share + self.launch_s

    def compute_s(self, flops: Floats, dtype: str) -> Floats:
        """Seconds for FLOPs of large matrix products in a dtype."""
        return flops / self.efficiency.flops_per_s(self.device, dtype)

    def fused_s(self, num_bytes: Floats) -> Floats:
        """Seconds for the bytes that work vectors count of operations that are no products."""
        return self.memory_s(num_bytes) * self.efficiency.unfused_share * self.correction("other")

    def correction(self, kind: str) -> float:
        """Measured over computed seconds of a kind, from its own measurements, else from layers or whole steps."""
        own = kind if kind in ("dot", "conv") else "stream"
        known = self.corrections
        return known.get(own, known.get("layer", known.get("step", 1.0)))

    def memory_s(self, num_bytes: Floats) -> Floats:
        """Seconds to stream bytes through device memory."""
        return num_bytes / self.efficiency.bytes_per_s(self.device)


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a dtype by its name; ``tensorfloat32`` is stored as float32."""
    if dtype == "tensorfloat32":
        return 4
    if hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype)).itemsize
    return np.dtype(dtype).itemsize


def hardware_of(allocation: Allocation, catalogue: Catalogue = CATALOGUE) -> Hardware:
    """Look a type up, with what the profile store knows of it; ``cpu`` is what was measured on this machine."""
    device = catalogue[allocation.device_type]
    efficiency = FITTED if device.platform != "cpu" else _OF_CPU
    # A virtual type without rates of its own has its threads' share of this machine's.
    if device.platform == "cpu" and (device.threads is None or device.peak_flops == CATALOGUE["cpu"].peak_flops):
        from arena_jax.compiler.cpu import convolution_share, measured_cpu, pass_share

        device = measured_cpu(device, allocation.num_devices)
        efficiency = replace(_OF_CPU, conv_share=convolution_share(), unfused_share=pass_share())
    from arena_jax.compiler.profiling.measured import measured

    shared = device.platform == "cpu" and device.threads is None
    known = measured(device.name, allocation.num_devices if shared else None)
    return Hardware(
        device=device,
        allocation=allocation,
        efficiency=efficiency,
        corrections=known.corrections,
        products=known.products,
        collectives=known.collectives,
        pieces=known.pieces,
        bias=known.bias,
        generation=known.generation,
    )
