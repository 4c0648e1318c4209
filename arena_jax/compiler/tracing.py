"""Tracing without two costs that grow with what has been traced already.

flax compares shardings whenever a module writes a variable (each random key of a model, each running
statistic). A tracer has none, and jax first writes a message, which nobody sees, with every equation that the
tracer stems from: quadratic in the size of the model. And the collector of cycles walks the growing trace
again and again, and finds nothing, as a trace is alive until it is done.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from arena_jax.compiler import _compat

_lock = threading.Lock()
_num_inside = 0
_collected = False  # whether cycles were collected before the first thread came in


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Trace inside of this; nests, and may be used by several threads at once."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _collected
    with _lock:
        if _num_inside == 0:
            _collected = gc.isenabled()
            gc.disable()
            _compat.explain_missing_sharding(False)
        _num_inside += 1


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            _compat.explain_missing_sharding(True)
            if _collected:
                gc.enable()
