"""May every data-parallel shard compute the gradients of its own rows, for one reduction a step?

XLA reduces a gradient over dp where it is made: once a microbatch, for it moves no reduction out of a loop,
and a pipeline runs a program a microbatch. Where the loss does not couple samples, the rows of a microbatch can
be split over dp as the rows of a batch are split into microbatches: each shard sums its own gradients, and the
sums are reduced once. The runtime does so (``runtime/row_shards.py``) and the cost model counts so.
"""

from collections.abc import Iterator
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.coupling import couples_samples
from arena_jax.compiler.trace import LAST, Trace

# What cannot be split by rows from outside, or costs more when it is: kernels, other meshes, branches.
_WHOLE = frozenset(
    {"shard_map", "pallas_call", "ffi_call", "custom_partitioning", "cond", "while", "ragged_dot", "ragged_dot_general"}
) | {
    # With a kernel for each shard it is a grouped one, and where that is a product (a window of one place, or one
    # place for the window) XLA's partitioner computes wrong numbers: jaxlib 0.10.2, tests/test_row_shards.py.
    "conv_general_dilated"
}


def has_row_shards(trace: Trace, coupling: str | None = None) -> bool:
    """Whether the loss of a batch is that of its parts, part by part.

    Args:
        coupling: what :func:`couples_samples` says of the trace, where it is at hand.
    """
    if any(metric.kind == LAST for metric in trace.metrics):
        return False
    if couples_samples(trace) if coupling is None else coupling:
        return False
    return not any(name in _WHOLE for name in _primitives(trace.jaxpr))


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for part in value if isinstance(value, list | tuple) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from _primitives(_compat.open_jaxpr(part)[0])
