"""The training data of the kill test: the standard library's text, and a log of every sample drawn."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arena_jax import data

SEQUENCE_LENGTH = 32
ENV_LOG = "ARENA_JAX_SAMPLE_LOG"


def make(*, global_batch: int, seed: int, split: str) -> "LoggedLoader | None":
    """The loader of a split; there is no validation."""
    if split != "train":
        return None
    # A part so small that the run sees every sample more than once, and epochs end inside batches.
    whole = data.standard_library()
    corpus = data.Corpus(
        tokens=whole.tokens[:100_000], vocabulary=256, fingerprint="kill", origin="part of the library"
    )
    windows = data.TokenWindows(corpus, SEQUENCE_LENGTH, validation_fraction=0.0, vocabulary=256)
    return LoggedLoader(data.SampleLoader(windows, global_batch=global_batch, seed=seed))


class LoggedLoader:
    """Writes process, loader, sample numbers and epochs of each batch to the log before giving it out."""

    num_made = 0

    def __init__(self, inner: data.SampleLoader) -> None:
        self._inner = inner
        LoggedLoader.num_made += 1
        self._number = LoggedLoader.num_made

    @property
    def fingerprint(self) -> str:
        """Of the data behind it."""
        return self._inner.fingerprint

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ids, epochs = self._inner.sample_ids(self._inner.position)
        line = {"pid": os.getpid(), "loader": self._number, "ids": ids.tolist(), "epochs": epochs.tolist()}
        with Path(os.environ[ENV_LOG]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return next(self._inner)

    def get_state(self) -> dict[str, Any]:
        """The exact position."""
        return self._inner.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._inner.set_state(state)
