"""Memory of CPU devices: blocks that a step frees are kept for the next step. Needs no jax.

XLA's CPU client takes every buffer from malloc and gives it back. glibc maps a block of over 32 MiB anew each
time, and trims what is free, so that a step touches its largest buffers as fresh pages (``docs/execution.md``
has what that costs). Accelerators keep a pool for the same reason.
"""

import ctypes
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

ENV = "ARENA_JAX_KEEP_MEMORY"

# malloc.h of glibc. One arena that every thread reuses, all of it on the heap, never trimmed: heaps of further
# arenas hold 64 MiB and are unmapped when they empty.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_SETTINGS = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees; True where it does from now on.

    To be called before jax looks for devices: threads that run already stay with their arenas. Nothing is
    changed where this machine has an accelerator, where malloc is not glibc's, and where the environment says
    ``ARENA_JAX_KEEP_MEMORY=0``, for a process that should hold less between its steps.
    """
    if os.environ.get(ENV, "1") == "0" or platform.libc_ver()[0] != "glibc" or not _on_cpu():
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(setting, value) == 1 for setting, value in _SETTINGS)
    return False


def _on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    devices = Path("/dev")
    return platforms == "cpu" if platforms else not [*devices.glob("nvidia[0-9]*"), *devices.glob("accel[0-9]*")]
