"""Moving a training state from one plan's layout to another's, leaf by leaf, consuming the old one.

Nothing is compiled for it, so a swap does not wait for a compiler. Each shard of the new state is found
by its box (start and stop of each dim, in the whole leaf):

- the same box is on the same device: its buffer is kept, nothing is copied;
- it is on another device: copied from device to device;
- it must be cut from or pieced together of other boxes: done in host memory.

A leaf's old shards are dropped as soon as its new ones are there, in the order of :mod:`.move_order`.
If anything fails on the way, what has moved is moved back: the state is as it was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from arena_jax.errors import StateLostError
from arena_jax.runtime.layout import Entry, Layout, State, unflatten
from arena_jax.runtime.move_order import Batch, LeafBytes, Order, budget, order_moves

Box = tuple[tuple[int, int], ...]
"""Start and stop of each dim."""

# Below this many bytes a copy over the host is faster on CPU devices than jax's between two of them.
_SMALL_BYTES = 1 << 16
# XLA's CPU client adopts host memory that is aligned to this, instead of copying it.
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a move did.

    Attributes:
        seconds: it took.
        written_bytes: bytes of new buffers, all devices together.
        kept_bytes: bytes whose buffers stayed.
        parked_bytes: bytes that waited in host memory for room.
        peak_bytes: by device id, the most of the state that it held at once, as planned.
    """

    seconds: float
    written_bytes: int
    kept_bytes: int
    parked_bytes: int
    peak_bytes: Mapping[int, int]


@dataclass(frozen=True)
class _Place:
    """One shard: of which entry, on which device, and its box in the whole leaf."""

    entry: int
    device: Any
    box: Box
    primary: bool


@dataclass(frozen=True)
class _Leaf:
    """Where a leaf is and where it is to be; ``shape`` is that of its array data, whole."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    old: tuple[_Place, ...]
    new: tuple[_Place, ...]

    @cached_property
    def same(self) -> tuple[_Place | None, ...]:
        """For each new shard an old one with its box, on its own device if there is one."""
        found: dict[Box, dict[Any, _Place]] = {}
        for old in self.old:
            found.setdefault(old.box, {})[old.device] = old
        return tuple(
            None if not (at := found.get(new.box)) else at.get(new.device) or next(iter(at.values()))
            for new in self.new
        )

    def num_bytes(self, box: Box) -> int:
        return _volume(box) * int(np.dtype(self.dtype).itemsize)


class Move:
    """A move between two layouts of one problem; planned once, off the critical path.

    Args:
        allowed: bytes that each device (by id) may hold, by default the larger of its old and new state
            and its two largest leaves. For tests.
    """

    def __init__(self, source: Layout, target: Layout, *, allowed: Mapping[int, int] | None = None) -> None:
        self._source, self._target = source, target
        self._leaves = _leaves(source, target)
        sizes = [_bytes_of(leaf) for leaf in self._leaves]
        self.allowed = dict(budget(sizes) if allowed is None else allowed)
        self.order: Order = order_moves(sizes, self.allowed)
        self._kept = sum(sum(s.kept.values()) for s in sizes)
        self._written = sum(sum(s.new.values()) for s in sizes) - self._kept

    def run(self, state: State, *, watch: Callable[[], None] | None = None) -> tuple[State, Moved]:
        """Move ``state``, which is used up; after an exception it is as it was.

        Args:
            watch: called whenever a batch's old and new buffers both exist. For tests.
        """
        began_s = time.perf_counter()
        step, old = state.step, dict(enumerate(state.arrays))
        new: dict[int, Any] = {}
        parked: dict[int, np.ndarray] = {}
        state.stages, state.optimizer = [], []  # so that what has moved is freed
        done: list[Batch] = []
        try:
            for batch in self.order.batches:
                _handle(batch, self._leaves, old, new, parked, self._target.entries, watch)
                done.append(batch)
        except BaseException as error:
            try:
                self._back(done, old, new, parked)
            except Exception as second:
                raise StateLostError(
                    f"the state could not be moved ({type(error).__name__}: {error}), nor back "
                    f"({type(second).__name__}: {second})",
                    hint="resume from the last checkpoint",
                ) from second
            whole = unflatten(self._source, [old[i] for i in range(len(self._source.entries))], step)
            state.stages, state.optimizer = whole.stages, whole.optimizer
            raise
        moved = Moved(
            seconds=time.perf_counter() - began_s,
            written_bytes=self._written,
            kept_bytes=self._kept,
            parked_bytes=sum(a.nbytes for a in parked.values()),
            peak_bytes=dict(self.order.peak),
        )
        return unflatten(self._target, [new[i] for i in range(len(self._target.entries))], step), moved

    def _back(
        self, done: Sequence[Batch], old: dict[int, Any], new: dict[int, Any], parked: dict[int, np.ndarray]
    ) -> None:
        """Undo batches, the last first."""
        turned = [_Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.new, leaf.old) for leaf in self._leaves]
        for batch in reversed(done):
            kind = {"move": "move", "park": "place", "place": "park"}[batch.kind]
            undo = Batch(kind=kind, leaves=batch.leaves)  # type: ignore[arg-type]
            _handle(undo, turned, new, old, parked, self._source.entries, None)


def _handle(
    batch: Batch,
    leaves: Sequence[_Leaf],
    old: dict[int, Any],
    new: dict[int, Any],
    parked: dict[int, np.ndarray],
    target: Sequence[Entry],
    watch: Callable[[], None] | None,
) -> None:
    """Carry out one batch; on return its old arrays are gone from ``old``, its new ones are in ``new``."""
    chosen = [leaves[i] for i in batch.leaves]
    if batch.kind == "park":
        for i, leaf in zip(batch.leaves, chosen, strict=True):
            if i not in parked:
                parked[i] = _assemble(leaf, _whole(leaf), _Shards(old))
            _drop(leaf, old)
        return
    made = _transfer(chosen, [parked.get(i) for i in batch.leaves] if batch.kind == "place" else None, old, target)
    jax.block_until_ready(list(made.values()))
    new.update(made)
    if watch is not None:
        watch()
    if batch.kind == "move":
        for leaf in chosen:
            _drop(leaf, old)


def _drop(leaf: _Leaf, arrays: dict[int, Any]) -> None:
    for number in {place.entry for place in leaf.old}:
        arrays.pop(number, None)


class _Shards:
    """Single-device arrays of the state, found by entry and device."""

    def __init__(self, arrays: Mapping[int, Any]) -> None:
        self._arrays = arrays
        self._found: dict[int, dict[Any, Any]] = {}

    def __call__(self, place: _Place) -> Any:
        if place.entry not in self._found:
            array = _data(self._arrays[place.entry])
            self._found[place.entry] = {s.device: s.data for s in array.addressable_shards}
        return self._found[place.entry][place.device]


def _transfer(
    leaves: Sequence[_Leaf], parked: Sequence[np.ndarray | None] | None, old: Mapping[int, Any], target: Sequence[Entry]
) -> dict[int, Any]:
    """New arrays of some leaves by entry; all copies are issued in one call."""
    shards = _Shards(old)
    sources: list[Any] = []
    devices: list[Any] = []
    pieces: dict[int, list[Any]] = {}
    waiting: list[tuple[int, int, int]] = []  # entry, position in its pieces, position in the sources
    for k, leaf in enumerate(leaves):
        cut: dict[Box, np.ndarray] = {}
        for place, same in zip(leaf.new, leaf.same, strict=True):
            row = pieces.setdefault(place.entry, [])
            source = None if parked is not None else same
            if source is not None and source.device == place.device:
                row.append(shards(source))
                continue
            value: Any
            if source is not None and not _by_host(place.device, leaf, place.box):
                value = shards(source)
            else:
                if place.box not in cut:
                    whole = None if parked is None else parked[k]
                    cut[place.box] = _unaligned(
                        _assemble(leaf, place.box, shards) if whole is None else whole[_slices(place.box)],
                        copy=place.device.platform == "cpu",
                    )
                value = cut[place.box]
            waiting.append((place.entry, len(row), len(sources)))
            row.append(None)
            sources.append(value)
            devices.append(place.device)
    copies = jax.device_put(sources, devices) if sources else []
    for entry, position, at in waiting:
        pieces[entry][position] = copies[at]
    return {number: _join(target[number], row) for number, row in pieces.items()}


def _join(entry: Entry, shards: Sequence[Any]) -> Any:
    if not entry.is_key:
        return jax.make_array_from_single_device_arrays(entry.shape, entry.sharding, list(shards))
    # Keys are replicated, so a shard has the shape of the whole.
    return jax.random.wrap_key_data(
        jax.make_array_from_single_device_arrays(shards[0].shape, entry.sharding, list(shards))
    )


def _by_host(device: Any, leaf: _Leaf, box: Box) -> bool:
    return device.platform == "cpu" and leaf.num_bytes(box) < _SMALL_BYTES


def _assemble(leaf: _Leaf, box: Box, shards: _Shards) -> np.ndarray:
    """A box of a leaf in host memory, from whatever shards hold parts of it."""
    found = {old.box: old for old in reversed(leaf.old) if old.primary}
    for old in found.values():
        if _intersection(old.box, box) == box:
            return np.asarray(shards(old))[_slices(box, old.box)]
    out = np.empty([stop - start for start, stop in box], leaf.dtype)
    filled = 0
    for old in found.values():
        part = _intersection(old.box, box)
        if part is not None:
            out[_slices(part, box)] = np.asarray(shards(old))[_slices(part, old.box)]
            filled += _volume(part)
    assert filled == _volume(box), f"{leaf.name}: its shards hold {filled} of the {_volume(box)} values of {box}"
    return out


def _unaligned(array: np.ndarray, *, copy: bool) -> np.ndarray:
    """Host memory that a device copies.

    The CPU client would adopt aligned memory as the device's buffer. Such a buffer cannot be donated:
    the first step would hold the state twice. ``may_alias=False`` does not change that (tried).
    """
    if not copy:
        return np.ascontiguousarray(array)
    raw = np.empty(array.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT + max(array.itemsize, 1)
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def _leaves(source: Layout, target: Layout) -> list[_Leaf]:
    old, new = _by_name(source), _by_name(target)
    assert old.keys() == new.keys(), "two layouts of one problem have the same leaves"
    old_entries, new_entries = source.entries, target.entries
    leaves = []
    for name, numbers in new.items():
        entry = new_entries[numbers[0]]
        dtype, shape = _data_type(entry)
        whole = (entry.num_rows, *shape[1:]) if entry.num_rows is not None else shape
        leaves.append(
            _Leaf(name, dtype, whole, tuple(_places(old_entries, old[name])), tuple(_places(new_entries, numbers)))
        )
    return leaves


def _by_name(layout: Layout) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(layout.entries):
        found.setdefault(entry.name, []).append(number)
    return found


def _places(entries: Sequence[Entry], numbers: Sequence[int]) -> list[_Place]:
    places = []
    for number in numbers:
        entry = entries[number]
        _, shape = _data_type(entry)
        start = entry.slot.start or 0
        for device, index in entry.sharding.devices_indices_map(shape).items():
            box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            if entry.slot.start is not None:
                box = ((box[0][0] + start, box[0][1] + start), *box[1:])
            places.append(_Place(number, device, box, entry.primary))
    return places


def _data_type(entry: Entry) -> tuple[Any, tuple[int, ...]]:
    """Dtype and shape of an entry's array data; random keys are arrays of integers."""
    if not entry.is_key:
        return np.dtype(entry.dtype), entry.shape
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    return data.dtype, data.shape


def _data(array: Any) -> Any:
    return jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _bytes_of(leaf: _Leaf) -> LeafBytes:
    old, new, kept = ({}, {}, {})  # type: tuple[dict[int, int], dict[int, int], dict[int, int]]
    for places, sums in ((leaf.old, old), (leaf.new, new)):
        for place in places:
            sums[place.device.id] = sums.get(place.device.id, 0) + leaf.num_bytes(place.box)
    for place, source in zip(leaf.new, leaf.same, strict=True):
        if source is not None and source.device == place.device:
            kept[place.device.id] = kept.get(place.device.id, 0) + leaf.num_bytes(place.box)
    return LeafBytes(old=old, new=new, kept=kept)


def _whole(leaf: _Leaf) -> Box:
    return tuple((0, size) for size in leaf.shape)


def _volume(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box], dtype=np.int64))


def _intersection(a: Box, b: Box) -> Box | None:
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) or not _volume(b) else None


def _slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    starts = [0] * len(box) if inside is None else [start for start, _ in inside]
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(box, starts, strict=True))
