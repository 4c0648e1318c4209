"""FLOPs and bytes of equations, from their shapes."""

import math
from typing import Any

import jax.numpy as jnp

from arena_jax.compiler import _compat
from arena_jax.compiler.rules.kernels import KERNELS, kernel_rule

# Primitives whose work is worth placing: everything else moves bytes.
HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}) | KERNELS


def array_bytes(atom: Any) -> int:
    """Bytes of a value, typed keys counted as two words."""
    aval = atom.aval
    if not hasattr(aval, "shape"):
        return 0
    itemsize = 8 if _compat.is_key(aval) else jnp.dtype(aval.dtype).itemsize
    return math.prod(aval.shape) * itemsize


def bytes_moved(eqn: Any) -> int:
    """Bytes read and written by one equation run on its own."""
    return sum(array_bytes(a) for a in (*eqn.invars, *eqn.outvars))


def eqn_flops(eqn: Any) -> float:
    """FLOPs of one equation; a multiply-add counts two, bodies of scans count every iteration."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        depth = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    if name in ("ragged_dot", "ragged_dot_general"):
        return _ragged_flops(eqn)
    if name in KERNELS:
        return _kernel_flops(eqn)
    bodies = list(_bodies(eqn))
    if bodies:
        return sum(times * jaxpr_flops(body) for body, times in bodies)
    return float(sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")))


def _ragged_flops(eqn: Any) -> float:
    """Every row meets the matrix of one group."""
    lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    contract = (1,) if numbers is None else numbers.dot_dimension_numbers[0][0]
    if numbers is not None and set(numbers.lhs_ragged_dimensions) & {*contract}:
        out = out[1:]  # a product per group, each over its own part of the contracted dim
    return 2.0 * math.prod(out) * math.prod(lhs[d] for d in contract)


def _kernel_flops(eqn: Any) -> float:
    """What the kernel declares, else what its rule or its body says, else an operation per element; never zero."""
    declared = getattr(eqn.params.get("cost_estimate"), "flops", 0)
    if declared:
        return float(declared)
    rule = kernel_rule(eqn)
    if rule is not None and rule.flops:
        return rule.flops
    if eqn.primitive.name == "pallas_call":
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        steps = math.prod(n for n in grid if isinstance(n, int))
        inside = steps * jaxpr_flops(_compat.open_jaxpr(eqn.params["jaxpr"])[0])
    elif eqn.primitive.name == "shard_map":
        inside = eqn.params["mesh"].size * jaxpr_flops(_compat.open_jaxpr(eqn.params["jaxpr"])[0])
    else:
        inside = sum(times * jaxpr_flops(body) for body, times in _bodies(eqn))
    elements = [math.prod(a.aval.shape) for a in (*eqn.invars, *eqn.outvars) if hasattr(a.aval, "shape")]
    return float(inside or max(elements, default=0) or 1)


def jaxpr_flops(jaxpr: Any) -> float:
    """FLOPs of all equations of a jaxpr."""
    return sum(eqn_flops(eqn) for eqn in jaxpr.eqns)


def _bodies(eqn: Any) -> list[tuple[Any, int]]:
    """Inner jaxprs and how often each runs; a ``while`` counts once, ``cond`` its dearest branch."""
    name = eqn.primitive.name
    if name == "scan":
        return [(_compat.open_jaxpr(eqn.params["jaxpr"])[0], eqn.params["length"])]
    if name == "cond":
        branches = [_compat.open_jaxpr(b)[0] for b in eqn.params["branches"]]
        return [(max(branches, key=jaxpr_flops), 1)]
    if name == "while":
        return [(_compat.open_jaxpr(eqn.params["body_jaxpr"])[0], 1)]
    try:
        return [(_compat.inner_jaxpr(eqn)[0], 1)]
    except KeyError:
        return []
