"""What operations cost, hardware left open, as vectors that add up.

A work vector counts what one device does for all rows of the global batch: FLOPs by dtype, bytes
through memory, operations, bytes kept for the backward pass, and bytes and numbers of collectives by
mesh axis, kind and phase. Prices turn it into seconds. Everything is linear, so that work of layers,
repeated layers and iterations of a scan is a weighted sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")
AXES = ("dp", "tp")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# A collective runs in every forward pass, in every backward pass, for gradients of parameters, or to bring parameters
# to where a microbatch's passes read them. The last two are as large whatever the rows.
FORWARD, BACKWARD, GRADIENT, PARAMETER = "forward", "backward", "gradient", "parameter"
PHASES = (FORWARD, BACKWARD, GRADIENT, PARAMETER)

MOVED = len(DTYPES)
NUM_OPS = MOVED + 1
SAVED = MOVED + 2
_COLLECTIVES = MOVED + 3
SIZE = _COLLECTIVES + 2 * len(AXES) * len(KINDS) * len(PHASES)


def empty(*lead: int) -> Floats:
    """Work vectors of nothing, of shape ``(*lead, SIZE)``."""
    return np.zeros((*lead, SIZE))


def flops_at(dtype: str) -> int:
    """Where FLOPs of a dtype are counted; what has no rate of its own counts as float32."""
    return DTYPES.index(dtype) if dtype in DTYPES else 0


def collective_at(axis: str, kind: str, phase: str) -> int:
    """Where a collective's bytes are counted; its number stands behind them."""
    return _COLLECTIVES + 2 * ((AXES.index(axis) * len(KINDS) + KINDS.index(kind)) * len(PHASES) + PHASES.index(phase))


@dataclass(frozen=True)
class Collective:
    """Collectives of one sort in a work vector: bytes one device holds in all, and how many there are."""

    axis: str
    kind: str
    phase: str
    num_bytes: float
    count: float


def collectives(work: Floats) -> Iterator[Collective]:
    """The collectives of one work vector that occur."""
    for axis in AXES:
        for kind in KINDS:
            for phase in PHASES:
                at = collective_at(axis, kind, phase)
                if work[at + 1]:
                    yield Collective(axis, kind, phase, float(work[at]), float(work[at + 1]))


def add_collective(work: Floats, axis: str, kind: str, phase: str, num_bytes: float, count: float = 1.0) -> None:
    at = collective_at(axis, kind, phase)
    work[at] += num_bytes
    work[at + 1] += count


def flops(work: Floats) -> Floats:
    """FLOPs of all dtypes together, over the last dim."""
    return work[..., : len(DTYPES)].sum(axis=-1)
