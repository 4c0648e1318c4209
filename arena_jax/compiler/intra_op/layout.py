"""How a value lies on a (dp, tp) mesh, and what it takes to make it lie otherwise.

An *axes set* is a bit mask over the mesh axes; a :data:`Layout` gives one per dim of a value. Where a
dim carries both axes, tp is the major one: gathering over dp is then one contiguous exchange.
"""

import math
from collections.abc import Sequence
from functools import cached_property

from arena_jax.compiler.intra_op import work as w

DP, TP = 1, 2
NAMES = {DP: "dp", TP: "tp"}
Layout = tuple[int, ...]
Axes = tuple[str | tuple[str, ...] | None, ...]


def to_axes(layout: Layout) -> Axes:
    """The same with names, as a partition spec has them."""
    named: dict[int, str | tuple[str, ...] | None] = {0: None, DP: "dp", TP: "tp", DP | TP: ("tp", "dp")}
    return tuple(named[axes] for axes in layout)


def to_layout(axes: Axes, rank: int) -> Layout:
    """The inverse of :func:`to_axes`, of a spec that may leave out dims at the end."""
    named = {name: axis for axis, name in NAMES.items()}
    padded = (*axes, *(None,) * (rank - len(axes)))
    return tuple(sum(named[n] for n in ((dim,) if isinstance(dim, str) else dim or ())) for dim in padded)


def used_axes(layout: Layout) -> int:
    """All axes that shard some dim."""
    used = 0
    for axes in layout:
        used |= axes
    return used


class MeshShape:
    """Sizes of the two axes; axes of size 1 do not exist for the search."""

    def __init__(self, dp: int, tp: int) -> None:
        self.dp = dp
        self.tp = tp
        self.sizes = (1, dp, tp, dp * tp)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes that exist."""
        return tuple(axis for axis in (DP, TP) if self.sizes[axis] > 1)

    def fits(self, size: int, axes: int) -> bool:
        """Whether a dim can be sharded so."""
        return size % self.sizes[axes] == 0

    def share(self, layout: Layout) -> float:
        """The part of a value that one device holds."""
        return 1.0 / math.prod(self.sizes[axes] for axes in layout)

    def reshard(self, num_bytes: float, source: Layout, target: Layout, *, differentiable: bool) -> w.Floats:
        """Work to bring a value from one layout to another, and its cotangent back.

        An axis that leaves is gathered, one that comes is a slice of what is there, one that changes
        its dim is exchanged all to all. The cotangent goes the other way.
        """
        work = w.empty()
        if source == target:
            return work
        self._one_way(work, num_bytes, source, target, w.FORWARD)
        if differentiable:
            self._one_way(work, num_bytes, target, source, w.BACKWARD)
        return work

    def _one_way(self, work: w.Floats, num_bytes: float, source: Layout, target: Layout, phase: str) -> None:
        current = list(source)
        num_moved, largest = 0, 0.0
        for axis in self.axes:
            before = _dim_of(current, axis)
            after = _dim_of(target, axis)
            if before is None or before == after:
                continue
            local = num_bytes * self.share(tuple(current))
            if after is not None and not current[after]:
                kind, size = "all_to_all", local
                current[after] |= axis
            else:
                kind, size = "all_gather", local * self.sizes[axis]
            w.add_collective(work, NAMES[axis], kind, phase, size)
            num_moved, largest = num_moved + 1, max(largest, size)
            current[before] &= ~axis
        if num_moved > 1:
            # Between two exchanges XLA permutes what lies in the wrong place of the other axis.
            w.add_collective(work, NAMES[self.axes[0]], "all_to_all", phase, largest)


def _dim_of(layout: Sequence[int], axis: int) -> int | None:
    for dim, axes in enumerate(layout):
        if axes & axis:
            return dim
    return None
