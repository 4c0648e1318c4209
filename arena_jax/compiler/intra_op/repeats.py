"""Find repeated layers in a list of operations.

A model's layers are runs of equal operations that follow each other: a *tandem repeat*. Operations at
the same place of a repeat form a class; what is decided for one is decided for all (
decisions are shared, which is what makes a 48-layer program as small as one of a handful of layers).
"""

from collections.abc import Sequence

import numpy as np

# Shorter runs are not worth sharing decisions for.
_LEAST_OPS = 8


def classes_of(signatures: Sequence[int]) -> list[int]:
    """A class number per operation; those at the same place of a tandem repeat share one.

    The repeat that covers most operations is taken first (of several periods the shortest), then what
    stands before and behind it is searched again.
    """
    found = np.arange(len(signatures))
    text = np.asarray(signatures)
    pending = [(0, len(text))]
    while pending:
        start, stop = pending.pop()
        repeat = _longest(text[start:stop])
        if repeat is None:
            continue
        first, period, count = repeat
        first += start
        for i in range(1, count):
            found[first + i * period : first + (i + 1) * period] = found[first : first + period]
        pending += [(start, first), (first + count * period, stop)]
    return [int(c) for c in found]


def _longest(text: np.ndarray) -> tuple[int, int, int] | None:
    """``(first, period, count)`` of the tandem repeat that covers most of ``text``."""
    best: tuple[int, int, int] | None = None
    covered = 0
    for period in range(_LEAST_OPS, len(text) // 2 + 1):
        if len(text) <= covered:
            break
        first, run = _longest_run(text[period:] == text[:-period])
        count = (run + period) // period
        if count >= 2 and count * period > covered:
            best, covered = (first, period, count), count * period
    return best


def _longest_run(equal: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of ``True``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    if edges.size == 0:
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(starts[longest]), int(lengths[longest])
