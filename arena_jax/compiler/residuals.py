"""Which values the backward pass needs, by the derivative rules of jax's primitives.

A value is kept once, by whatever makes it. What only looks at another value (a broadcast, a reshape) is made
again, and parameters, their casts and views are there anyway. Rules: jax's ``defjvp`` of each primitive.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from arena_jax.compiler.flops import KERNELS

# Derivatives that are a value there is: the result, or operands.
_RESULT = frozenset({"exp"})
_OPERANDS = frozenset({"div", "log"})
# Derivatives that are a value of their own, of the result's size: the forward pass makes it.
_SLOPE = frozenset(
    {"integer_pow", "square", "pow", "exp2", "expm1", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "log1p", "sin"}
    | {"cos", "tan", "abs", "erf", "erfc", "erf_inv", "lgamma", "digamma", "atan2", "asin", "acos", "atan", "sinh"}
    | {"cosh", "asinh", "acosh", "atanh", "reduce_prod", "cumprod", "cumlogsumexp"}
)
# Bilinear: each operand's derivative is the other.
_BILINEAR = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
# A mask of one byte for each entry of the result says where the cotangent goes.
_MASKED = frozenset({"max", "min", "clamp", "reduce_max", "reduce_min"})
# Looks at its operand only; made again where it is read.
_VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "name", "optimization_barrier"})
# What a parameter may pass through and stay a view of it.
_OF_PARAMETER = _VIEWS | {"convert_element_type", "transpose", "slice", "dynamic_slice", "scan slice", "rev"}
_STOPS = frozenset({"stop_gradient"})


class Array(Protocol):
    """A value: its number, and what it holds."""

    @property
    def number(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_float(self) -> bool: ...


class Operation(Protocol):
    """An operation of the flat program."""

    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> Sequence[Array | None]: ...
    @property
    def results(self) -> Sequence[Array]: ...
    @property
    def times(self) -> float: ...
    @property
    def again(self) -> bool: ...
    @property
    def rule(self) -> object | None: ...


@dataclass(frozen=True)
class Cast:
    """A parameter that is computed with in a narrower dtype.

    Attributes:
        copied: bytes of the narrow copy per byte of the parameter.
        gradient: bytes of a microbatch's gradient per byte of the parameter.
    """

    copied: float = 0.0
    gradient: float = 1.0


def casts_of(ops: Sequence[Operation], parameters: Iterable[int]) -> Mapping[int, Cast]:
    """Parameter's value number -> how it is cast, for those that are cast to a narrower dtype.

    XLA casts once, ahead of the loop over microbatches. What is cast inside a loop over layers gets gradients in the
    parameter's own dtype, as the loop stacks them behind the cast.
    """
    views = {number: number for number in parameters}
    found: dict[int, Cast] = {}
    for op in ops:
        source = op.operands[0] if op.operands else None
        if source is None or source.number not in views or op.name not in _OF_PARAMETER or len(op.results) != 1:
            continue
        result = op.results[0]
        views[result.number] = views[source.number]
        share = result.num_bytes / max(source.num_bytes, 1)
        if op.name == "convert_element_type" and result.is_float and share < 1:
            found[views[source.number]] = Cast(copied=share, gradient=share if op.times == 1 else 1.0)
    return found


def kept_shares(ops: Sequence[Operation], parameters: Iterable[int], inputs: Iterable[int]) -> Mapping[int, float]:
    """Value number -> bytes kept for the backward pass per byte of the value; absent where none are.

    Args:
        parameters: numbers of the trainable parameters' values.
        inputs: numbers of all values that no operation makes.
    """
    needs = _needing_gradient(ops, parameters)
    root: dict[int, int] = {}
    views = set(parameters)
    for op in ops:
        source = op.operands[0] if op.operands else None
        if source is None or len(op.results) != 1:
            continue
        result = op.results[0].number
        if op.name in _OF_PARAMETER and source.number in views:
            views.add(result)
        if op.name in _VIEWS | _STOPS:
            root[result] = root.get(source.number, source.number)
    free = views | set(inputs)
    inside = {result.number for op in ops if op.again for result in op.results}
    kept: dict[int, float] = {}

    def keep(value: Array | None, share: float = 1.0) -> None:
        if value is None:
            return
        number = root.get(value.number, value.number)
        # What a rematerialised block makes is made again.
        if number not in free and number not in inside:
            kept[number] = max(kept.get(number, 0.0), share)

    for op in ops:
        if not any(result.number in needs for result in op.results):
            continue
        if op.again:  # the block runs again from what it was given
            for value in op.operands:
                keep(value)
            continue
        _keep_for(op, needs, keep)
    for op in ops:
        if op.name in _SLOPE and op.results[0].number in needs and not op.again:
            kept[op.results[0].number] = kept.get(op.results[0].number, 0.0) + 1.0
    return kept


def _keep_for(op: Operation, needs: set[int], keep: "_Keep") -> None:
    operands, name = op.operands, op.name
    if name in _RESULT:
        keep(op.results[0])
    elif name in _BILINEAR:
        for value, other in ((operands[0], operands[1]), (operands[1], operands[0])):
            if other is not None and other.number in needs:
                keep(value)
    elif name in KERNELS:  # as flash attention does
        for value in (*operands, *op.results):
            keep(value)
    elif name in _OPERANDS or op.rule is None:
        for value in operands:
            keep(value)
    elif name == "select_n":
        keep(operands[0])
    elif name in _MASKED:
        result = op.results[0]
        keep(result, math.prod(result.shape) / max(result.num_bytes, 1))


class _Keep(Protocol):
    def __call__(self, value: Array | None, share: float = 1.0) -> None: ...


def _needing_gradient(ops: Sequence[Operation], parameters: Iterable[int]) -> set[int]:
    """Values that trainable parameters decide smoothly; twice over, for what a loop carries comes back."""
    needs = set(parameters)
    for _ in range(2):
        for op in ops:
            if op.name in _STOPS or not any(v is not None and v.number in needs for v in op.operands):
                continue
            needs.update(result.number for result in op.results if result.is_float)
    return needs
