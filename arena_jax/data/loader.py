"""Loaders: global batches with an exact position."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from arena_jax.data.order import permute
from arena_jax.errors import DataError


@runtime_checkable
class Source(Protocol):
    """Samples that can be read by number."""

    @property
    def num_samples(self) -> int:
        """How many there are."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""

    def read(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the samples as arrays whose leading dim is ``len(ids)``; ``epochs`` has one entry per id."""


@runtime_checkable
class Loader(Protocol):
    """What a training loop needs of its data.

    ``get_state`` gives JSON values; after ``set_state`` of them the next batch is the one that would
    have come next.
    """

    @property
    def fingerprint(self) -> str:
        """Hash of the data's content, or an empty string where there is none."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


class SampleLoader:
    """Endless global batches from a source, reshuffled each epoch.

    The position counts *samples*, not batches, so it survives a change of the batch size; a batch may
    straddle two epochs.

    Args:
        source: the samples.
        global_batch: samples per batch.
        seed: selects the order.
    """

    def __init__(self, source: Source, *, global_batch: int, seed: int) -> None:
        if global_batch < 1:
            raise DataError(f"a global batch of {global_batch} holds nothing")
        if source.num_samples < global_batch:
            raise DataError(
                f"the data has {source.num_samples} samples, fewer than a global batch of {global_batch}",
                hint=f"use a global batch of at most {source.num_samples}, or more data",
            )
        self.source = source
        self.global_batch = global_batch
        self.seed = seed
        self.position = 0

    @property
    def fingerprint(self) -> str:
        """Hash of the data's content."""
        return self.source.fingerprint

    def sample_ids(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (sample numbers, epochs) of the batch that starts at ``position``."""
        num_samples = self.source.num_samples
        places = np.arange(position, position + self.global_batch, dtype=np.int64)
        epochs = places // num_samples
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            ids[rows] = permute(
                places[rows] - epoch * num_samples, num_samples=num_samples, seed=self.seed, epoch=int(epoch)
            )
        return ids, epochs

    def __iter__(self) -> "SampleLoader":
        return self

    def __next__(self) -> dict[str, NDArray[Any]]:
        batch = self.source.read(*self.sample_ids(self.position))
        self.position += self.global_batch
        return batch

    def next_rows(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The given rows of the next batch, reading no others; the position moves on by a whole batch."""
        ids, epochs = self.sample_ids(self.position)
        batch = self.source.read(ids[rows], epochs[rows])
        self.position += self.global_batch
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position, and what it is a position in."""
        return {
            "position": self.position,
            "seed": self.seed,
            "num_samples": self.source.num_samples,
            "fingerprint": self.fingerprint,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raise :class:`DataError` when it belongs to other data."""
        mine = self.get_state()
        missing = sorted(mine.keys() - state.keys())
        if missing:
            raise DataError(f"a data position without {', '.join(missing)}: {dict(state)}")
        for key, what in (("fingerprint", "content"), ("num_samples", "number of samples"), ("seed", "seed")):
            if state[key] != mine[key]:
                raise DataError(
                    f"the checkpoint was made with other data: {what} {state[key]!r}, now {mine[key]!r}",
                    hint="resume with the data and seed of the first run, or start anew with --resume never",
                )
        self.position = int(state["position"])


class EvalBatches:
    """A source once through in its own order; the last batch may be ragged.

    Args:
        source: the samples.
        global_batch: samples per batch, but for the last.
        num_batches: stop after so many; ``None`` reads everything. Fewer are spread over the source.
    """

    def __init__(self, source: Source, *, global_batch: int, num_batches: int | None = None) -> None:
        self.source = source
        self.global_batch = global_batch
        available = -(-source.num_samples // global_batch)
        self.num_batches = available if num_batches is None else min(num_batches, available)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        num_samples, size = self.source.num_samples, self.global_batch
        stride = max(1, (num_samples // size) // self.num_batches) if self.num_batches else 1
        for number in range(self.num_batches):
            start = number * stride * size
            ids = np.arange(start, min(start + size, num_samples), dtype=np.int64)
            yield self.source.read(ids, np.zeros_like(ids))


class SequenceLoader:
    """A list of ready batches, over and over; its position is a number, so it resumes exactly."""

    fingerprint = ""

    def __init__(self, batches: Sequence[Any]) -> None:
        if not len(batches):
            raise DataError("the data is an empty sequence of batches")
        self.batches = batches
        self.position = 0

    def __iter__(self) -> "SequenceLoader":
        return self

    def __next__(self) -> Any:
        batch = self.batches[self.position % len(self.batches)]
        self.position += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the number of batches given out, and how many there are."""
        return {"position": self.position, "num_batches": len(self.batches)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state['position']`` batches."""
        if state.get("num_batches") != len(self.batches):
            raise DataError(
                f"the checkpoint's data had {state.get('num_batches')} batches, this has {len(self.batches)}"
            )
        self.position = int(state["position"])


class IterableLoader:
    """Any iterable of batches, such as a grain iterator; its own position passes through.

    The position is kept by the iterator, or by the object it came from. Where neither has ``get_state``
    and ``set_state`` the data trains but cannot be resumed: skipping batches to catch up would hide
    that their order may have changed.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._iterator = iter(iterable)
        self._num_given = 0

    @property
    def fingerprint(self) -> str:
        """The iterable's own fingerprint, or an empty string."""
        return str(getattr(self._iterable, "fingerprint", ""))

    def __iter__(self) -> "IterableLoader":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._num_given:
                raise
            raise DataError("the data yields no batch") from None
        self._num_given += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the owner's state as JSON values (bytes wrapped in base64) and the number of batches given."""
        keeper = self._keeper()
        if keeper is None:
            return {"num_given": self._num_given}
        state = keeper.get_state()
        if isinstance(state, bytes):
            state = {"base64": base64.b64encode(state).decode()}
        return {"num_given": self._num_given, "iterator": state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Hand the state back to whoever keeps it, or raise :class:`DataError` where nobody does."""
        keeper = self._keeper()
        if keeper is None or "iterator" not in state:
            if state.get("num_given") == self._num_given:
                return
            raise DataError(
                f"{type(self._iterable).__name__} cannot be resumed: it has no get_state and set_state",
                hint="use a grain iterator, a list of batches, or resume='never'",
            )
        inner = state["iterator"]
        if isinstance(inner, Mapping) and set(inner) == {"base64"}:
            inner = base64.b64decode(inner["base64"])
        keeper.set_state(inner)
        if keeper is not self._iterator:
            self._iterator = iter(self._iterable)
        self._num_given = int(state["num_given"])

    def _keeper(self) -> Any:
        for owner in (self._iterator, self._iterable):
            if hasattr(owner, "get_state") and hasattr(owner, "set_state"):
                return owner
        return None


def as_loader(data: Any) -> Loader:
    """Return ``data`` as a loader: a loader as it is, a sequence or any other iterable wrapped."""
    if isinstance(data, SampleLoader | SequenceLoader | IterableLoader):
        return data
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return SequenceLoader(data)
    if isinstance(data, Iterable):
        return IterableLoader(data)
    raise DataError(f"data must be an iterable of batches, got {type(data).__name__}")
