"""What a loss does besides computing: calls to the host are refused by name, debug output is warned of.

A plan runs a loss in microbatches, on many devices, in pieces that may be recomputed: whatever acts on
the outside would act another number of times, in another order, on parts of its values.
"""

import warnings
from collections.abc import Iterator
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.errors import ModelError

# Primitive -> what people write to get it.
_CALLS = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "infeed": "lax.infeed",
    "outfeed": "lax.outfeed",
}
_DEBUG = {"debug_callback": "jax.debug.callback", "debug_print": "jax.debug.print"}


def check_effects(jaxpr: Any) -> None:
    """Refuse a loss that calls back to the host, and warn of one that prints.

    Raises:
        ModelError: names the callback and where it is.
    """
    printing: dict[str, None] = {}
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        if name in _CALLS:
            raise ModelError(
                f"the loss calls back to the host: {_CALLS[name]}{_of(eqn)} at {_compat.written_at(eqn)}",
                hint="write it with jax operations, or call it outside of the loss, on what the step returns",
            )
        if name in _DEBUG:
            if "Ordered" in "".join(type(effect).__name__ for effect in eqn.effects):
                raise ModelError(
                    f"the loss prints in order: {_DEBUG[name]} at {_compat.written_at(eqn)}; "
                    "there is no order over several devices",
                    hint="drop ordered=True",
                )
            printing[f"{_DEBUG[name]} at {_compat.written_at(eqn)}"] = None
    if printing:
        warnings.warn(
            f"{', '.join(printing)}: runs once a microbatch, again where a layer is recomputed, and in any order",
            stacklevel=2,
        )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, list | tuple) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from _equations(_compat.open_jaxpr(part)[0])


def _of(eqn: Any) -> str:
    """`` of `name` `` for the function that is called, where it has one."""
    callback = eqn.params.get("callback")
    name = getattr(getattr(callback, "callback_func", callback), "__name__", "")
    return f" of `{name}`" if name else ""
