"""What a unit of each kind of work costs on some hardware: the weights of the sharding search."""

from dataclasses import dataclass

import numpy as np

from arena_jax.compiler.cost import Hardware, Link, links_of
from arena_jax.compiler.intra_op import work as w
from arena_jax.grid import Submesh

# Bytes at which the rate of a link is read off: collectives worth choosing between are large.
_LARGE_BYTES = 64 * 2**20
# A backward pass computes two products for every one of the forward pass.
_PASSES = 3.0
# A sharding serves all numbers of microbatches, and is chosen as for this many. Gradients are reduced in
# each, or once a step where shards of rows sum their own.
_MICROBATCHES = 4


@dataclass(frozen=True)
class Prices:
    """Seconds per unit of a work vector, and per byte of trainable parameters that a device holds.

    Attributes:
        work: ``SIZE`` numbers, forward and backward pass together.
        parameter_s: what one more byte of parameters costs in the optimizer's update.
        parameter_memory: bytes that a device holds for each byte of trainable parameters.
    """

    work: tuple[float, ...]
    parameter_s: float
    parameter_memory: float

    def memory_bytes(self, work: w.Floats, parameter_bytes: w.Floats, frozen_bytes: w.Floats) -> w.Floats:
        """Bytes of a device: what parameters bring along, and what a microbatch keeps for its backward pass."""
        return parameter_bytes * self.parameter_memory + frozen_bytes + work[..., w.SAVED] / _MICROBATCHES

    def seconds(self, work: w.Floats) -> w.Floats:
        """Seconds of work vectors, over the last dim."""
        return work @ np.array(self.work)


def prices_of(
    hardware: Hardware,
    submesh: Submesh,
    dp: int,
    tp: int,
    *,
    update_ratio: float,
    parameter_memory: float,
    late_gradients: bool = False,
) -> Prices:
    """Prices on a submesh arranged as ``dp x tp``.

    Args:
        update_ratio: bytes that the optimizer's update moves per byte of parameters.
        parameter_memory: bytes that a device holds per byte of parameters.
        late_gradients: whether gradients are reduced over dp once a step.
    """
    rates = {dtype: _PASSES * hardware.compute_s(1.0, dtype) for dtype in w.DTYPES}
    links = dict(zip(w.AXES, links_of(hardware, submesh, dp, tp), strict=True))
    return _prices(
        rates,
        _PASSES * hardware.fused_s(1.0),
        hardware.launch_s,
        {(axis, kind): _line(link, kind) for axis, link in links.items() for kind in w.KINDS},
        hardware.memory_s(1.0) * update_ratio,
        parameter_memory,
        late_gradients=late_gradients,
    )


def nominal_prices() -> Prices:
    """Prices in byte-like units of no hardware in particular, for questions that are about none.

    FLOPs weigh far more than on real hardware, so that whatever tp can split is split; a byte between
    devices weighs five through memory, and an all-reduce moves twice what a gather does.
    """
    weights = {kind: (10.0 if kind == "all_reduce" else 5.0, 0.0) for kind in w.KINDS}
    links = {(axis, kind): weight for axis in w.AXES for kind, weight in weights.items()}
    return _prices(dict.fromkeys(w.DTYPES, 0.75), 3.0, 0.0, links, 4.0, 5.0)


def _prices(
    flops_s: dict[str, float],
    moved_s: float,
    launch_s: float,
    links: dict[tuple[str, str], tuple[float, float]],
    parameter_s: float,
    parameter_memory: float,
    late_gradients: bool = False,
) -> Prices:
    work = w.empty()
    for dtype, seconds in flops_s.items():
        work[w.flops_at(dtype)] = seconds
    work[w.MOVED] = moved_s
    work[w.NUM_OPS] = launch_s
    for (axis, kind), (byte_s, start_s) in links.items():
        for phase in w.PHASES:
            at = w.collective_at(axis, kind, phase)
            late = phase == w.GRADIENT and late_gradients and axis == w.AXES[0]
            often = phase in (w.GRADIENT, w.PARAMETER) and not late
            work[at] = byte_s * (_MICROBATCHES if often else 1)
            # Gradients are reduced together: no start for each parameter.
            work[at + 1] = 0.0 if phase == w.GRADIENT else start_s
    return Prices(tuple(float(x) for x in work), parameter_s, parameter_memory)


def _line(link: Link, kind: str) -> tuple[float, float]:
    """Seconds per byte at large sizes, and seconds to start."""
    seconds = getattr(link, f"{kind}_s")
    start_s = float(seconds(0.0))
    return (float(seconds(_LARGE_BYTES)) - start_s) / _LARGE_BYTES, start_s
