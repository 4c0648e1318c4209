"""How a training state is spread over stages, and how it becomes one plan-independent tree.

Each stage holds whole leaves, or the rows of a stacked leaf that its layers use. A leaf that several
stages use (tied embeddings) has a primary copy, which is the one that is updated and saved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena_jax.compiler.problem import FROZEN, PARAMS, STATE, Problem
from arena_jax.errors import CheckpointError
from arena_jax.runtime.links import Links, LocalLinks
from arena_jax.runtime.put import put
from arena_jax.runtime.update import Slot

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One array of the state: a leaf or rows of one, on one stage."""

    name: str
    slot: Slot
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    primary: bool
    num_rows: int | None = None

    @property
    def is_key(self) -> bool:
        return bool(jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def cut(self, whole: Any) -> Any:
        """This entry's rows of a whole leaf."""
        return whole if self.slot.start is None else whole[self.slot.start : self.slot.stop]


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Entries of one stage, aligned with the stage's variables."""

    params: tuple[Entry, ...]
    frozen: tuple[Entry, ...]
    state: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All entries of a training state under one plan."""

    stages: tuple[StageLayout, ...]
    optimizer: tuple[Entry, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        out: list[Entry] = []
        for stage in self.stages:
            out.extend((*stage.params, *stage.frozen, *stage.state))
        return (*out, *self.optimizer)


@dataclass
class StageState:
    """Arrays of one stage."""

    params: list[Any]
    frozen: list[Any]
    state: list[Any]


@dataclass
class State:
    """A training state: what ``program.step`` takes (and consumes) and returns.

    Attributes:
        step: number of steps done.
        stages: arrays by stage.
        optimizer: arrays of the optimizer state, aligned with ``Layout.optimizer``.
    """

    step: int
    stages: list[StageState]
    optimizer: list[Any]

    @property
    def arrays(self) -> list[Any]:
        out: list[Any] = []
        for stage in self.stages:
            out.extend((*stage.params, *stage.frozen, *stage.state))
        return [*out, *self.optimizer]


jax.tree_util.register_dataclass(StageState, ["params", "frozen", "state"], [])
jax.tree_util.register_dataclass(State, ["stages", "optimizer"], ["step"])


def to_tree(layout: Layout, state: State, links: Links | None = None) -> Tree:
    """Whole leaves by plan-independent name; leaves in pieces are joined on the host.

    Where stages are in several processes, the first gets everything, in host memory what comes from others;
    the others get an empty tree.
    """
    links = links or LocalLinks()
    pieces: dict[str, list[tuple[int, Any]]] = {}
    tree: Tree = {"step": np.asarray(state.step, np.int32)} if links.leads else {}
    for entry, array in zip(layout.entries, state.arrays, strict=True):
        if not entry.primary:
            continue
        assert entry.slot.stage is not None
        here = links.here(entry.slot.stage)
        value = jax.random.key_data(array) if entry.is_key and here else array
        struct = _saved_struct(entry)
        value = links.fetch(f"save {entry.name} {entry.slot.start}", value, entry.slot.stage, struct)
        if not links.leads:
            continue
        if not here:
            value = np.asarray(value)  # waits, so that one leaf is on its way at a time
        if entry.slot.start is None:
            tree[entry.name] = value
        else:
            pieces.setdefault(entry.name, []).append((entry.slot.start, value))
    for name, parts in pieces.items():
        tree[name] = np.concatenate([np.asarray(v) for _, v in sorted(parts, key=lambda part: part[0])])
    return tree


def _saved_struct(entry: Entry) -> jax.ShapeDtypeStruct:
    if not entry.is_key:
        return jax.ShapeDtypeStruct(entry.shape, entry.dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype)


def join_gradients(layout: Layout, sums: Sequence[Sequence[Any]], weight: np.ndarray) -> Tree:
    """Gradient sums by stage as whole mean gradients; what several stages use is added up."""
    found: dict[str, dict[int, Any]] = {}
    for stage, gradients in zip(layout.stages, sums, strict=True):
        for entry, gradient in zip(stage.params, gradients, strict=True):
            start = entry.slot.start or 0
            parts = found.setdefault(entry.name, {})
            parts[start] = gradient if start not in parts else np.asarray(parts[start]) + np.asarray(gradient)
    whole = {
        name: parts[0] if len(parts) == 1 else np.concatenate([np.asarray(parts[s]) for s in sorted(parts)])
        for name, parts in found.items()
    }
    return {name: value / value.dtype.type(weight) for name, value in whole.items()}


def abstract_tree(layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of :func:`to_tree`; with a sharding where the leaf is one array on one stage."""
    tree: dict[str, jax.ShapeDtypeStruct] = {"step": jax.ShapeDtypeStruct((), np.int32)}
    for entry in layout.entries:
        if not entry.primary:
            continue
        if entry.is_key:
            tree[entry.name] = _saved_struct(entry)
        elif entry.slot.start is None:
            tree[entry.name] = entry.struct
        else:
            assert entry.num_rows is not None
            tree[entry.name] = jax.ShapeDtypeStruct((entry.num_rows, *entry.shape[1:]), entry.dtype)
    return tree


def from_tree(layout: Layout, tree: Mapping[str, Any], links: Links | None = None) -> State:
    """Place a tree under a layout; the arrays given are neither donated nor aliased."""
    links = links or LocalLinks()
    entries = [e for e in layout.entries if e.slot.stage is None or links.here(e.slot.stage)]
    values = []
    for entry in entries:
        if entry.name not in tree:
            raise CheckpointError(
                f"the saved state has no {entry.name!r}", hint="it was written for another model or optimizer"
            )
        value = tree[entry.name]
        if entry.is_key:
            value = jax.random.wrap_key_data(jnp.asarray(np.asarray(value)))
        value = entry.cut(value)
        if tuple(value.shape) != entry.shape:
            raise CheckpointError(f"{entry.name}: saved shape {tuple(value.shape)}, the model has {entry.shape}")
        values.append(value)
    arrays = iter(own(entries, values))
    here = {id(entry) for entry in entries}
    spread = [next(arrays) if id(entry) in here else None for entry in layout.entries]
    return unflatten(layout, spread, int(np.asarray(tree["step"])))


def unflatten(layout: Layout, arrays: Sequence[Any], step: int) -> State:
    """Arrays in the order of ``layout.entries`` as a state; ``None`` for those in other processes."""
    values = iter(arrays)
    stages = [
        StageState(
            params=[next(values) for _ in stage.params],
            frozen=[next(values) for _ in stage.frozen],
            state=[next(values) for _ in stage.state],
        )
        for stage in layout.stages
    ]
    return State(step=step, stages=stages, optimizer=list(values))


def own(entries: Sequence[Entry], values: Sequence[Any]) -> list[Any]:
    """Copies of the values under their entries' shardings, which may be donated without harm.

    ``device_put`` may alias its source even across shardings, so the copies go through a program: one
    for each run of entries of a stage of at most ``_COPY_BYTES``, which bounds what exists twice.
    """
    out: list[Any] = [None] * len(entries)
    chunk: list[int] = []
    size = 0
    for i, entry in enumerate(entries):
        num_bytes = int(np.prod(entry.shape)) * 8
        if chunk and (size + num_bytes > _COPY_BYTES or entries[chunk[0]].slot.stage != entry.slot.stage):
            _copy_chunk(entries, values, chunk, out)
            chunk, size = [], 0
        chunk.append(i)
        size += num_bytes
    if chunk:
        _copy_chunk(entries, values, chunk, out)
    return out


_COPY_BYTES = 1 << 28


def _copy_chunk(entries: Sequence[Entry], values: Sequence[Any], chunk: Sequence[int], out: list[Any]) -> None:
    chosen = [entries[i] for i in chunk]
    sources = [
        values[i] if isinstance(values[i], jax.Array) or e.is_key else np.asarray(values[i], e.dtype)
        for i, e in zip(chunk, chosen, strict=True)
    ]
    placed = put(sources, [e.sharding for e in chosen])
    copies = jax.jit(_copy, out_shardings=[e.sharding for e in chosen])(placed)
    for i, copy in zip(chunk, copies, strict=True):
        out[i] = copy


def _copy(values: list[Any]) -> list[Any]:
    return [
        jax.random.wrap_key_data(jnp.copy(jax.random.key_data(v)))
        if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)
        else jnp.copy(v)
        for v in values
    ]


def leaf_names(problem: Problem) -> tuple[str, ...]:
    """Tree names of the model's leaves: ``params/...``, ``frozen/...``, ``state/...``."""
    prefix = {PARAMS: "params", FROZEN: "frozen", STATE: "state"}
    return tuple(f"{prefix[leaf.kind]}/{leaf.name}" for leaf in problem.leaves)
