"""One operation on a mesh: what an assignment of axes to factors asks of its operands, gives and costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arena_jax.compiler.dims import CUMULATIVE, ELEMENTWISE, REDUCTIONS, Rule
from arena_jax.compiler.flops import eqn_flops
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.flat import ARGUMENTS, CARRY, RESTACK, UNSTACK, Op, Value
from arena_jax.compiler.intra_op.layout import NAMES, Layout, MeshShape
from arena_jax.compiler.rules.rule import Dims

Assignment = tuple[tuple[int, int], ...]
"""``(axis, factor)`` pairs: the factor that each mesh axis shards."""

# Computed inside whatever reads them, or no work at all.
_FREE = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "stop_gradient", "name"}) | {
    CARRY,
    UNSTACK,
    RESTACK,
}
# Whose arithmetic is hidden behind the bytes it streams.
_STREAMING = ELEMENTWISE | CUMULATIVE | frozenset(REDUCTIONS)
# A rematerialised forward pass runs once more: one part in three of forward and backward together.
_AGAIN = 4 / 3


@dataclass(frozen=True)
class Partitioned:
    """An operation under an assignment.

    Attributes:
        operands: the layout each operand must have.
        results: the layout each result gets.
        work: what one execution costs one device, backward pass included by its collectives.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    work: w.Floats


def free_factors(rule: Rule) -> set[int]:
    """Factors that can be sharded: not fixed, and the major part of every dim they are in."""
    arrays = (*rule.operands, *rule.results)
    minor = {f for dims in arrays for dim in dims for f in dim[1:]}
    leading = {dim[0] for dims in arrays for dim in dims if dim}
    return leading - minor - rule.fixed


def follow(rule: Rule, operand: int, layout: Layout, mesh: MeshShape) -> Assignment:
    """The assignment that one operand's layout suggests; axes on factors that cannot be sharded drop out."""
    free = free_factors(rule)
    found: list[tuple[int, int]] = []
    for dim, axes in zip(rule.operands[operand], layout, strict=True):
        if axes and dim and dim[0] in free and mesh.fits(rule.sizes[dim[0]], axes):
            found += [(axis, dim[0]) for axis in mesh.axes if axes & axis]
    return tuple(found)


def partition(
    op: Op, assignment: Assignment, mesh: MeshShape, needs_gradient: Sequence[bool], is_parameter: Sequence[bool]
) -> Partitioned:
    """Apply an assignment to an operation.

    Args:
        needs_gradient: per operand, whether a cotangent flows back to it.
        is_parameter: per operand, whether it is a parameter or a view of one: its cotangent is a gradient.
    """
    rule = op.rule
    work = w.empty()
    if rule is None:
        _count(op, 1.0, sum(v.num_bytes for v in op.results), work)
        work[w.SAVED] += sum(v.num_bytes * kept for v, kept in zip(op.results, op.kept, strict=False))
        whole = [tuple(0 for _ in v.shape) if v is not None else () for v in op.operands]
        return Partitioned(tuple(whole), tuple(tuple(0 for _ in v.shape) for v in op.results), work)
    axes_of: dict[int, int] = {}
    share = 1.0
    for axis, factor in assignment:
        axes_of[factor] = axes_of.get(factor, 0) | axis
        share /= mesh.sizes[axis]
    operands = tuple(_layout(dims, v, axes_of, mesh) for dims, v in zip(rule.operands, op.operands, strict=True))
    results = tuple(_layout(dims, v, axes_of, mesh) for dims, v in zip(rule.results, op.results, strict=True))
    local = sum(v.num_bytes * mesh.share(layout) for v, layout in zip(op.results, results, strict=True))
    for axis, factor in assignment:
        if factor in rule.reduced and op.name in ARGUMENTS:
            # The best of each part and where it is.
            w.add_collective(work, NAMES[axis], "all_gather", w.FORWARD, 2 * local * mesh.sizes[axis], 2)
        elif factor in rule.reduced:
            w.add_collective(work, NAMES[axis], "all_reduce", w.FORWARD, local)
            if op.again:
                w.add_collective(work, NAMES[axis], "all_reduce", w.BACKWARD, local)
        for dims, value, layout, has_gradient, parameter in zip(
            rule.operands, op.operands, operands, needs_gradient, is_parameter, strict=True
        ):
            # The operand is whole where the work is split: its cotangent comes in parts (Megatron's f).
            if value is None or not has_gradient or any(factor in dim for dim in dims):
                continue
            phase = w.GRADIENT if parameter else w.BACKWARD
            w.add_collective(work, NAMES[axis], "all_reduce", phase, value.num_bytes * mesh.share(layout))
    _count(op, share, local, work)
    for value, layout, kept in zip(op.results, results, op.kept, strict=False):
        work[w.SAVED] += value.num_bytes * mesh.share(layout) * kept
    return Partitioned(operands, results, work)


def _layout(dims: Dims, value: Value | None, axes_of: dict[int, int], mesh: MeshShape) -> Layout:
    if value is None:
        return ()
    layout = []
    for i, size in enumerate(value.shape):
        dim = dims[i] if i < len(dims) else ()
        axes = axes_of.get(dim[0], 0) if dim else 0
        layout.append(axes if mesh.fits(size, axes) else 0)
    return tuple(layout)


def _count(op: Op, share: float, local_bytes: float, work: w.Floats) -> None:
    times = _AGAIN if op.again else 1.0
    if op.name in _FREE:
        return
    work[w.NUM_OPS] += times
    if op.name not in _STREAMING:
        dtype = str(getattr(op.eqn.invars[0].aval, "dtype", "")) if op.eqn.invars else ""
        work[w.flops_at(dtype)] += times * eqn_flops(op.eqn) * share
    work[w.MOVED] += times * passed_bytes(op.name, local_bytes)


def passed_bytes(name: str, num_bytes: float) -> float:
    """Bytes that count of an operation's results. XLA fuses chains of elementwise operations: about one write in
    three reaches memory."""
    if name in _FREE:
        return 0.0
    return num_bytes / (3 if name in ELEMENTWISE else 1)


def stacked_work(parts: Sequence[Partitioned], times: float) -> w.Floats:
    """Work of several assignments as rows."""
    return np.stack([part.work for part in parts]) * times
