"""Moving a training state from one plan's layout to another's, leaf by leaf, consuming the old one.

Nothing is compiled for it, so a swap does not wait for a compiler; :mod:`.leaf_copies` says which copies are made.
A leaf's old shards are dropped as soon as its new ones are there, in the order of :mod:`.move_order`.
If anything fails on the way, what has moved is moved back: the state is as it was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from arena_jax.errors import StateLostError
from arena_jax.runtime.layout import Entry, Layout, State, unflatten
from arena_jax.runtime.leaf_copies import Leaf, Place, Shards, assemble, transfer
from arena_jax.runtime.move_order import Batch, LeafBytes, Order, budget, order_moves


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
        for leaf in self._leaves:  # found now, for when the move runs the training stands still
            _ = leaf.moved
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
                _handle(batch, self._leaves, old, new, parked, watch)
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
        turned = _leaves(self._target, self._source)
        for batch in reversed(done):
            kind = {"move": "move", "park": "place", "place": "park"}[batch.kind]
            undo = Batch(kind=kind, leaves=batch.leaves)  # type: ignore[arg-type]
            _handle(undo, turned, new, old, parked, None)


def _handle(
    batch: Batch,
    leaves: Sequence[Leaf],
    old: dict[int, Any],
    new: dict[int, Any],
    parked: dict[int, np.ndarray],
    watch: Callable[[], None] | None,
) -> None:
    """Carry out one batch; on return its old arrays are gone from ``old``, its new ones are in ``new``."""
    chosen = [leaves[i] for i in batch.leaves]
    if batch.kind == "park":
        for i, leaf in zip(batch.leaves, chosen, strict=True):
            if i not in parked:
                parked[i] = np.array(assemble(leaf, leaf.whole, Shards(old)))
            _drop(leaf, old)
        return
    made = transfer(chosen, [parked.get(i) for i in batch.leaves] if batch.kind == "place" else None, old)
    jax.block_until_ready(list(made.values()))
    new.update(made)
    if watch is not None:
        watch()
    if batch.kind == "move":
        for leaf in chosen:
            _drop(leaf, old)


def _drop(leaf: Leaf, arrays: dict[int, Any]) -> None:
    for number in {place.entry for place in leaf.old}:
        arrays.pop(number, None)


def _leaves(source: Layout, target: Layout) -> list[Leaf]:
    old, new = _by_name(source), _by_name(target)
    assert old.keys() == new.keys(), "two layouts of one problem have the same leaves"
    old_entries, new_entries = source.entries, target.entries
    leaves = []
    for name, numbers in new.items():
        entry = new_entries[numbers[0]]
        dtype, shape = _data_type(entry)
        whole = (entry.num_rows, *shape[1:]) if entry.num_rows is not None else shape
        leaves.append(
            Leaf(
                name,
                dtype,
                whole,
                tuple(_places(old_entries, old[name])),
                tuple(_places(new_entries, numbers)),
                {number: new_entries[number] for number in numbers},
            )
        )
    return leaves


def _by_name(layout: Layout) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(layout.entries):
        found.setdefault(entry.name, []).append(number)
    return found


def _places(entries: Sequence[Entry], numbers: Sequence[int]) -> list[Place]:
    places = []
    for number in numbers:
        entry = entries[number]
        _, shape = _data_type(entry)
        start = entry.slot.start or 0
        for device, index in entry.sharding.devices_indices_map(shape).items():
            box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            if entry.slot.start is not None:
                box = ((box[0][0] + start, box[0][1] + start), *box[1:])
            places.append(Place(number, device, box, entry.primary))
    return places


def _data_type(entry: Entry) -> tuple[Any, tuple[int, ...]]:
    """Dtype and shape of an entry's array data; random keys are arrays of integers."""
    if not entry.is_key:
        return np.dtype(entry.dtype), entry.shape
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    return data.dtype, data.shape


def _bytes_of(leaf: Leaf) -> LeafBytes:
    old, new, kept = ({}, {}, {})  # type: tuple[dict[int, int], dict[int, int], dict[int, int]]
    for places, sums in ((leaf.old, old), (leaf.new, new)):
        for place in places:
            sums[place.device.id] = sums.get(place.device.id, 0) + leaf.num_bytes(place.box)
    for place, source in zip(leaf.new, leaf.same, strict=True):
        if source is not None and source.device == place.device:
            kept[place.device.id] = kept.get(place.device.id, 0) + leaf.num_bytes(place.box)
    return LeafBytes(old=old, new=new, kept=kept)
