"""The rule of a loop, a branch or a call, put together from the rules of what is inside.

Every dim starts as one *part*. An equation inside says which parts are the same and which cannot be
sharded; a dim that is split or merged on the way is divided into finer parts. What is left at the
end, read off the operands and results, is the rule of the whole. Where partial results would have to
be combined inside, the part counts as fixed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.rules.rule import Factors, Rule, shape_of

Lookup = Callable[[Any], Rule | None]
"""How to find the rule of an equation inside."""


def composed(eqn: Any, lookup: Lookup) -> Rule | None:
    """The rule of an equation with bodies, ``None`` for one without."""
    parts = _Parts(lookup)
    operands = [parts.array(shape_of(a)) for a in eqn.invars]
    results = parts.results(eqn, operands)
    if results is None:
        return None
    parts.fix_repeated()
    factors = Factors()
    number: dict[_Part, tuple[int, ...]] = {}
    fixed: set[int] = set()

    def dim(root: "_Part") -> tuple[int, ...]:
        out: tuple[int, ...] = ()
        for part in root.leaves():
            if part not in number:
                number[part] = factors.new(part.size)
                if part.is_fixed:
                    fixed.update(number[part])
            out = (*out, *number[part])
        return out

    return Rule(
        [tuple(dim(p) for p in array) for array in operands],
        [tuple(dim(p) for p in array) for array in results],
        factors.sizes,
        fixed=fixed,
    )


class _Part:
    """A dim, or part of one; found to be the same as another, or divided into finer parts, major first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fixed = False
        self._same: _Part | None = None
        self._finer: tuple[_Part, ...] = ()

    def root(self) -> "_Part":
        part = self
        while part._same is not None:
            part = part._same
        return part

    def leaves(self) -> list["_Part"]:
        part = self.root()
        if not part._finer:
            return [part] if part.size != 1 else []
        return [leaf for finer in part._finer for leaf in finer.leaves()]

    @property
    def is_fixed(self) -> bool:
        return self._fixed

    def fix(self) -> None:
        for leaf in self.leaves():
            leaf._fixed = True

    def divide(self, major: int) -> None:
        """Make a leaf two parts, the first of the given size."""
        self._finer = (_Part(major), _Part(self.size // major))
        for part in self._finer:
            part._fixed = self._fixed

    def become(self, other: "_Part") -> None:
        """Make a leaf the same as another leaf of its size."""
        if self is not other:
            other._fixed |= self._fixed
            self._same = other


def _equate(left: Sequence[_Part], right: Sequence[_Part]) -> None:
    """Declare two runs of parts the same; what overlaps without dividing is fixed."""
    lhs = [leaf for part in left for leaf in part.leaves()]
    rhs = [leaf for part in right for leaf in part.leaves()]
    while lhs and rhs:
        a, b = lhs.pop(0).root(), rhs.pop(0).root()
        if a._finer or b._finer:  # divided through an alias
            lhs, rhs = a.leaves() + lhs, b.leaves() + rhs
            continue
        if a.size == b.size:
            a.become(b)
            continue
        small, large = sorted((a, b), key=lambda part: part.size)
        if small.size == 0 or large.size % small.size:
            for part in (a, b, *lhs, *rhs):
                part.fix()
            return
        large.divide(small.size)
        lhs, rhs = a.leaves() + lhs, b.leaves() + rhs
    for part in (*lhs, *rhs):
        part.fix()


class _Parts:
    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._arrays: list[list[_Part]] = []

    def array(self, shape: Sequence[int]) -> list[_Part]:
        self._arrays.append([_Part(size) for size in shape])
        return self._arrays[-1]

    def fix_repeated(self) -> None:
        """A part that stands in two dims of one array (a square of something with itself) cannot be sharded."""
        for array in self._arrays:
            leaves = [leaf for part in array for leaf in part.leaves()]
            for leaf, times in Counter(leaves).items():
                if times > 1:
                    leaf.fix()

    def results(self, eqn: Any, operands: list[list[_Part]]) -> list[list[_Part]] | None:
        """The results of an equation, tied to its operands; ``None`` for an equation without bodies."""
        name = eqn.primitive.name
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            branches = [self._body(_compat.open_jaxpr(b)[0], operands[1:]) for b in eqn.params["branches"]]
            for other in branches[1:]:
                self._tie(other, branches[0])
            return branches[0]
        if name == "scan":
            return self._scan(eqn, operands)
        try:
            jaxpr, _ = _compat.inner_jaxpr(eqn)
        except KeyError:
            return None
        return self._body(jaxpr, operands) if len(jaxpr.invars) == len(operands) else None

    def _while(self, eqn: Any, operands: list[list[_Part]]) -> list[list[_Part]]:
        test, body = (_compat.open_jaxpr(eqn.params[key])[0] for key in ("cond_jaxpr", "body_jaxpr"))
        num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = operands[num_test + num_body :]
        # The loop runs until its test, one number, says so for all.
        self._body(test, [*operands[:num_test], *carry])
        outs = self._body(body, operands[num_test:])
        self._tie(outs, carry)
        return carry

    def _scan(self, eqn: Any, operands: list[list[_Part]]) -> list[list[_Part]]:
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        num_consts, num_carry = _compat.scan_sizes(eqn)
        stacked = operands[num_consts + num_carry :]
        for array in stacked:
            array[0].fix()
        outs = self._body(jaxpr, [*operands[: num_consts + num_carry], *(array[1:] for array in stacked)])
        carry = operands[num_consts : num_consts + num_carry]
        self._tie(outs[:num_carry], carry)
        lead = [_Part(eqn.params["length"]) for _ in outs[num_carry:]]
        for part in lead:
            part.fix()
        return [*carry, *([part, *out] for part, out in zip(lead, outs[num_carry:], strict=True))]

    def _tie(self, arrays: Sequence[list[_Part]], others: Sequence[list[_Part]]) -> None:
        for array, other in zip(arrays, others, strict=True):
            for a, b in zip(array, other, strict=True):
                _equate([a], [b])

    def _body(self, jaxpr: Any, inputs: Sequence[list[_Part]]) -> list[list[_Part]]:
        env: dict[Any, list[_Part]] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.array(shape_of(var))

        def read(atom: Any) -> list[_Part]:
            return self.array(shape_of(atom)) if isinstance(atom, _compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            arrays = [read(a) for a in eqn.invars]
            rule = self._lookup(eqn)
            if rule is not None:
                outs = self._by_rule(eqn, rule, arrays)
            else:
                inside = self.results(eqn, arrays)
                outs = self._unknown(eqn, arrays) if inside is None else inside
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _by_rule(self, eqn: Any, rule: Rule, arrays: list[list[_Part]]) -> list[list[_Part]]:
        factors = {f: _Part(size) for f, size in rule.sizes.items()}
        outs = [self.array(shape_of(v)) for v in eqn.outvars]
        described = [*zip(arrays, rule.operands, strict=True), *zip(outs, rule.results, strict=True)]
        for array, dims in described:
            for part, dim in zip(array, dims, strict=True):
                if dim:
                    _equate([part], [factors[f] for f in dim])
                elif part.size != 1:
                    part.fix()
        for f in (*rule.fixed, *rule.reduced):
            factors[f].fix()
        return outs

    def _unknown(self, eqn: Any, arrays: list[list[_Part]]) -> list[list[_Part]]:
        outs = [self.array(shape_of(v)) for v in eqn.outvars]
        for array in (*arrays, *outs):
            for part in array:
                part.fix()
        return outs
