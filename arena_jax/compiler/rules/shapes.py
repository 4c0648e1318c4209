"""Equations that move elements without changing them: broadcasts, reshapes, slices and joins."""

from collections.abc import Collection
from typing import Any

from arena_jax.compiler.rules.rule import Dim, Dims, Factors, Rule, all_fixed, factors_of, rule_for, shape_of, whole


@rule_for("broadcast_in_dim")
def broadcast(eqn: Any) -> Rule:
    """Dims that are there already move along; new ones may be sharded at no cost."""
    factors = Factors()
    out_shape = shape_of(eqn.outvars[0])
    out = factors.array(out_shape)
    operands = [whole(shape_of(a)) for a in eqn.invars]
    if eqn.invars:
        shape, where = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        operands[0] = tuple(out[j] if shape[i] == out_shape[j] else () for i, j in enumerate(where))
    return Rule(operands, [tuple(out)], factors.sizes)


@rule_for("reshape")
def reshape(eqn: Any) -> Rule:
    """Match runs of dims with equal products; a dim of several factors is led by its major one."""
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if 0 in source or eqn.params.get("dimensions") is not None:
        return all_fixed(eqn)
    factors = Factors()
    lhs: list[Dim] = [()] * len(source)
    rhs: list[Dim] = [()] * len(target)
    fixed: set[int] = set()
    i = j = 0
    left, right = (source[0] if source else 1), (target[0] if target else 1)
    while i < len(source) and j < len(target):
        if left == 1:
            i += 1
            left = source[i] if i < len(source) else 1
            continue
        if right == 1:
            j += 1
            right = target[j] if j < len(target) else 1
            continue
        small, large = min(left, right), max(left, right)
        if large % small:
            # Parts that overlap without dividing, as 6 -> 4: what follows cannot be tracked.
            rest = [factors.new(left), *map(factors.new, source[i + 1 :])]
            other = [factors.new(right), *map(factors.new, target[j + 1 :])]
            lhs[i:] = [(*lhs[i], *rest[0]), *rest[1:]]
            rhs[j:] = [(*rhs[j], *other[0]), *other[1:]]
            fixed = factors_of([*rest, *other])
            break
        factor = factors.new(small)
        # The major part comes first because runs are consumed from the left.
        lhs[i], rhs[j] = (*lhs[i], *factor), (*rhs[j], *factor)
        left, right = left // small, right // small
    return Rule([tuple(lhs)], [tuple(rhs)], factors.sizes, fixed=fixed)


@rule_for("transpose")
def transpose(eqn: Any) -> Rule:
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    return Rule([tuple(dims)], [tuple(dims[i] for i in eqn.params["permutation"])], factors.sizes)


@rule_for("squeeze")
def squeeze(eqn: Any) -> Rule:
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    gone = {d % len(dims) for d in eqn.params["dimensions"]}
    return Rule([tuple(dims)], [tuple(d for i, d in enumerate(dims) if i not in gone)], factors.sizes)


@rule_for("expand_dims")
def expand_dims(eqn: Any) -> Rule:
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    rank = len(shape_of(eqn.outvars[0]))
    kept = iter(dims)
    new = {d % rank for d in eqn.params["dimensions"]}
    out = tuple(() if i in new else next(kept) for i in range(rank))
    return Rule([tuple(dims)], [out], factors.sizes)


@rule_for("slice", "dynamic_slice", "dynamic_update_slice")
def part(eqn: Any) -> Rule:
    """Dims taken (or replaced) from end to end correspond; the others stay whole. Indices are scalars."""
    shapes = [shape_of(a) for a in (*eqn.invars, *eqn.outvars) if shape_of(a)]
    changed = {i for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1}
    return _alike(eqn, changed)


@rule_for("pad")
def pad(eqn: Any) -> Rule:
    """A padded dim stays whole, even one that is shifted and keeps its size."""
    config = eqn.params["padding_config"]
    return _alike(eqn, {i for i, padding in enumerate(config) if tuple(padding) != (0, 0, 0)})


@rule_for("concatenate")
def concatenate(eqn: Any) -> Rule:
    return _alike(eqn, {eqn.params["dimension"]})


@rule_for("split")
def split(eqn: Any) -> Rule:
    return _alike(eqn, {eqn.params["axis"]})


@rule_for("rev")
def rev(eqn: Any) -> Rule:
    return _alike(eqn, set(eqn.params["dimensions"]))


@rule_for("tile")
def tile(eqn: Any) -> Rule:
    """A repeated dim is (repeat, element): the copies may be sharded at no cost, the elements not."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    reps = eqn.params["reps"]
    out = tuple((*factors.new(n), *d) for n, d in zip(reps, dims, strict=True))
    repeated = [d for d, n in zip(dims, reps, strict=True) if n > 1]
    return Rule([tuple(dims)], [out], factors.sizes, fixed=factors_of(repeated))


@rule_for("stack")
def stack(eqn: Any) -> Rule:
    """A new dim of one operand each, which stays whole."""
    factors = Factors()
    dims = tuple(factors.array(shape_of(eqn.invars[0])))
    axis = eqn.params["axis"] % (len(dims) + 1)
    new = factors.new(len(eqn.invars))
    out = (*dims[:axis], new, *dims[axis:])
    return Rule([dims] * len(eqn.invars), [out], factors.sizes, fixed=set(new))


@rule_for("unstack")
def unstack(eqn: Any) -> Rule:
    """A dim is taken apart into one result each; it stays whole."""
    factors = Factors()
    dims = tuple(factors.array(shape_of(eqn.invars[0])))
    axis = eqn.params.get("axis", 0) % len(dims)
    rest = (*dims[:axis], *dims[axis + 1 :])
    return Rule([dims], [rest] * len(eqn.outvars), factors.sizes, fixed=set(dims[axis]))


def _alike(eqn: Any, changed: Collection[int]) -> Rule:
    """Arrays of one rank whose dims correspond except for the changed ones, which stay whole; scalars beside."""
    arrays = [*eqn.invars, *eqn.outvars]
    rank = len(shape_of(eqn.outvars[0]))
    factors = Factors()
    dims = factors.array(shape_of(eqn.outvars[0]))
    fixed: set[int] = set()

    def own(atom: Any) -> Dims:
        shape = shape_of(atom)
        if len(shape) != rank:
            return whole(shape)
        out = tuple(factors.new(n) if i in changed else dims[i] for i, n in enumerate(shape))
        fixed.update(f for i in changed for f in out[i])
        return out

    made = [own(a) for a in arrays]
    fixed |= factors_of([dims[i] for i in changed])
    return Rule(made[: len(eqn.invars)], made[len(eqn.invars) :], factors.sizes, fixed=fixed)
