"""What flows where in a flat program, whatever the mesh: rows, gradients, parameters, repeated layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from arena_jax.compiler.dims import Rule
from arena_jax.compiler.intra_op.flat import CARRY, UNSTACK, Flat, Op
from arena_jax.compiler.intra_op.repeats import classes_of
from arena_jax.compiler.problem import PARAMS, STATE, Leaf


@dataclass(frozen=True)
class Flow:
    """Facts about the values (by number) and operations (by position) of a flat program.

    Attributes:
        rows: value -> per dim, whether it runs over rows of the batch.
        needs_gradient: value -> whether a cotangent flows back to it.
        parameter: value -> the leaf it is or is a view of.
        groups: operation -> class; the same place of a repeated layer has one class.
        first_use: leaf -> where it is first read by real work: class of the operation and operand.
        stacked: leaves that a scan slices: their first dim is the layer.
        expert_like: leaves that a product takes with a batch dim, so that rows can travel to them.
    """

    rows: tuple[tuple[bool, ...], ...]
    needs_gradient: tuple[bool, ...]
    parameter: tuple[int | None, ...]
    groups: tuple[int, ...]
    first_use: dict[int, object]
    stacked: frozenset[int]
    expert_like: frozenset[int]

    def of_operands(self, op: Op) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Per operand of an operation: does it need a gradient, is it a parameter or a view of one."""
        grads = tuple(v is not None and self.needs_gradient[v.number] for v in op.operands)
        params = tuple(v is not None and self.parameter[v.number] is not None for v in op.operands)
        return grads, params

    def row_factors(self, op: Op, rule: Rule) -> set[int]:
        """Factors of an operation that run over rows of the batch."""
        return _row_factors(op, rule, self.rows)


def flow_of(flat: Flat, leaves: Sequence[Leaf], batch_has_rows: Sequence[bool]) -> Flow:
    rows: list[tuple[bool, ...]] = [()] * flat.num_values
    grads = [False] * flat.num_values
    parameter: list[int | None] = [None] * flat.num_values
    for position, value in flat.batch.items():
        rows[value.number] = tuple(i == 0 and batch_has_rows[position] for i in range(len(value.shape)))
    for number, value in flat.leaves.items():
        if leaves[number].kind != STATE:
            parameter[value.number] = number
            grads[value.number] = leaves[number].kind == PARAMS
    while _sweep(flat, rows, grads, parameter):
        pass  # what a scan carries is known after its body is
    groups = classes_of([op.signature for op in flat.ops])
    first_use: dict[int, object] = {}
    stacked: set[int] = set()
    expert_like: set[int] = set()
    for index, op in enumerate(flat.ops):
        if op.results and parameter[op.results[0].number] is not None:
            if op.name == UNSTACK:
                leaf = parameter[op.results[0].number]
                assert leaf is not None
                stacked.add(leaf)
            continue
        for i, operand in enumerate(op.operands):
            root = None if operand is None else parameter[operand.number]
            if root is not None:
                first_use.setdefault(root, (groups[index], i))
                if op.name == "dot_general" and op.eqn.params["dimension_numbers"][1][0]:
                    expert_like.add(root)
    return Flow(
        rows=tuple(rows),
        needs_gradient=tuple(grads),
        parameter=tuple(parameter),
        groups=tuple(groups),
        first_use=first_use,
        stacked=frozenset(stacked),
        expert_like=frozenset(expert_like),
    )


def _sweep(flat: Flat, rows: list[tuple[bool, ...]], grads: list[bool], parameter: list[int | None]) -> bool:
    """Carry facts from operands to results; whether a scan's carry learnt something that its body has not seen."""
    again = False
    for op in flat.ops:
        behind = {parameter[v.number] for v in op.operands if v is not None}
        root = behind.pop() if len(behind) == 1 and op.name != CARRY else None
        has_gradient = any(v is not None and grads[v.number] for v in op.operands) and op.name != "stop_gradient"
        for k, value in enumerate(op.results):
            parameter[value.number] = root
            grads[value.number] = has_gradient and value.is_float
            if op.rule is None:
                rows[value.number] = (False,) * len(value.shape)
                continue
            factors = _row_factors(op, op.rule, rows)
            rows[value.number] = tuple(bool(dim) and dim[0] in factors for dim in op.rule.results[k])
    for op in flat.ops:
        if op.name == CARRY and op.rule is not None:
            value = op.results[0]
            factors = _row_factors(op, op.rule, rows)
            after = tuple(bool(dim) and dim[0] in factors for dim in op.rule.results[0])
            with_gradient = value.is_float and any(v is not None and grads[v.number] for v in op.operands)
            again |= after != rows[value.number] or with_gradient != grads[value.number]
    return again


def _row_factors(op: Op, rule: Rule, rows: Sequence[tuple[bool, ...]]) -> set[int]:
    found = set()
    for dims, value in zip(rule.operands, op.operands, strict=True):
        if value is None:
            continue
        for dim, is_row in zip(dims, rows[value.number], strict=False):
            if is_row and dim:
                found.add(dim[0])
    return found
