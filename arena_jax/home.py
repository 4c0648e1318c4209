"""Where this machine's caches live: ``$ARENA_JAX_HOME``, or the platform's user cache folder.

Everything here can be deleted at any time; it is found again, compiled again or measured again.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

ENV_HOME = "ARENA_JAX_HOME"


def home() -> Path:
    """The folder of all caches. It need not exist yet."""
    chosen = os.environ.get(ENV_HOME)
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("arena-jax")


def compile_cache(device_type: str = "") -> Path:
    """Folder of XLA's persistent compilation cache.

    Args:
        device_type: a virtual CPU type, which has its own: what XLA compiles depends on how many cores it
            sees, but the names of cached executables do not.
    """
    return home() / (f"compile-{device_type}" if device_type else "compile")


def plan_index() -> Path:
    """SQLite file of the plan index."""
    return home() / "plans.sqlite"


def profiles() -> Path:
    """SQLite file of measured profiles."""
    return home() / "profiles.sqlite"


def deviceless() -> Path:
    """Folder of what programs compiled for hardware elsewhere came to."""
    return home() / "deviceless"


def numba_cache() -> Path:
    """Folder in which the alpa worker keeps its compiled functions."""
    return home() / "numba"


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What one cache holds on disk."""

    name: str
    path: Path
    num_files: int
    size_bytes: int


def cache_sizes() -> tuple[CacheSize, ...]:
    """Sizes of the caches, whether they exist yet or not."""
    caches = {
        "compile": compile_cache(),
        "plans": plan_index(),
        "profiles": profiles(),
        "deviceless": deviceless(),
        "numba": numba_cache(),
    }
    return tuple(_measure(name, path) for name, path in caches.items())


def _measure(name: str, path: Path) -> CacheSize:
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    sizes = []
    for file in files:
        try:
            if file.is_file():
                sizes.append(file.stat().st_size)
        except OSError:  # a running job may remove a file between the listing and the look
            continue
    return CacheSize(name=name, path=path, num_files=len(sizes), size_bytes=sum(sizes))
