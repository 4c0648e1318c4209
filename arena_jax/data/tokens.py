"""Samples from a token stream: windows for next-token prediction, masked windows for bert.

The stream is cut into blocks, and every so many blocks one is validation. Windows never cross a
block, so no token is in both splits, and both see all parts of the stream.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arena_jax.data.corpus import Corpus
from arena_jax.errors import DataError

Split = Literal["train", "validation"]
Batch = dict[str, NDArray[Any]]

_BLOCK_TOKENS = 8192


@dataclass(frozen=True)
class TokenWindows:
    """Windows of ``sequence_length`` tokens and the tokens that follow each of them.

    Args:
        corpus: the token stream.
        sequence_length: S.
        split: which part of the stream.
        validation_fraction: share of the blocks that is validation; 0 keeps everything for training.
        vocabulary: the model's; an id beyond it is an error that names the id.
    """

    corpus: Corpus
    sequence_length: int
    split: Split = "train"
    validation_fraction: float = 0.05
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < self.corpus.vocabulary:
            raise DataError(
                f"a vocabulary of {self.vocabulary} is too small for {self.corpus.origin}, "
                f"whose ids reach {self.corpus.vocabulary - 1}",
                hint=f"set model.vocabulary={self.corpus.vocabulary} or more",
            )
        if self.num_samples == 0:
            raise DataError(
                f"{self.corpus.origin} has {self.corpus.tokens.size} tokens: too short for a {self.split} "
                f"window of {self.sequence_length + 1}",
                hint="use more data, a shorter data.sequence_length, or another data.validation_fraction",
            )

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        return self.corpus.fingerprint

    @property
    def num_samples(self) -> int:
        """Windows in this split."""
        return self._num_blocks_of_split * self._windows_per_block

    def read(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return int32 ``tokens`` and ``targets``, each (len(ids), S); the epoch makes no difference."""
        windows = self.windows(ids)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    def windows(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the windows themselves, int32 (len(ids), S + 1)."""
        block = self._block_of_split(ids // self._windows_per_block)
        starts = block * self._block_size + ids % self._windows_per_block * self.sequence_length
        places = starts[:, None] + np.arange(self.sequence_length + 1)
        tokens = np.ascontiguousarray(self.corpus.tokens[places], dtype=np.int32)
        low, high = int(tokens.min()), int(tokens.max())
        limit = self.corpus.vocabulary if self.vocabulary is None else self.vocabulary
        if low < 0 or high >= limit:
            raise DataError(
                f"{self.corpus.origin} holds token {low if low < 0 else high} "
                f"in the window at {int(starts[0])}, outside a vocabulary of {limit}"
            )
        return tokens

    @property
    def _period(self) -> int:
        """One block in so many is validation; 0 when none is."""
        return max(2, round(1 / self.validation_fraction)) if self.validation_fraction else 0

    @property
    def _windows_per_block(self) -> int:
        # Small enough that even a short stream has a whole period of blocks, where that is possible.
        size = min(_BLOCK_TOKENS, self.corpus.tokens.size // max(1, self._period))
        return max(1, (size - 1) // self.sequence_length)

    @property
    def _block_size(self) -> int:
        return self._windows_per_block * self.sequence_length + 1

    @property
    def _num_blocks(self) -> int:
        return int(self.corpus.tokens.size) // self._block_size

    @property
    def _num_blocks_of_split(self) -> int:
        # A stream of fewer blocks than the period still gets its last block for validation.
        period = min(self._period, self._num_blocks)
        num_validation = self._num_blocks // period if period else 0
        return num_validation if self.split == "validation" else self._num_blocks - num_validation

    def _block_of_split(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        period = min(self._period, self._num_blocks)
        if not period:
            return number
        return number * period + period - 1 if self.split == "validation" else number + number // (period - 1)


@dataclass(frozen=True)
class MaskedWindows:
    """Windows with some tokens hidden, for masked language modelling.

    Of the chosen positions 80 % show the mask token, 10 % another token and 10 % the true one, as in
    the BERT paper. The choice depends on seed, sample and epoch only: a sample is masked anew in each
    epoch, and alike under every plan.

    Args:
        windows: where the tokens come from.
        mask_token: id shown for a hidden token; outside the data's own ids.
        mask_rate: share of positions to predict.
        seed: selects the masks.
    """

    windows: TokenWindows
    mask_token: int
    mask_rate: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        vocabulary = self.windows.vocabulary
        if vocabulary is not None and self.mask_token >= vocabulary:
            raise DataError(
                f"mask token {self.mask_token} is outside a vocabulary of {vocabulary}",
                hint=f"set model.vocabulary={self.mask_token + 1} or more",
            )

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        return self.windows.fingerprint

    @property
    def num_samples(self) -> int:
        """Windows in this split."""
        return self.windows.num_samples

    def read(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return int32 ``tokens`` and ``targets`` and float32 ``weights`` (1 where hidden), each (len(ids), S)."""
        targets = self.windows.windows(ids)[:, :-1]
        draws = np.stack([self._draw(int(i), int(e), targets.shape[1]) for i, e in zip(ids, epochs, strict=True)])
        chosen = draws[:, 0] < self.mask_rate
        tokens = np.where(chosen & (draws[:, 1] < 0.8), self.mask_token, targets)
        other = (draws[:, 2] * self.windows.corpus.vocabulary).astype(np.int32)
        tokens = np.where(chosen & (draws[:, 1] >= 0.9), other, tokens)
        return {"tokens": tokens.astype(np.int32), "targets": targets, "weights": chosen.astype(np.float32)}

    def _draw(self, sample: int, epoch: int, length: int) -> NDArray[np.float64]:
        bits = np.random.Philox(
            key=np.array([self.seed, sample], np.uint64), counter=np.array([0, 0, 0, epoch], np.uint64)
        )
        return np.random.Generator(bits).random((3, length))
