"""How the shards of a leaf come to another layout: which buffers stay, and which copies make the others.

Each new shard is found by its box (start and stop of each dim, in the whole leaf):

- the same box is on the same device: its buffer is kept, nothing is copied;
- it is on another device: copied from device to device;
- it must be cut from or pieced together of other boxes: done in host memory.

A small model's state is a thousand shards, and what they cost is the number of copies that Python issues
rather than their bytes. So devices that need the same box from the host get it by one call, and an array
of which nothing is kept is placed as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from arena_jax.runtime.layout import Entry

Box = tuple[tuple[int, int], ...]
"""Start and stop of each dim."""

# Below this many bytes a copy over the host is faster on CPU devices than jax's between two of them.
_SMALL_BYTES = 1 << 16
# XLA's CPU client adopts host memory that is aligned to this, instead of copying it.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """One shard: of which entry, on which device, and its box in the whole leaf."""

    entry: int
    device: Any
    box: Box
    primary: bool


@dataclass(frozen=True)
class _Copy:
    """One copy that is issued.

    Attributes:
        box: what is copied.
        source: the shard it is copied from; ``None`` for host memory.
        target: a device, or the sharding of the array that is made.
        residue: where the host memory begins, modulo the alignment.
    """

    box: Box
    source: Place | None
    target: Any
    residue: int = 0


@dataclass(frozen=True)
class _Array:
    """How one entry's array is made.

    Attributes:
        entry: its number.
        whole: whether the only copy is the array; otherwise it is joined of ``shards``.
        shards: a shard that is kept, or the number of a copy and the device of the shard in it.
    """

    entry: int
    whole: bool
    copies: tuple[_Copy, ...]
    shards: tuple[Place | tuple[int, Any], ...]


@dataclass(frozen=True)
class Leaf:
    """Where a leaf is and where it is to be; ``shape`` is that of its array data, whole."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    old: tuple[Place, ...]
    new: tuple[Place, ...]
    new_entries: Mapping[int, Entry]

    @cached_property
    def same(self) -> tuple[Place | None, ...]:
        """For each new shard an old one with its box, on its own device if there is one."""
        found: dict[Box, dict[Any, Place]] = {}
        for old in self.old:
            found.setdefault(old.box, {})[old.device] = old
        return tuple(
            None if not (at := found.get(new.box)) else at.get(new.device) or next(iter(at.values()))
            for new in self.new
        )

    @cached_property
    def moved(self) -> tuple[_Array, ...]:
        """How the new arrays are made of the old ones."""
        return self._arrays(self.same)

    @cached_property
    def placed(self) -> tuple[_Array, ...]:
        """How they are made of the whole leaf in host memory."""
        return self._arrays((None,) * len(self.new))

    def num_bytes(self, box: Box) -> int:
        return volume(box) * self.itemsize

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.dtype).itemsize)

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)

    def _arrays(self, same: Sequence[Place | None]) -> tuple[_Array, ...]:
        by_entry: dict[int, list[tuple[Place, Place | None]]] = {}
        for place, source in zip(self.new, same, strict=True):
            by_entry.setdefault(place.entry, []).append((place, source))
        return tuple(self._array(number, row) for number, row in by_entry.items())

    def _array(self, number: int, row: Sequence[tuple[Place, Place | None]]) -> _Array:
        missing: dict[Box, list[tuple[Place, Place | None]]] = {}
        for place, source in row:
            if source is None or source.device != place.device:
                missing.setdefault(place.box, []).append((place, source))
        by_host = {box for box, needed in missing.items() if self._by_host(box, needed)}
        entry = self.new_entries[number]
        if sum(len(missing[box]) for box in by_host) == len(row) and not entry.is_key:
            around = _around([place.box for place, _ in row])
            residue = _free_residue([_offset(box, around) * self.itemsize for box in by_host], self.itemsize)
            if residue is not None:
                return _Array(number, True, (_Copy(around, None, entry.sharding, residue),), ())
        copies: list[_Copy] = []
        found: dict[tuple[Box, Any], int] = {}
        for box, needed in missing.items():
            devices = tuple(place.device for place, _ in needed)
            if box in by_host:
                found.update(dict.fromkeys(((box, device) for device in devices), len(copies)))
                copies.append(_Copy(box, None, _on_each(devices), min(self.itemsize, _ALIGNMENT // 2)))
                continue
            for place, source in needed:
                found[box, place.device] = len(copies)
                copies.append(_Copy(box, source, place.device))
        shards: list[Place | tuple[int, Any]] = []
        for place, source in row:
            at = found.get((place.box, place.device))
            if at is None:
                assert source is not None
                shards.append(source)
            else:
                shards.append((at, place.device))
        return _Array(number, False, tuple(copies), tuple(shards))

    def _by_host(self, box: Box, needed: Sequence[tuple[Place, Place | None]]) -> bool:
        if any(source is None for _, source in needed):
            return True
        on_cpu = needed[0][0].device.platform == "cpu"
        return on_cpu and (len(needed) > 1 or self.num_bytes(box) < _SMALL_BYTES)


class Shards:
    """Single-device arrays of the state, found by entry and device."""

    def __init__(self, arrays: Mapping[int, Any]) -> None:
        self._arrays = arrays
        self._found: dict[int, dict[Any, Any]] = {}

    def __call__(self, place: Place) -> Any:
        if place.entry not in self._found:
            self._found[place.entry] = by_device(data_of(self._arrays[place.entry]))
        return self._found[place.entry][place.device]


def transfer(
    leaves: Sequence[Leaf], parked: Sequence[np.ndarray | None] | None, old: Mapping[int, Any]
) -> dict[int, Any]:
    """New arrays of some leaves by entry; all copies are issued in one call.

    Args:
        parked: the leaves in host memory, where they come from there.
        old: the old arrays by entry.
    """
    shards = Shards(old)
    sources: list[Any] = []
    targets: list[Any] = []
    todo: list[tuple[Leaf, _Array, int]] = []  # and the number of its first copy
    for k, leaf in enumerate(leaves):
        whole = None if parked is None else parked[k]
        for array in leaf.moved if whole is None else leaf.placed:
            todo.append((leaf, array, len(sources)))
            for copy in array.copies:
                if copy.source is not None:
                    value = shards(copy.source)
                else:
                    value = assemble(leaf, copy.box, shards) if whole is None else whole[slices(copy.box)]
                    value = _for_device(value, copy.residue, leaf)
                sources.append(value)
                targets.append(copy.target)
    copies = jax.device_put(sources, targets) if sources else []
    made = {}
    for leaf, array, first in todo:
        entry = leaf.new_entries[array.entry]
        if array.whole:
            made[array.entry] = copies[first]
            continue
        arrived = [_arrived(copies[first + i], copy.target) for i, copy in enumerate(array.copies)]
        row = [shards(s) if isinstance(s, Place) else arrived[s[0]][s[1]] for s in array.shards]
        made[array.entry] = _join(entry, row)
    return made


def _arrived(copy: Any, target: Any) -> dict[Any, Any]:
    return by_device(copy) if isinstance(target, NamedSharding) else {target: copy}


def by_device(array: Any) -> dict[Any, Any]:
    """The single-device arrays of an array."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def data_of(array: Any) -> Any:
    """The array itself, or the integers of random keys."""
    return jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _join(entry: Entry, shards: Sequence[Any]) -> Any:
    if not entry.is_key:
        return jax.make_array_from_single_device_arrays(entry.shape, entry.sharding, list(shards))
    # Keys are replicated, so a shard has the shape of the whole.
    return jax.random.wrap_key_data(
        jax.make_array_from_single_device_arrays(shards[0].shape, entry.sharding, list(shards))
    )


@cache
def _on_each(devices: tuple[Any, ...]) -> NamedSharding:
    """A copy on each of some devices."""
    return NamedSharding(Mesh(np.array(devices), ("copy",), axis_types=(AxisType.Auto,)), PartitionSpec())


def assemble(leaf: Leaf, box: Box, shards: Shards) -> np.ndarray:
    """A box of a leaf in host memory, from whatever shards hold parts of it."""
    found = {old.box: old for old in reversed(leaf.old) if old.primary}
    for old in found.values():
        if _intersection(old.box, box) == box:
            return np.asarray(shards(old))[slices(box, old.box)]
    out = np.empty([stop - start for start, stop in box], leaf.dtype)
    filled = 0
    for old in found.values():
        part = _intersection(old.box, box)
        if part is not None:
            out[slices(part, box)] = np.asarray(shards(old))[slices(part, old.box)]
            filled += volume(part)
    assert filled == volume(box), f"{leaf.name}: its shards hold {filled} of the {volume(box)} values of {box}"
    return out


def _for_device(array: np.ndarray, residue: int, leaf: Leaf) -> np.ndarray:
    """Host memory that a device copies.

    The CPU client would adopt aligned memory as the device's buffer. Such a buffer cannot be donated:
    the first step would hold the state twice. ``may_alias=False`` does not change that (tried).
    """
    if leaf.new[0].device.platform != "cpu":
        return np.ascontiguousarray(array)
    raw = np.empty(array.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT + residue
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def _free_residue(offsets: Sequence[int], itemsize: int) -> int | None:
    """Where memory may begin, modulo the alignment, so that nothing at these offsets in bytes is aligned."""
    taken = {-offset % _ALIGNMENT for offset in offsets}
    return next((r for r in range(itemsize, _ALIGNMENT, itemsize) if r not in taken), None)


def _around(boxes: Sequence[Box]) -> Box:
    """The box that holds them all."""
    return tuple((min(p for p, _ in dim), max(q for _, q in dim)) for dim in zip(*boxes, strict=True))


def _offset(box: Box, inside: Box) -> int:
    """Elements before the first of a box in the memory of another that holds it."""
    offset = 0
    for (start, _), (first, last) in zip(box, inside, strict=True):
        offset = offset * (last - first) + start - first
    return offset


def volume(box: Box) -> int:
    """Elements in a box."""
    return int(np.prod([stop - start for start, stop in box], dtype=np.int64))


def _intersection(a: Box, b: Box) -> Box | None:
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) or not volume(b) else None


def slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """Where a box is in an array of the whole leaf, or of another box."""
    starts = [0] * len(box) if inside is None else [start for start, _ in inside]
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(box, starts, strict=True))
