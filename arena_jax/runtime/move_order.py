"""In which order a state's leaves move to another plan, so that no device holds much more than it must.

Old and new leaves lie on the same devices. A leaf that is moved needs room for its new form before its
old form is freed, and where stages change places, a device may be given all that is new before anything
of it is freed. So leaves are ordered by what they need and free; where no order keeps within the budget,
some leaves wait in host memory. Pure arithmetic on bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Device = int


@dataclass(frozen=True, kw_only=True)
class LeafBytes:
    """What one leaf takes on each device, in bytes.

    Attributes:
        old, new: in its old and its new form.
        kept: of these, buffers that are both, and are neither copied nor freed.
    """

    old: Mapping[Device, int]
    new: Mapping[Device, int]
    kept: Mapping[Device, int]

    def needs(self, device: Device) -> int:
        """Bytes to be found before it can move."""
        return self.new.get(device, 0) - self.kept.get(device, 0)

    def frees(self, device: Device) -> int:
        """Bytes free once it has moved."""
        return self.old.get(device, 0) - self.kept.get(device, 0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Leaves that are handled together.

    Attributes:
        kind: ``move`` from device to device, ``park`` in host memory (frees the old form), or ``place``
            what was parked.
        leaves: their numbers.
    """

    kind: Literal["move", "park", "place"]
    leaves: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Batches, in order, and the most that each device holds on the way."""

    batches: tuple[Batch, ...]
    peak: Mapping[Device, int]


def budget(leaves: Sequence[LeafBytes]) -> dict[Device, int]:
    """Bytes that each device may hold: the larger of its old and new state, and its two largest leaves."""
    devices = {d for leaf in leaves for d in (*leaf.old, *leaf.new)}
    allowed = {}
    for d in devices:
        sizes = sorted((max(leaf.old.get(d, 0), leaf.new.get(d, 0)) for leaf in leaves), reverse=True)
        old, new = (sum(getattr(leaf, side).get(d, 0) for leaf in leaves) for side in ("old", "new"))
        allowed[d] = max(old, new) + sum(sizes[:2])
    return allowed


def order_moves(leaves: Sequence[LeafBytes], allowed: Mapping[Device, int]) -> Order:
    """Order the moves so that every device stays within ``allowed``, which is at least its new state."""
    usage = {d: sum(leaf.old.get(d, 0) for leaf in leaves) for d in allowed}
    peak = dict(usage)
    waiting, parked = set(range(len(leaves))), set[int]()
    batches: list[Batch] = []

    def take(kind: Literal["move", "park", "place"], chosen: Sequence[int]) -> None:
        for d in allowed:
            if kind != "park":
                usage[d] += sum(_needs(leaves[i], d, kind) for i in chosen)
                peak[d] = max(peak[d], usage[d])
            if kind != "place":
                usage[d] -= sum(leaves[i].frees(d) if kind == "move" else leaves[i].old.get(d, 0) for i in chosen)
        batches.append(Batch(kind=kind, leaves=tuple(chosen)))
        waiting.difference_update(chosen)
        (parked.update if kind == "park" else parked.difference_update)(chosen)

    while waiting or parked:
        moved = _packed(leaves, waiting, usage, allowed, "move")
        if moved:
            take("move", moved)
            continue
        placed = _packed(leaves, parked, usage, allowed, "place")
        if placed and not waiting:
            take("place", placed)
            continue
        if waiting:
            take("park", [_to_park(leaves, waiting, usage, allowed)])
            continue
        raise AssertionError("a device cannot hold its own new state")
    return Order(batches=tuple(batches), peak=peak)


def _needs(leaf: LeafBytes, device: Device, kind: str) -> int:
    return leaf.new.get(device, 0) if kind == "place" else leaf.needs(device)


def _packed(
    leaves: Sequence[LeafBytes],
    candidates: set[int],
    usage: Mapping[Device, int],
    allowed: Mapping[Device, int],
    kind: Literal["move", "place"],
) -> list[int]:
    """As many leaves as fit at once, those first that leave the fullest device the most room."""
    fullest = max(usage, key=lambda d: (usage[d] - allowed[d], d), default=0)

    def gain(i: int) -> tuple[int, int]:
        leaf = leaves[i]
        frees = 0 if kind == "place" else leaf.frees(fullest)
        return _needs(leaf, fullest, kind) - frees, i

    room = {d: allowed[d] - usage[d] for d in allowed}
    chosen = []
    for i in sorted(candidates, key=gain):
        if all(_needs(leaves[i], d, kind) <= room[d] for d in leaves[i].new):
            for d in leaves[i].new:
                room[d] -= _needs(leaves[i], d, kind)
            chosen.append(i)
    return chosen


def _to_park(
    leaves: Sequence[LeafBytes], waiting: set[int], usage: Mapping[Device, int], allowed: Mapping[Device, int]
) -> int:
    """The leaf that frees most on the device with the least room."""
    fullest = max(usage, key=lambda d: (usage[d] - allowed[d], d))
    return max(waiting, key=lambda i: (leaves[i].old.get(fullest, 0), sum(leaves[i].old.values()), i))
