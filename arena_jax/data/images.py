"""Image samples: the handwritten digits that scikit-learn ships, and shapes without data."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arena_jax.data.order import permute
from arena_jax.errors import DataError

NUM_DIGIT_CLASSES = 10
DIGIT_SIZE = 8


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits of 8 x 8 pixels.

    Args:
        split: the validation samples are a fixed random choice, the same under every seed.
        validation_fraction: share of the samples that is validation.
    """

    split: Literal["train", "validation"] = "train"
    validation_fraction: float = 0.2

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        # Imported here: scikit-learn takes a second, and only this source needs it.
        from sklearn.datasets import load_digits

        bunch: Any = load_digits()
        images = (bunch.images / 16.0).astype(np.float32)[..., None]
        return images, bunch.target.astype(np.int32)

    @cached_property
    def _members(self) -> NDArray[np.int64]:
        num_samples = len(self._arrays[1])
        order = permute(np.arange(num_samples), num_samples=num_samples, seed=0, epoch=0)
        num_validation = round(num_samples * self.validation_fraction)
        members = order[:num_validation] if self.split == "validation" else order[num_validation:]
        if not members.size:
            raise DataError(f"a validation fraction of {self.validation_fraction} leaves no {self.split} digits")
        return np.sort(members)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the content."""
        digest = hashlib.blake2b(digest_size=16)
        for array in self._arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def num_samples(self) -> int:
        """Images in this split."""
        return len(self._members)

    def read(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return float32 ``images`` (N, 8, 8, 1) in 0 to 1, and int32 ``labels`` (N,)."""
        images, labels = self._arrays
        rows = self._members[ids]
        return {"images": images[rows], "labels": labels[rows]}


@dataclass(frozen=True)
class Shapes:
    """Shapes to plan with, where no data of that shape is at hand; reading it is an error."""

    reason: str = "this recipe is for planning: its data is a shape"
    split: Literal["train", "validation"] = "train"

    fingerprint = "shapes"
    num_samples = 1 << 40

    def read(self, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Raise :class:`DataError`."""
        raise DataError(self.reason, hint="name data of your own with data.kind=function data.function=FILE.py:NAME")
