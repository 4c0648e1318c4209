"""Running plans: programs, the training loop, checkpoints. Importing the package alone imports no jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arena_jax.runtime.lower import compile_program as compile_program
    from arena_jax.runtime.program import Program as Program

_HOME_OF = {"Program": "arena_jax.runtime.program", "compile_program": "arena_jax.runtime.lower"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
