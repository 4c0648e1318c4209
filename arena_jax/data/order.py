"""The global sample order: a pseudo-random permutation per epoch that is never written down.

A Feistel network permutes the integers below a power of four; walking its cycles restricts it to any
``n``. Element ``i`` of the order costs a few hashes wherever it lies, so a position in the data is one
integer, resuming is exact and instant, and no plan or device count can change which sample comes next.
"""

import numpy as np
from numpy.typing import NDArray

from arena_jax.errors import DataError

_NUM_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def permute(indices: NDArray[np.int64], *, num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map places in an epoch to sample numbers, a bijection of ``range(num_samples)``.

    Args:
        indices: places in the epoch, each in ``range(num_samples)``.
        num_samples: size of the data, at least 1.
        seed, epoch: together they select the permutation.
    """
    if num_samples < 1:
        raise DataError(f"an order needs at least one sample, got {num_samples}")
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_mix_int((seed * 0x2545F4914F6CDD1D + epoch * _GOLDEN + r + 1) & _WORD) for r in range(_NUM_ROUNDS)]
    values = np.asarray(indices, dtype=np.uint64)
    if values.size and int(values.max()) >= num_samples:
        raise DataError(f"place {int(values.max())} is outside an epoch of {num_samples} samples")
    values = _feistel(values, half_bits, keys)
    # The domain is less than four times num_samples, so a walk takes a few steps on average.
    outside = values >= num_samples
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= num_samples
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, on arrays; multiplication wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    return int(_mix(np.asarray([x], dtype=np.uint64))[0])
