"""Calls in a jaxpr (``jit``) replaced by what they call."""

from collections.abc import Mapping, Sequence
from typing import Any

from arena_jax.compiler import _compat


def inlined(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The same computation without calls, and the values of its constants; nothing is traced again.

    Equations keep their order, parameters and source lines; what stays nested (scans, rematerialised blocks, custom
    derivatives) is left as it is.
    """
    eqns: list[Any] = []
    constants: dict[int, tuple[Any, Any]] = {id(value): (var, value) for var, value in _pairs(jaxpr, consts)}
    again: dict[Any, Any] = {var: constants[id(value)][0] for var, value in _pairs(jaxpr, consts)}

    def constant(var: Any, value: Any) -> Any:
        return constants.setdefault(id(value), (_compat.Var(var.aval), value))[0]

    def walk(body: Any, env: dict[Any, Any], *, nested: bool) -> None:
        for eqn in body.eqns:
            operands = [_read(env, atom) for atom in eqn.invars]
            if eqn.primitive.name in _compat.INLINED:
                inner, inner_consts = _compat.inner_jaxpr(eqn)
                scope = dict(zip(inner.invars, operands, strict=True))
                scope |= {var: constant(var, value) for var, value in _pairs(inner, inner_consts)}
                walk(inner, scope, nested=True)
                env |= zip(eqn.outvars, (_read(scope, atom) for atom in inner.outvars), strict=True)
                continue
            results = eqn.outvars
            if nested:  # a body that is called twice is there twice
                results = [_compat.Var(var.aval) if _is_used(var) else var for var in eqn.outvars]
                env |= zip(eqn.outvars, results, strict=True)
            eqns.append(eqn.replace(invars=operands, outvars=results))

    walk(jaxpr, again, nested=False)
    flat = jaxpr.replace(
        eqns=eqns,
        constvars=[var for var, _ in constants.values()],
        outvars=[_read(again, atom) for atom in jaxpr.outvars],
    )
    return flat, [value for _, value in constants.values()]


def inline(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    """Evaluate a jaxpr with every call inlined; under a trace this flattens it."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _compat.INLINED:
            body, body_consts = _compat.inner_jaxpr(eqn)
            outs = inline(body, body_consts, values)
        else:
            outs = _compat.bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _pairs(jaxpr: Any, consts: Sequence[Any]) -> "zip[tuple[Any, Any]]":
    return zip(jaxpr.constvars, consts, strict=True)


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, _compat.Literal) else env.get(atom, atom)


def _is_used(var: Any) -> bool:
    return type(var).__name__ != "DropVar"
