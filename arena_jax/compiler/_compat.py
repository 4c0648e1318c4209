"""The few places where jax 0.10 to 0.12 differ, or where only an internal name exists."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import jax
from jax._src import config
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import partial_eval

# `jit` is called `pjit` on some versions; all of these only wrap a jaxpr and can be inlined.
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call", "xla_call"})
REMAT = frozenset({"remat2", "checkpoint", "remat"})

Literal = jex_core.Literal
Var = jex_core.Var


def open_jaxpr(value: Any) -> tuple[Any, list[Any]]:
    """Split a Jaxpr or ClosedJaxpr into (jaxpr, consts)."""
    if hasattr(value, "consts"):
        jaxpr = value.jaxpr if hasattr(value, "jaxpr") else value
        return jaxpr, list(value.consts)
    return value, []


# What they hold works on blocks or on a device's part, not on their operands.
_OPAQUE = frozenset({"pallas_call", "shard_map", "reduce"})


def inner_jaxpr(eqn: Any) -> tuple[Any, list[Any]]:
    """The body of a call-like equation (jit, remat, scan, custom rules)."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee") if eqn.primitive.name not in _OPAQUE else ():
        if name in eqn.params:
            return open_jaxpr(eqn.params[name])
    raise KeyError(f"{eqn.primitive} has no body")


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a ``scan`` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax >= 0.11
    return len(consts), len(carry)


def bind(eqn: Any, args: list[Any], *, in_context: bool = True) -> list[Any]:
    """Evaluate one equation as it stands, in its own context unless that is not wanted."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    with eqn_context(eqn) if in_context else nullcontext():
        if isinstance(bound, tuple):  # jax < 0.11: callables first, then params
            functions, params = bound
            out = eqn.primitive.bind(*functions, *args, **params)
        else:
            out = eqn.primitive.bind(*args, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Enter the equation's own context (default matmul precision, threefry mode, ...)."""
    with ExitStack() as stack:
        manager = getattr(getattr(eqn, "ctx", None), "manager", None)
        if manager is not None:
            stack.enter_context(manager)
        yield


def mesh_in_use() -> Any:
    """The mesh that was set with ``jax.set_mesh``, if any."""
    mesh = jax.sharding.get_mesh()
    return None if mesh is None or mesh.empty else mesh


def under_mesh(mesh: Any) -> Any:
    """A context in which that mesh, or none, is set."""
    return jax.set_mesh(mesh) if mesh is not None or mesh_in_use() is not None else nullcontext()


@contextmanager
def typed_as_in(eqn: Any) -> Iterator[None]:
    """Trace as the equation was traced: under its mesh, and with types that say over which axes values vary."""
    varying = any(_varies(v.aval) for v in (*eqn.invars, *eqn.outvars))
    with ExitStack() as stack:
        mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
        if mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        stack.enter_context(config._check_vma(varying))
        yield


def _varies(aval: Any) -> bool:
    """Whether a value's type says that it differs between parts of a mesh."""
    kind = getattr(aval, "manual_axis_type", None)
    return bool(getattr(aval, "vma", None)) or (kind is not None and not kind.empty)


def inputs_behind(jaxpr: Any, atom: Any) -> list[bool]:
    """Which inputs of a jaxpr one of its values depends on, looking into calls and scans."""
    if isinstance(atom, Literal):
        return [False] * len(jaxpr.invars)
    alone = jaxpr.replace(outvars=[atom], debug_info=jaxpr.debug_info.with_unknown_names())
    _, used = partial_eval.dce_jaxpr(alone, [True])
    return list(used)


def explain_missing_sharding(explain: bool) -> None:
    """Whether ``tracer.sharding``, an ``AttributeError`` in any case, first finds out where the tracer comes from.

    Nobody sees what it finds: ``Tracer.__getattr__`` answers in its place.
    """
    tracer: Any = partial_eval.DynamicJaxprTracer
    if explain:
        if tracer.__dict__.get("sharding") is _NO_SHARDING:
            del tracer.sharding
    elif "sharding" not in tracer.__dict__:
        tracer.sharding = _NO_SHARDING


def _no_sharding(tracer: Any) -> Any:
    raise AttributeError("sharding")


_NO_SHARDING = property(_no_sharding)


def written_at(eqn: Any) -> str:
    """``file.py:12 (function)``: the user's line that an equation comes from."""
    return str(source_info_util.summarize(eqn.source_info))


def drop_lead(aval: Any) -> Any:
    """The abstract value of one element of a stack."""
    return aval.update(shape=aval.shape[1:])


def is_key(aval: Any) -> bool:
    """Whether an abstract value is a typed PRNG key."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))
