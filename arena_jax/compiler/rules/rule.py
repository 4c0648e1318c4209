"""What a sharding rule says, and how the families of primitives register theirs.

A :class:`Rule` writes an equation like an einsum: every dim is a list of *factors*, major first, and
equal factors of operands and results move together. Sharding a factor over a mesh axis shards all
dims it leads; a *reduced* factor leaves partial results behind; a *fixed* one cannot be sharded
without gathering. The form follows XLA Shardy's sharding rules.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


@dataclass
class Rule:
    """Correspondence of dims; factor numbers are local to the rule.

    A dim without factors corresponds to nothing: it has size 1, or must be whole on every device.

    Attributes:
        operands, results: per array, per dim, the factors it is made of.
        sizes: size of each factor.
        reduced: factor -> how partial results combine (``sum``, ``max``, ...).
        fixed: factors that cannot be sharded.
        flops: of the whole equation, where shapes alone do not say (opaque kernels); else ``None``.
    """

    operands: list[Dims]
    results: list[Dims]
    sizes: dict[int, int]
    reduced: dict[int, str] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    flops: float | None = None


class Factors:
    """Hands out factor numbers with their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next = count()

    def new(self, size: int) -> Dim:
        """A dim of one new factor; dims of size 1 have none."""
        if size == 1:
            return ()
        factor = next(self._next)
        self.sizes[factor] = size
        return (factor,)

    def array(self, shape: Sequence[int]) -> list[Dim]:
        """The dims of an array, each of one new factor."""
        return [self.new(size) for size in shape]


MakeRule = Callable[[Any], Rule]
RULES: dict[str, MakeRule] = {}
"""Primitive name -> what makes the rule of one of its equations."""


def rule_for(*names: str) -> Callable[[MakeRule], MakeRule]:
    """Register a function as the one that makes the rules of these primitives."""

    def register(make: MakeRule) -> MakeRule:
        RULES.update(dict.fromkeys(names, make))
        return make

    return register


def shape_of(atom: Any) -> tuple[int, ...]:
    """Shape of a variable or literal; tokens and references have none."""
    return tuple(getattr(atom.aval, "shape", ()))


def whole(shape: Sequence[int]) -> Dims:
    """An array that must be whole on every device, or that nothing else depends on."""
    return ((),) * len(shape)


def factors_of(dims: Collection[Dim]) -> set[int]:
    return {f for dim in dims for f in dim}


def all_fixed(eqn: Any) -> Rule:
    """Nothing can be sharded: every device runs the whole equation."""
    factors = Factors()
    operands = [tuple(factors.array(shape_of(a))) for a in eqn.invars]
    results = [tuple(factors.array(shape_of(v))) for v in eqn.outvars]
    return Rule(operands, results, factors.sizes, fixed=set(factors.sizes))


def same_shape(eqn: Any, fixed_axes: Collection[int]) -> Rule:
    """Operands and results of the first operand's shape, some of whose dims cannot be sharded."""
    factors = Factors()
    shape = shape_of(eqn.invars[0])
    dims = factors.array(shape)
    return Rule(
        [tuple(dims) if shape_of(a) == shape else whole(shape_of(a)) for a in eqn.invars],
        [tuple(dims)] * len(eqn.outvars),
        factors.sizes,
        fixed={f for axis in fixed_axes for f in dims[axis]},
    )
