"""Measured pieces of models and of machines, as the cost model looks them up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# What a layer's program is timed as: its forward pass, or that with its backward pass behind it.
FORWARD, BOTH = "forward", "both"
# Of both passes, where nobody measured: a backward pass has two products for every one of the forward pass.
FORWARD_SHARE = 1 / 3
# The C library keeps freed memory at hand up to this size (mallopt(3), M_MMAP_THRESHOLD) and gives larger
# blocks back, to be found and zeroed again at the next step.
FRESH_BYTES = 32 * 2**20
Curve = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Seconds of one device, with as many others at work as the allocation has.

    Attributes:
        layers: (key of a layer's program, ``forward`` or ``both``) -> seconds.
        likes: what layers with measurements look like, whatever their sizes -> the part of both passes
            that the forward pass takes.
        updates: key of an optimizer's update of some parameters -> seconds.
        transfers: bytes and seconds of moving a value to another device, ascending; ``None`` if unmeasured.
        dispatches: devices of a program -> seconds to issue one.
        crossing: bytes that a program keeps for its backward pass, ascending, and seconds that layers take in
            it besides what they take alone: what one leaves in caches and memory at hand, many do not.
        fresh_s: seconds for a byte of memory that the system has to find first.
        speedup: how much faster a program runs that has the whole node's cores rather than its device's share.
    """

    layers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    likes: Mapping[str, float] = field(default_factory=dict)
    updates: Mapping[str, float] = field(default_factory=dict)
    transfers: Curve | None = None
    dispatches: Mapping[int, float] = field(default_factory=dict)
    crossing: Curve | None = None
    fresh_s: float = 0.0
    speedup: float | None = None

    def crossing_s(self, saved_bytes: Any) -> Any:
        """Seconds of one microbatch that a program takes besides its layers', elementwise over arrays."""
        if self.crossing is None:
            return np.zeros_like(saved_bytes)
        sizes, seconds = (np.asarray((0.0, *x)) for x in self.crossing)
        beyond = np.maximum(saved_bytes - sizes[-1], 0.0) * seconds[-1] / sizes[-1]
        return np.interp(saved_bytes, sizes, seconds) + beyond

    def fresh_memory_s(self, saved_bytes: float) -> float:
        """What of :meth:`crossing_s` is memory that a program asks for once, however often it loops."""
        if saved_bytes < FRESH_BYTES:
            return 0.0
        return min(self.fresh_s * saved_bytes, float(self.crossing_s(saved_bytes)))

    def layer_s(self, key: str, like: str) -> tuple[float, float] | None:
        """Seconds of a layer's forward pass, and of its backward pass; ``None`` where these were not measured."""
        both = self.layers.get((key, BOTH))
        if both is None:
            return None
        forward = self.layers.get((key, FORWARD), both * self.likes.get(like, FORWARD_SHARE))
        # Separate repeats scatter; a backward pass is no shorter than half of its forward pass.
        forward = min(forward, both * 2 / 3)
        return forward, both - forward


NOTHING = Pieces()
