"""Python's cyclic collector, which holds the interpreter's lock while it looks at every object there is."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Collections leave out what exists at the start, until the end.

    Tracing a plan in the background makes so many objects that full collections begin, in whose time no step runs:
    0.4 s with the million objects that tracing, planning and compiling have left (gpt_tiny, 2-core Xeon).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
