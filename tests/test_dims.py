"""What a rule claims, run: an equation on slices along a factor gives the slices of its result.

For a reduced factor the results on the slices combine to the whole by the rule's own operation. The
equation's parameters that spell out shapes (``broadcast_in_dim``, ``reshape``, ``slice`` ...) are
adapted to the slices first, as a partitioner would.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex_core

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import Rule, rule_of
from arena_jax.compiler.trace import inline

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def evaluate(pairs: Sequence[tuple[Any, list[np.ndarray]]]) -> list[list[np.ndarray]]:
    """Results of equations on arrays, by numpy where that says the same, else all in one program."""
    outs: list[Any] = [_by_numpy(eqn, args) for eqn, args in pairs]
    rest = [i for i, out in enumerate(outs) if out is None]
    if rest:
        chosen = [pairs[i] for i in rest]
        run = jax.jit(lambda arrays: [_compat.bind(eqn, args) for (eqn, _), args in zip(chosen, arrays, strict=True)])
        for i, made in zip(rest, run([args for _, args in chosen]), strict=True):
            outs[i] = [np.asarray(v) for v in made]
    return outs


def _by_numpy(eqn: Any, args: list[np.ndarray]) -> list[np.ndarray] | None:
    name = eqn.primitive.name
    if name == "reshape":
        return [args[0].reshape(eqn.params["new_sizes"])]
    if name == "transpose":
        return [args[0].transpose(eqn.params["permutation"])]
    if name != "dot_general":
        return None
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs = list(range(args[0].ndim))
    rhs = list(range(100, 100 + args[1].ndim))
    for i, j in (*zip(lhs_batch, rhs_batch, strict=True), *zip(lhs_contract, rhs_contract, strict=True)):
        rhs[j] = lhs[i]
    out = [lhs[i] for i in lhs_batch]
    out += [x for i, x in enumerate(lhs) if i not in (*lhs_batch, *lhs_contract)]
    out += [x for j, x in enumerate(rhs) if j not in (*rhs_batch, *rhs_contract)]
    number = {x: k for k, x in enumerate(dict.fromkeys([*lhs, *rhs]))}
    return [np.einsum(args[0], [number[x] for x in lhs], args[1], [number[x] for x in rhs], [number[x] for x in out])]


def equations(function: Callable[..., Any], *args: Any) -> list[tuple[Any, list[np.ndarray], list[np.ndarray]]]:
    """The equations of a function, calls inlined, with what goes in and what comes out of each."""
    leaves = list(jax.tree.leaves(args))
    closed = jax.make_jaxpr(function)(*args)
    flat = jax.make_jaxpr(lambda values: inline(closed.jaxpr, list(closed.consts), values))(leaves)
    eqns = flat.jaxpr.eqns
    known = [v for eqn in eqns for v in eqn.outvars]
    everything = flat.jaxpr.replace(outvars=known)
    if len(eqns) == 1 and not flat.consts:
        (values,) = evaluate(
            [(eqns[0], [_value(a, dict(zip(flat.jaxpr.invars, leaves, strict=True))) for a in eqns[0].invars])]
        )
    else:
        values = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(everything, flat.consts)))(*leaves)
    env = dict(zip(flat.jaxpr.invars, leaves, strict=True))
    env |= dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    env |= dict(zip(known, values, strict=True))
    env = {var: np.asarray(value) for var, value in env.items()}
    return [(eqn, [_value(a, env) for a in eqn.invars], [env[v] for v in eqn.outvars]) for eqn in eqns]


def _value(atom: Any, env: dict[Any, Any]) -> np.ndarray:
    return np.asarray(atom.val if isinstance(atom, _compat.Literal) else env[atom])


def cut(array: np.ndarray, dims: Any, rule: Rule, factor: int, start: int, stop: int) -> np.ndarray:
    """Elements ``[start, stop)`` of a factor, wherever in a dim it stands."""
    for axis, dim in enumerate(dims):
        if factor not in dim:
            continue
        sizes = [rule.sizes[f] for f in dim]
        parted = array.reshape(*array.shape[:axis], *sizes, *array.shape[axis + 1 :])
        where = axis + dim.index(factor)
        part = np.take(parted, range(start, stop), axis=where)
        array = part.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])
    return array


def localised(eqn: Any, arrays: Sequence[np.ndarray], outs: Sequence[tuple[int, ...]]) -> Any:
    """The equation for slices: parameters that spell out shapes follow the local ones."""
    params, name = dict(eqn.params), eqn.primitive.name
    if name == "broadcast_in_dim" or name == "iota":
        params["shape"] = outs[0]
    elif name == "reshape":
        params["new_sizes"] = outs[0]
    elif name == "slice":
        whole = eqn.invars[0].aval.shape
        limits = [
            local if limit == n else limit
            for limit, n, local in zip(params["limit_indices"], whole, arrays[0].shape, strict=True)
        ]
        params["limit_indices"] = tuple(limits)
    elif name in ("dynamic_slice", "gather"):
        whole = eqn.invars[0].aval.shape
        sizes = [
            local if size == n and size > 1 else size
            for size, n, local in zip(params["slice_sizes"], whole, arrays[0].shape, strict=True)
        ]
        params["slice_sizes"] = tuple(sizes)
    elif name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        lhs, rhs = arrays[0].shape, arrays[1].shape
        params["feature_group_count"] = lhs[numbers.lhs_spec[1]] // rhs[numbers.rhs_spec[1]]
        params["batch_group_count"] = lhs[numbers.lhs_spec[0]] // outs[0][numbers.out_spec[0]]
    elif name == "tile":
        params["reps"] = tuple(n // m for n, m in zip(outs[0], arrays[0].shape, strict=True))
    return eqn.replace(params=params)


def looked_up_in_a_part(eqn: Any, arrays: list[np.ndarray], factor: int, rule: Rule, start: int) -> Any:
    """The equation and operands of a gather from part of a table: what lies elsewhere counts as zero."""
    numbers = eqn.params["dimension_numbers"]
    (dim,) = [i for i, d in enumerate(rule.operands[0]) if factor in d]
    column = numbers.start_index_map.index(dim)
    shifted = arrays[1].copy()
    shifted[..., column] -= start
    params = {**eqn.params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    return eqn.replace(params=params), [arrays[0], shifted]


NEUTRAL = {"sum": 0.0, "prod": 1.0, "min": np.inf, "max": -np.inf}


def scattered_into_a_part(
    eqn: Any, arrays: list[np.ndarray], factor: int, rule: Rule, start: int
) -> tuple[Any, list[np.ndarray]]:
    """The equation and operands of a scatter on one device: updates that fall elsewhere are dropped, and
    only the first of partial results starts from the operand."""
    operand, indices, updates = arrays
    numbers = eqn.params["dimension_numbers"]
    if factor in rule.reduced:
        return eqn, [operand if start == 0 else np.full_like(operand, NEUTRAL[rule.reduced[factor]]), indices, updates]
    (dim,) = [i for i, d in enumerate(rule.operands[0]) if factor in d]
    if dim not in numbers.inserted_window_dims:
        return eqn, arrays
    shifted = indices.copy()
    shifted[..., numbers.scatter_dims_to_operand_dims.index(dim)] -= start
    return eqn.replace(params={**eqn.params, "mode": lax.GatherScatterMode.FILL_OR_DROP}), [operand, shifted, updates]


def check_equation(eqn: Any, arrays: list[np.ndarray], outs: list[np.ndarray]) -> set[int]:
    """Check one equation's rule; return the factors that may be sharded."""
    rule = rule_of(eqn)
    assert rule is not None, f"no rule for {eqn.primitive.name}"
    assert len(rule.operands) == len(arrays)
    assert len(rule.results) == len(outs)
    for array, dims in (*zip(arrays, rule.operands, strict=True), *zip(outs, rule.results, strict=True)):
        assert len(dims) == array.ndim
        for dim, size in zip(dims, array.shape, strict=True):
            # A dim without factors corresponds to nothing and may have any size.
            assert not dim or math.prod(rule.sizes[f] for f in dim) == size
    pairs: list[tuple[Any, list[np.ndarray]]] = []
    wanted: list[list[np.ndarray]] = []
    free = [factor for factor in rule.sizes if factor not in rule.fixed]
    for factor in free:
        size = rule.sizes[factor]
        middle = 1 + (size > 2)
        for start, stop in ((0, middle), (middle, size)):
            local = [cut(a, d, rule, factor, start, stop) for a, d in zip(arrays, rule.operands, strict=True)]
            wanted.append([cut(o, d, rule, factor, start, stop) for o, d in zip(outs, rule.results, strict=True)])
            piece = localised(eqn, local, [w.shape for w in wanted[-1]])
            if eqn.primitive.name == "gather" and factor in rule.reduced:
                piece, local = looked_up_in_a_part(piece, local, factor, rule, start)
            elif eqn.primitive.name.startswith("scatter"):
                piece, local = scattered_into_a_part(piece, local, factor, rule, start)
            pairs.append((piece, local))
    made = evaluate(pairs)
    for k, factor in enumerate(free):
        says = f"factor {factor} of {eqn}"
        if factor in rule.reduced:
            combine = COMBINE[rule.reduced[factor]]
            for first, second, whole in zip(made[2 * k], made[2 * k + 1], outs, strict=True):
                np.testing.assert_allclose(combine(first, second), whole, rtol=1e-5, atol=1e-5, err_msg=says)
            continue
        for i in (2 * k, 2 * k + 1):
            for one, other in zip(made[i], wanted[i], strict=True):
                assert one.shape == other.shape, says
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=says)
    return set(rule.sizes) - rule.fixed


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def integers(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(high).integers(0, high, shape).astype(np.int32)


def conv(x: Any, w: Any, **options: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


# Name -> (function, arguments, factors that at least one equation of its last primitive may shard).
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention scores": (lambda q, k: jnp.einsum("bqhk,bshk->bhqs", q, k), (normal(2, 3, 4, 5), normal(2, 6, 4, 5))),
    "projection": (lambda x, w: jnp.einsum("bsd,dchk->cbshk", x, w), (normal(2, 3, 6), normal(6, 3, 2, 4))),
    "two contracted": (lambda x, w: jnp.einsum("bqhk,hkd->bqd", x, w), (normal(2, 3, 4, 5), normal(4, 5, 6))),
    "experts": (lambda x, w: jnp.einsum("gecd,edf->gecf", x, w), (normal(2, 3, 4, 5), normal(3, 5, 6))),
    "outer": (lambda x, y: jnp.einsum("a,b->ab", x, y), (normal(3), normal(4))),
    "inner": (jnp.dot, (normal(6), normal(6))),
    "matrix of one column": (jnp.dot, (normal(3, 6), normal(6, 1))),
    "convolution": (conv, (normal(2, 5, 5, 4), normal(3, 3, 4, 6))),
    "strided convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "VALID"),
        (normal(2, 4, 5, 5), normal(6, 4, 3, 3)),
    ),
    "grouped convolution": (
        lambda x, w: conv(x, w, feature_group_count=2),
        (normal(2, 5, 5, 4), normal(3, 3, 2, 6)),
    ),
    "batch-grouped convolution": (
        lambda x, w: conv(x, w, batch_group_count=2),
        (normal(4, 5, 5, 3), normal(3, 3, 3, 6)),
    ),
    "addition": (jnp.add, (normal(2, 3), normal(2, 3))),
    "scaling": (lambda x: 2.5 * x, (normal(4, 3),)),
    "choice": (jnp.where, (normal(4, 3) > 0, normal(4, 3), normal(4, 3) + 5)),
    "choice by one bit": (lambda x, y: lax.select(jnp.all(x > 0), x, y), (normal(4, 3), normal(4, 3))),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (normal(4, 3),)),
    "clamp by arrays": (lax.clamp, (normal(4, 3) - 1, normal(4, 3), normal(4, 3) + 1)),
    "cast": (lambda x: x.astype(jnp.int32), (10 * normal(4, 3),)),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (normal(4, 3),)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1,)), (normal(3),)),
    "broadcast of ones": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)), (normal(2, 1),)),
    "broadcast of a number": (lambda x: jnp.broadcast_to(x, (3, 4)), (np.float32(2),)),
    "split heads": (lambda x: x.reshape(2, 3, 4, 6), (normal(2, 3, 24),)),
    "merge heads": (lambda x: x.reshape(2, 3, 24), (normal(2, 3, 4, 6),)),
    "merge rows": (lambda x: x.reshape(6, 4), (normal(2, 3, 4),)),
    "split and merge": (lambda x: x.reshape(2, 12, 5), (normal(2, 3, 4, 5),)),
    "across dims": (lambda x: x.reshape(4, 15), (normal(12, 5),)),
    "dims that overlap": (lambda x: x.reshape(3, 2, 4, 5), (normal(3, 8, 5),)),
    "dims that do not divide": (lambda x: x.reshape(2, 3, 5), (normal(10, 3),)),
    "dims that do not divide later": (lambda x: x.reshape(4, 6, 4), (normal(4, 4, 6),)),
    "reshape with ones": (lambda x: x.reshape(1, 6, 1, 2, 1), (normal(2, 3, 2, 1),)),
    "flatten": (jnp.ravel, (normal(2, 3, 4),)),
    "reshape of nothing": (lambda x: x.reshape(0, 6), (normal(0, 2, 3),)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (normal(2, 3, 4),)),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), (normal(1, 3, 1, 4),)),
    "expand": (lambda x: lax.expand_dims(x, (0, 2)), (normal(3, 4),)),
    "sum": (lambda x: jnp.sum(x, 1), (normal(2, 3, 4),)),
    "sum of all": (jnp.sum, (normal(2, 3),)),
    "max": (lambda x: jnp.max(x, (0, 2)), (normal(2, 3, 4),)),
    "min": (lambda x: jnp.min(x, 0), (normal(2, 3),)),
    "prod": (lambda x: jnp.prod(x, 1), (normal(2, 3),)),
    "all": (lambda x: jnp.all(x, 1), (normal(4, 3) > -0.5,)),
    "any": (lambda x: jnp.any(x, 1), (normal(4, 3) > 0.5,)),
    "argmax": (lambda x: jnp.argmax(x, 1), (normal(4, 3),)),
    "embedding": (lambda table, ids: table[ids], (normal(8, 5), integers(8, 2, 3))),
    "embedding of one id each": (lambda table, ids: table[ids], (normal(8, 5), integers(8, 4))),
    "take along": (
        lambda x, ids: jnp.take_along_axis(x, ids, axis=2, mode="clip"),
        (normal(2, 3, 6), integers(6, 2, 3, 1)),
    ),
    "take along the first": (
        lambda x, ids: jnp.take_along_axis(x, ids, axis=0, mode="clip"),
        (normal(6, 3), integers(6, 2, 3)),
    ),
    "label picked": (lambda x, ids: x[jnp.arange(4), ids], (normal(4, 5), integers(5, 4))),
    "column picked": (lambda x, ids: x[:, ids], (normal(4, 5), integers(5, 3))),
    "window at an index": (
        lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (2, 5)))(i),
        (normal(6, 5), integers(4, 3)),
    ),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), (normal(2, 3, 4), normal(2, 5, 4))),
    "concatenate one": (lambda x: lax.concatenate([x], 1), (normal(2, 3),)),
    "concatenate equals": (lambda x, y: jnp.concatenate([x, y], 0), (normal(3, 2), normal(3, 2))),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), (normal(2, 3, 4),)),
    "pad inside": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 1), (0, 0, 0))), (normal(3, 4),)),
    "shift by padding": (lambda x: lax.pad(x, np.float32(0), ((1, -1, 0), (0, 0, 0))), (normal(4, 3),)),
    "slice": (lambda x: x[:, 1:3], (normal(4, 5, 3),)),
    "strided slice": (lambda x: x[:, ::2], (normal(4, 6),)),
    "shift": (lambda x: jnp.roll(x, 1, axis=1), (normal(3, 4),)),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), (normal(6, 4), np.int32(1))),
    "dynamic update": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)),
        (normal(6, 4), normal(2, 4), np.int32(1)),
    ),
    "reverse": (lambda x: x[:, ::-1], (normal(3, 4),)),
    "split": (lambda x: jnp.split(x, [2, 3], axis=1), (normal(2, 6, 3),)),
    "split in one": (lambda x: lax.split(x, [4], axis=1), (normal(2, 4),)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (normal(2, 3), normal(2, 3))),
    "tile": (lambda x: jnp.tile(x, (2, 1)), (normal(2, 3),)),
    "repeat heads": (lambda x: jnp.broadcast_to(x[:, :, None], (2, 3, 2, 4)).reshape(2, 6, 4), (normal(2, 3, 4),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), (normal(2, 3, 4),)),
    "cumulative maximum": (lambda x: lax.cummax(x, 0, reverse=True), (normal(4, 3),)),
    "sort": (lambda x: jnp.sort(x, 1), (normal(4, 5),)),
    "argsort": (lambda x: jnp.argsort(x, 0), (normal(4, 5),)),
    "top two": (lambda x: lax.top_k(x, 2), (normal(3, 6),)),
    "top two of the first": (lambda x: lax.top_k(x, 2, axis=0), (normal(6, 3),)),
    "roughly the top two": (lambda x: lax.approx_max_k(x, 2, reduction_dimension=0), (normal(6, 3),)),
    "sort by keys": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (normal(5, 4), normal(5, 4) + 1)),
    "argmin": (lambda x: jnp.argmin(x, 0), (normal(4, 3),)),
    "fold": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b + a * b, (1,)), (normal(3, 4),)),
    "max pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        (normal(2, 4, 4, 3),),
    ),
    "mean pool": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        (normal(2, 4, 4, 3),),
    ),
    "pool that only strides": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 1, 1), (1, 2, 2, 1), "VALID"),
        (normal(2, 4, 4, 3),),
    ),
    "pool that only pads": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1), (1, 1), ((0, 0), (1, 1))),
        (normal(3, 4),),
    ),
    "pool of another kind": (
        lambda x: lax.reduce_window(x, np.float32(1), lax.mul, (1, 2), (1, 2), "VALID"),
        (normal(3, 4),),
    ),
    "derivative of a pool": (
        lambda x: jax.jvp(lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"), (x,), (x,)),
        (normal(2, 4, 3),),
    ),
    "gradient of a pool": (
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID") ** 2).sum()),
        (normal(2, 4, 3),),
    ),
    "tokens added to experts": (
        lambda x, y, e: x.at[e].add(y),
        (normal(4, 5), normal(3, 5), integers(4, 3)),
    ),
    "tokens put into experts": (
        lambda x, y, e: x.at[e].set(y),
        (normal(4, 5), normal(3, 5), np.array([2, 0, 3])),
    ),
    "largest per segment": (
        lambda x, y, e: x.at[e].max(y),
        (normal(4, 5), normal(3, 5), integers(4, 3)),
    ),
    "products per segment": (
        lambda x, y, e: x.at[e].multiply(y, unique_indices=True),
        (normal(4, 5), normal(3, 5), np.array([2, 0, 3])),
    ),
    "scatter within samples": (
        jax.vmap(lambda x, y, e: x.at[e].add(y)),
        (normal(2, 4, 5), normal(2, 3, 5), integers(4, 2, 3)),
    ),
    "windows added": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)) + x.at[i, 0].add(1.0),
        (normal(6, 4), normal(2, 4), np.int32(1)),
    ),
    "embedding gradient": (
        lambda table, ids: jax.grad(lambda t: (t[ids] ** 2).sum())(table),
        (normal(8, 5), integers(8, 2, 3)),
    ),
    "sorted segments": (
        lambda x, e: jax.ops.segment_sum(x, e, num_segments=4),
        (normal(6, 5), np.sort(integers(4, 6))),
    ),
    "experts by rows": (
        lambda x, w, n: lax.ragged_dot(x, w, n),
        (normal(6, 4), normal(3, 4, 5), np.array([2, 3, 1], np.int32)),
    ),
    "gradient of experts": (
        lambda x, w, n: jax.grad(lambda x, w: (lax.ragged_dot(x, w, n) ** 2).sum(), (0, 1))(x, w),
        (normal(6, 4), normal(3, 4, 5), np.array([2, 3, 1], np.int32)),
    ),
    "depthwise convolution": (
        lambda x, w: conv(x, w, feature_group_count=4),
        (normal(2, 5, 5, 4), normal(3, 3, 1, 4)),
    ),
    "depthwise convolution with a multiplier": (
        lambda x, w: conv(x, w, feature_group_count=2),
        (normal(2, 5, 5, 2), normal(3, 3, 1, 6)),
    ),
    "gradient of a depthwise convolution": (
        jax.grad(lambda w, x: (conv(x, w, feature_group_count=4) ** 2).sum()),
        (normal(3, 3, 1, 4), normal(2, 5, 5, 4)),
    ),
    "convolution of one element": (conv, (normal(2, 5, 5, 4), normal(1, 1, 4, 6))),
    "transposed convolution": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (normal(2, 3, 3, 4), normal(3, 3, 4, 6)),
    ),
    "fourier transform": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=-1)), (normal(3, 8),)),
    "fourier transform of planes": (lambda x: jnp.fft.fft2(x).real, (normal(3, 4, 4),)),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(3)[None]), (normal(4, 3, 3),)),
    "triangular solve": (
        lambda a, b: lax.linalg.triangular_solve(a + 3 * jnp.eye(3)[None], b, left_side=True, lower=True),
        (normal(4, 3, 3), normal(4, 3, 2)),
    ),
    "eigenvalues": (lambda x: jnp.linalg.eigvalsh(x + x.mT), (normal(4, 3, 3),)),
    "triangle": (lambda x: jnp.tril(x), (normal(2, 4, 4),)),
    "complex numbers": (lambda x, y: lax.complex(x, y), (normal(2, 3), normal(2, 3))),
    "gamma functions": (lambda x: lax.igamma(jnp.abs(x) + 1, jnp.abs(x)), (normal(2, 3),)),
    "tiled heads": (lambda x: lax.tile(x, (1, 3, 1)), (normal(2, 2, 3),)),
    "stacked behind": (
        lambda x, y: lax.stack([x, y], -1) if hasattr(lax, "stack") else x,
        (normal(2, 3), normal(2, 3)),
    ),
    "unstacked": (lambda x: lax.unstack(x, 1) if hasattr(lax, "unstack") else x, (normal(2, 3, 4),)),
    "one token of each": (lambda x, i: x[jnp.arange(3), :, i], (normal(3, 2, 5), integers(5, 3))),
    "rows kept as windows": (
        lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (1, 5)))(i),
        (normal(6, 5), integers(6, 3)),
    ),
    "positions": (lambda: lax.broadcasted_iota(jnp.int32, (3, 4), 1), ()),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (normal(3, 4), normal(5))),
    "one hot": (lambda i: jax.nn.one_hot(i, 5), (integers(5, 2, 3),)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (normal(2, 3, 4),)),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True)), (normal(3, 4),)),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("name", CASES)
def test_slices_of_operands_give_slices_of_results(name: str) -> None:
    function, args = CASES[name]
    for eqn, arrays, outs in equations(function, *args):
        if eqn.primitive.name == "iota":
            continue  # of its own below
        check_equation(eqn, arrays, outs)


def shardable(name: str, primitive: str) -> tuple[set[int], Rule]:
    function, args = CASES[name]
    ((eqn, arrays, outs),) = [e for e in equations(function, *args) if e[0].primitive.name == primitive]
    rule = rule_of(eqn)
    assert rule is not None
    return check_equation(eqn, arrays, outs), rule


@pytest.mark.parametrize(
    ("name", "primitive", "operands", "results", "reduced"),
    [
        ("attention scores", "dot_general", ["bqhk", "bshk"], ["bhqs"], "k"),
        ("two contracted", "dot_general", ["bqhk", "hkd"], ["bqd"], "hk"),
        ("convolution", "conv_general_dilated", ["b..i", "..io"], ["b..o"], "i"),
        ("embedding", "gather", ["vd", "bs."], ["bsd"], "v"),
        ("transpose", "transpose", ["abc"], ["cab"], ""),
        ("sum", "reduce_sum", ["abc"], ["ac"], "b"),
        ("concatenate", "concatenate", ["a.c", "a.c"], ["a.c"], ""),
        ("slice", "slice", ["a.c"], ["a.c"], ""),
        ("cumulative sum", "cumsum", ["a.c"], ["a.c"], ""),
        ("max pool", "reduce_window_max", ["b..c"], ["b..c"], ""),
    ],
)
def test_as_much_is_shardable_as_can_be(
    name: str, primitive: str, operands: list[str], results: list[str], reduced: str
) -> None:
    """The rule of a primitive as an einsum, a dot for what cannot be sharded."""
    free, rule = shardable(name, primitive)
    letters: dict[int, str] = {}
    for dims, text in zip(rule.operands, operands, strict=True):
        for dim, letter in zip(dims, text, strict=True):
            for factor in dim if letter != "." else ():
                assert factor in free
                assert letters.setdefault(factor, letter) == letter
            assert letter != "." or not set(dim) & free
    assert len(set(letters.values())) == len(letters)
    found = ["".join(letters.get(d[0], ".") if d else "." for d in dims) for dims in rule.results]
    assert found == results
    assert {letters[f] for f in rule.reduced} == set(reduced)


def test_leading_dims_survive_a_reshape_that_does_not_divide_further_on() -> None:
    """Rows stay rows when what is behind them is regrouped."""
    for name in ("dims that do not divide", "dims that do not divide later", "split and merge", "split heads"):
        free, rule = shardable(name, "reshape")
        lead = rule.operands[0][0][0]
        assert lead in free
        assert rule.results[0][0][0] == lead


def test_sources_take_nothing_and_may_lie_anywhere() -> None:
    for shape, dimension in (((3, 4), 0), ((3, 4), 1), ((5,), 0)):
        ((eqn, _, _),) = equations(lambda s=shape, d=dimension: lax.broadcasted_iota(jnp.int32, s, d))
        rule = rule_of(eqn)
        assert rule is not None
        assert not rule.fixed
        assert [rule.sizes[f] for dim in rule.results[0] for f in dim] == list(shape)


def test_unknown_primitives_have_no_rule() -> None:
    """A call, and an equation whose parameters are not as expected."""
    closed = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x))(normal(3))
    assert [rule_of(eqn) for eqn in closed.jaxpr.eqns] == [None]
    ((eqn, _, _),) = equations(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), normal(3))
    assert rule_of(eqn) is not None
    assert rule_of(eqn.replace(params={"dims": (0,)})) is None
    assert rule_of(eqn.replace(params={"axes": (7,)})) is None


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    letters = "abcdef"
    lhs = draw(st.permutations(letters).map(lambda p: p[: draw(st.integers(0, 4))]))
    rhs = draw(st.permutations(letters).map(lambda p: p[: draw(st.integers(0, 4))]))
    out = [x for x in dict.fromkeys([*lhs, *rhs]) if draw(st.booleans())]
    sizes = {x: draw(st.sampled_from([1, 2, 3, 4])) for x in letters}
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(draw(st.permutations(out)))}", sizes


@settings(max_examples=15)
@given(einsums())
def test_any_einsum(drawn: tuple[str, dict[str, int]]) -> None:
    text, sizes = drawn
    lhs, rhs = text.split("->")[0].split(",")
    args = [normal(*(sizes[x] for x in side)) for side in (lhs, rhs)]
    for eqn, arrays, outs in equations(lambda x, y: jnp.einsum(text, x, y), *args):
        check_equation(eqn, arrays, outs)


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of the same size, from random groupings of the same (or reordered) factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=5))

    def grouped(values: list[int]) -> list[int]:
        shape = [1]
        for value in values:
            if draw(st.booleans()):
                shape.append(value)
            else:
                shape[-1] *= value
        return shape

    return grouped(factors), grouped(list(draw(st.permutations(factors))))


@settings(max_examples=60)
@given(regroupings())
def test_any_reshape(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    for eqn, arrays, outs in equations(lambda x: lax.reshape(x, target), normal(*source)):
        check_equation(eqn, arrays, outs)
