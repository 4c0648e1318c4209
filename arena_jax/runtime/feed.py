"""The loader as the training loop sees it: batches, one look ahead, and an exact position."""

from typing import Any, Protocol

import jax
import numpy as np

from arena_jax.errors import DataError


class Positioned(Protocol):
    """An iterator of global batches that knows where it is."""

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Feed:
    """Draws batches from a loader and insists that they all look alike.

    A batch of another structure or shape would silently compile another step (or fail deep inside
    one), and a changed batch size would change what a step means.
    """

    def __init__(self, loader: Positioned) -> None:
        self._loader = loader
        self._ahead: list[tuple[Any, Any]] = []
        self._kind: Any = None
        self._rows: np.ndarray | None = None

    @property
    def fingerprint(self) -> str | None:
        """Hash of the data where the loader gives one."""
        return getattr(self._loader, "fingerprint", None) or None

    def keep_rows(self, rows: np.ndarray | None) -> None:
        """Let :meth:`next` give these rows of the global batch only; ``None`` for all.

        A loader that can read some rows (``next_rows``) never reads the others.
        """
        self._rows = rows

    def peek(self) -> Any:
        """The next batch, which :meth:`next` will give again.

        Raises:
            DataError: the data is empty.
        """
        if not self._ahead:
            position = self._loader.get_state()
            try:
                self._ahead = [(position, next(self._loader))]
            except StopIteration:
                raise DataError("the data yields no batch", hint="check what the loader was given") from None
        return self._ahead[0][1]

    def next(self) -> Any:
        """The next batch; raises ``StopIteration`` at the end of the data."""
        batch = self._ahead.pop()[1] if self._ahead else None
        if batch is None and self._rows is not None and hasattr(self._loader, "next_rows"):
            batch = self._loader.next_rows(self._rows)
        else:
            batch = next(self._loader) if batch is None else batch
            if self._rows is not None:
                batch = jax.tree.map(lambda leaf: leaf[self._rows] if np.ndim(leaf) else leaf, batch)
        kind = _kind(batch)
        if self._kind is None:
            self._kind = kind
        if kind != self._kind:
            raise DataError(
                f"a batch changed its form: {_describe(kind)} after {_describe(self._kind)}",
                hint="every training batch must have the same arrays with the same shapes; drop the ragged last one",
            )
        return batch

    def position(self) -> Any:
        """Where the next batch comes from, as JSON values."""
        return self._ahead[0][0] if self._ahead else self._loader.get_state()

    def go_to(self, position: Any) -> None:
        """Continue from what :meth:`position` gave; the loader raises :class:`DataError` when it cannot."""
        self._ahead = []
        self._loader.set_state(position)


def _kind(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__))) for leaf in leaves)


def _describe(kind: Any) -> str:
    structure, leaves = kind
    arrays = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in leaves)
    return f"{structure} of {arrays}"
