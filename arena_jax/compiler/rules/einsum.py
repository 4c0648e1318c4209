"""Rules written as text: ``b h s d, b h t d, b h t d -> b h s d``."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from arena_jax.compiler.rules.rule import Dim, Dims, Factors, Rule
from arena_jax.errors import UsageError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DIM = re.compile(rf"\s*(?:({_NAME})|\((\s*{_NAME}(?:\s+{_NAME})*\s*)\)|(\.))\s*")
_EXAMPLE = (
    "write it like 'b h s d, b h t d, b h t d -> b h s d'; '.' is a dim that stays whole, '(k g)' one of two factors"
)

Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextRule:
    """A parsed rule.

    Attributes:
        operands, results: per array, per dim, the names of its factors, major first; none where it stays whole.
        reduced: names whose partial results are summed.
        fixed: names that stay whole.
        known_sizes: of names whose sizes the shapes do not tell.
    """

    text: str
    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    reduced: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    known_sizes: Mapping[str, int] = field(default_factory=dict)

    def rule(self, operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]) -> Rule:
        """The rule for an equation of these shapes.

        Operands behind those that the text names stay whole. A dim of size 1 is broadcast, whatever the
        text calls it.

        Raises:
            ValueError: where the text does not describe the shapes.
        """
        arrays = [*zip(operand_shapes, self.operands, strict=False), *zip(result_shapes, self.results, strict=False)]
        if len(operand_shapes) < len(self.operands) or len(result_shapes) != len(self.results):
            raise ValueError(
                f"{self.text!r} has {len(self.operands)} operands and {len(self.results)} results, "
                f"the equation {len(operand_shapes)} and {len(result_shapes)}"
            )
        sizes = self._sizes(arrays)
        factors = Factors()
        number: dict[str, Dim] = {name: factors.new(size) for name, size in sizes.items()}

        def dims(shape: tuple[int, ...], names: tuple[Names, ...]) -> Dims:
            return tuple(
                () if n == 1 else tuple(f for name in dim for f in number[name])
                for n, dim in zip(shape, names, strict=True)
            )

        whole: list[Dims] = [((),) * len(shape) for shape in operand_shapes[len(self.operands) :]]
        in_results = {name for array in self.results for dim in array for name in dim}
        fixed = {f for name in sizes if name in self.fixed for f in number[name]}
        # What only operands have is used up inside, in a way that only `reduced` can tell.
        fixed |= {f for name in sizes if name not in in_results and name not in self.reduced for f in number[name]}
        return Rule(
            [*(dims(s, n) for s, n in zip(operand_shapes, self.operands, strict=False)), *whole],
            [dims(s, n) for s, n in zip(result_shapes, self.results, strict=True)],
            factors.sizes,
            reduced={f: "sum" for name in sizes if name in self.reduced for f in number[name]},
            fixed=fixed,
            flops=self._flops(sizes),
        )

    def _flops(self, sizes: dict[str, int]) -> float:
        """A product of n arrays is n - 1 products of two, each of all factors; a multiply-add counts two."""
        products = max(sum(any(dim for dim in array) for array in self.operands) - 1, 1)
        return 2.0 * products * math.prod(sizes.values())

    def _sizes(self, arrays: list[tuple[tuple[int, ...], tuple[Names, ...]]]) -> dict[str, int]:
        sizes: dict[str, int] = dict(self.known_sizes)
        merged: list[tuple[int, Names]] = []
        for shape, dims in arrays:
            if len(shape) != len(dims):
                raise ValueError(f"{self.text!r} has an array of {len(dims)} dims where the equation's is {shape}")
            for n, dim in zip(shape, dims, strict=True):
                if len(dim) == 1 and (n != 1 or dim[0] not in sizes):
                    if sizes.get(dim[0], 1) not in (1, n):
                        raise ValueError(f"{dim[0]!r} of {self.text!r} is {sizes[dim[0]]} in one array, {n} in another")
                    sizes[dim[0]] = n
                elif len(dim) > 1 and n != 1:
                    merged.append((n, dim))
        for n, dim in merged:
            open_names = [name for name in dim if name not in sizes]
            known = math.prod(sizes[name] for name in dim if name in sizes)
            if len(open_names) > 1 or known == 0 or n % known:
                raise ValueError(f"a dim of {n} is not ({' '.join(dim)}) of {self.text!r} with {sizes}")
            sizes |= dict.fromkeys(open_names, n // known)
            if math.prod(sizes[name] for name in dim) != n:
                raise ValueError(f"a dim of {n} is not ({' '.join(dim)}) of {self.text!r} with {sizes}")
        return sizes


def parse(text: str, *, reduced: str | Collection[str] = (), fixed: str | Collection[str] = ()) -> TextRule:
    """Parse ``operands -> results``.

    Args:
        reduced: names whose partial results are summed, as a list or separated by spaces.
        fixed: names that stay whole.

    Raises:
        UsageError: what was read, and where it stopped making sense.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise UsageError(f"sharding rule {text!r} has {len(sides) - 1} '->', a rule has one", hint=_EXAMPLE)
    operands, results = (tuple(_array(part, text) for part in side.split(",")) for side in sides)
    names = {name for array in (*operands, *results) for dim in array for name in dim}
    for array in (*operands, *results):
        flat = [name for dim in array for name in dim]
        twice = [name for name in dict.fromkeys(flat) if flat.count(name) > 1]
        if twice:
            raise UsageError(f"sharding rule {text!r} names {twice[0]!r} twice in one array", hint=_EXAMPLE)
    chosen = [frozenset(x.split() if isinstance(x, str) else x) for x in (reduced, fixed)]
    for which, given in zip(("reduced", "fixed"), chosen, strict=True):
        unknown = sorted(given - names)
        if unknown:
            raise UsageError(
                f"sharding rule {text!r} has no {unknown[0]!r} to be {which}",
                hint=f"its names are {', '.join(sorted(names))}",
            )
    in_results = {name for array in results for dim in array for name in dim}
    wrong = sorted((chosen[0] & in_results) | (chosen[0] & chosen[1]))
    if wrong:
        raise UsageError(
            f"sharding rule {text!r}: {wrong[0]!r} cannot be reduced",
            hint="what is reduced stands in operands only, and is not fixed",
        )
    return TextRule(text=text, operands=operands, results=results, reduced=chosen[0], fixed=chosen[1])


def _array(part: str, text: str) -> tuple[Names, ...]:
    dims: list[Names] = []
    at = 0
    stripped = part.strip()
    while at < len(stripped):
        match = _DIM.match(stripped, at)
        if match is None:
            raise UsageError(f"sharding rule {text!r}: {stripped[at:]!r} is no dim", hint=_EXAMPLE)
        name, group, _ = match.groups()
        dims.append((name,) if name else tuple(group.split()) if group else ())
        at = match.end()
    return tuple(dims)
