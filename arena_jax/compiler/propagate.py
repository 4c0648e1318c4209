"""Carry partition specs through equations, and account for what they cost.

Given the specs of a graph's inputs, every equation is partitioned the way its largest sharded
operand suggests (:mod:`arena_jax.compiler.dims`). Operands that lie otherwise are gathered; partial
results are reduced at once; an operand that is whole where others are split owes a reduction of its
cotangent in the backward pass (Megatron's *g* and *f*).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import ELEMENTWISE, Rule, rule_of
from arena_jax.compiler.flops import HEAVY, array_bytes, eqn_flops

DP, TP = "dp", "tp"
Axes = tuple[str | None, ...]
"""Per dim the axis that shards it."""

# Values whose layout is worth fixing for XLA: results of real work, and joins of two streams.
_CONSTRAINED = HEAVY | {"gather"}
# Computed inside whatever reads them, so that their results never reach memory.
_FREE = frozenset({"broadcast_in_dim", "iota"})
_JOINS = frozenset({"add", "add_any", "sub", "mul", "select_n", "concatenate"})


@dataclass
class Work:
    """Cost of equations, for all rows of the trace; times the number of runs of their body.

    Attributes:
        flops: dtype -> FLOPs of one device, forward.
        moved_bytes: bytes one device streams for operations that are not large products, forward.
        num_ops: equations run, forward.
        collectives: (axis, kind, backward) -> [bytes, count].
        saved_bytes: bytes one device keeps for the backward pass.
    """

    flops: dict[str, float] = field(default_factory=dict)
    moved_bytes: float = 0.0
    num_ops: float = 0.0
    collectives: dict[tuple[str, str, bool], list[float]] = field(default_factory=dict)
    saved_bytes: float = 0.0

    def add_flops(self, dtype: str, flops: float) -> None:
        self.flops[dtype] = self.flops.get(dtype, 0.0) + flops

    def add_collective(self, axis: str, kind: str, backward: bool, num_bytes: float, count: float = 1.0) -> None:
        entry = self.collectives.setdefault((axis, kind, backward), [0.0, 0.0])
        entry[0] += num_bytes
        entry[1] += count

    def merge(self, other: "Work", times: float = 1.0) -> None:
        for dtype, flops in other.flops.items():
            self.add_flops(dtype, flops * times)
        self.moved_bytes += other.moved_bytes * times
        self.num_ops += other.num_ops * times
        self.saved_bytes += other.saved_bytes * times
        for (axis, kind, backward), (num_bytes, count) in other.collectives.items():
            self.add_collective(axis, kind, backward, num_bytes * times, count * times)


class Propagator:
    """Propagates specs on one logical mesh.

    Args:
        dp, tp: axis sizes.

    Attributes:
        specs: value key -> axes, for values that a plan should constrain.
        unknown: names of primitives without a rule that were met.
    """

    def __init__(self, dp: int, tp: int) -> None:
        self._sizes = {DP: dp, TP: tp}
        self._axes = [axis for axis, size in self._sizes.items() if size > 1]
        self._rules: dict[int, Rule | None] = {}
        self._memo: dict[Any, tuple[list[Axes], Work, dict[str, Axes]]] = {}
        self.specs: dict[str, Axes] = {}
        self.unknown: dict[str, None] = {}

    def run(self, equations: Sequence[tuple[str, Any]], env: dict[Any, Axes], params: set[Any]) -> list[Work]:
        """Propagate through equations in order, one :class:`Work` each.

        Args:
            env: variable -> axes; extended by all results.
            params: variables that hold parameters: their gradients are reduced once a step and
                accounted for elsewhere. Extended by casts and views of parameters.
        """
        works = []
        for key, eqn in equations:
            inputs = [self._read(a, env) for a in eqn.invars]
            is_param = [not isinstance(a, _compat.Literal) and a in params for a in eqn.invars]
            results, work = self._eqn_once(key, eqn, inputs, is_param)
            env.update(zip(eqn.outvars, results, strict=True))
            if any(is_param) and all(
                p or isinstance(a, _compat.Literal) for p, a in zip(is_param, eqn.invars, strict=True)
            ):
                params.update(eqn.outvars)
            works.append(work)
        return works

    def local_bytes(self, atom: Any, axes: Axes) -> float:
        """Bytes of one device's share of a value."""
        size = float(array_bytes(atom))
        for axis in axes:
            if axis is not None:
                size /= self._sizes[axis]
        return size

    def _read(self, atom: Any, env: dict[Any, Axes]) -> Axes:
        rank = len(getattr(atom.aval, "shape", ()))
        return (None,) * rank if isinstance(atom, _compat.Literal) else env.get(atom, (None,) * rank)

    def _eqn_once(self, key: str, eqn: Any, inputs: list[Axes], is_param: list[bool]) -> tuple[list[Axes], Work]:
        """Results and work of an equation. A search runs the same program many times over with few specs
        changed, so what an equation did to the same operands is remembered."""
        at = key, id(eqn), tuple(inputs), tuple(is_param)
        if at not in self._memo:
            outer, self.specs = self.specs, {}
            work = Work()
            results = self._eqn(key, eqn, list(inputs), is_param, work)
            self._memo[at] = results, work, self.specs
            self.specs = outer
        results, work, specs = self._memo[at]
        self.specs.update(specs)
        return results, work

    def _eqn(self, key: str, eqn: Any, inputs: list[Axes], is_param: list[bool], work: Work) -> list[Axes]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(key, eqn, inputs, is_param, work)
        rule = self._rule(eqn)
        if rule is not None:
            return self._by_rule(key, eqn, rule, inputs, is_param, work)
        try:
            jaxpr, _ = _compat.inner_jaxpr(eqn)
        except KeyError:
            jaxpr = None
        if jaxpr is not None and len(jaxpr.invars) == len(inputs):
            return self._body(key, jaxpr, inputs, is_param, work)
        return self._opaque(eqn, inputs, work)

    def _rule(self, eqn: Any) -> Rule | None:
        if id(eqn) not in self._rules:
            self._rules[id(eqn)] = rule_of(eqn)
        return self._rules[id(eqn)]

    def _body(self, key: str, jaxpr: Any, inputs: list[Axes], is_param: list[bool], work: Work) -> list[Axes]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        params = {v for v, p in zip(jaxpr.invars, is_param, strict=True) if p}
        for part in self.run([(f"{key}/{i}", e) for i, e in enumerate(jaxpr.eqns)], env, params):
            work.merge(part)
        return [self._read(a, env) for a in jaxpr.outvars]

    def _scan(self, key: str, eqn: Any, inputs: list[Axes], is_param: list[bool], work: Work) -> list[Axes]:
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        num_consts, num_carry = _compat.scan_sizes(eqn)
        stacked = num_consts + num_carry
        inner = [axes if i < stacked else axes[1:] for i, axes in enumerate(inputs)]
        part = Work()
        outs: list[Axes] = []
        for _ in range(3):  # a carry that lies differently after one iteration settles soon
            part = Work()
            outs = self._body(key, jaxpr, inner, is_param, part)
            if outs[:num_carry] == inner[num_consts:stacked]:
                break
            inner[num_consts:stacked] = outs[:num_carry]
        work.merge(part, eqn.params["length"])
        return [axes if i < num_carry else (None, *axes) for i, axes in enumerate(outs)]

    def _opaque(self, eqn: Any, inputs: list[Axes], work: Work) -> list[Axes]:
        """An equation nobody described: operands are gathered, every device runs all of it."""
        self.unknown[eqn.primitive.name] = None
        for atom, axes in zip(eqn.invars, inputs, strict=True):
            self._gather(atom, axes, {a for a in axes if a}, work)
        work.add_flops("float32", eqn_flops(eqn))
        work.num_ops += 1
        return [(None,) * len(getattr(v.aval, "shape", ())) for v in eqn.outvars]

    def _by_rule(
        self, key: str, eqn: Any, rule: Rule, inputs: list[Axes], is_param: list[bool], work: Work
    ) -> list[Axes]:
        chosen: dict[str, int] = {}
        for axis in self._axes:
            factor = self._vote(axis, eqn, rule, inputs, set(chosen.values()))
            if factor is not None:
                chosen[axis] = factor
        for axis in self._axes:
            self._align(axis, chosen.get(axis), eqn, rule, inputs, is_param, work)
        results = [self._result_axes(dims, chosen, rule, v) for dims, v in zip(rule.results, eqn.outvars, strict=True)]
        for axis, factor in chosen.items():
            if factor in rule.reduced:
                total = sum(self.local_bytes(v, axes) for v, axes in zip(eqn.outvars, results, strict=True))
                work.add_collective(axis, "all_reduce", False, total)
        self._count(eqn, chosen, results, work)
        name = eqn.primitive.name
        if name in _CONSTRAINED or (name in _JOINS and _joins_streams(eqn)):
            for i, axes in enumerate(results):
                self.specs[f"{key}:{i}"] = axes
        return results

    def _vote(self, axis: str, eqn: Any, rule: Rule, inputs: list[Axes], taken: set[int]) -> int | None:
        """The factor that the largest operand sharded over ``axis`` suggests."""
        votes: dict[int, float] = {}
        for atom, axes, dims in zip(eqn.invars, inputs, rule.operands, strict=True):
            for dim, name in zip(dims, axes, strict=True):
                if name == axis and dim and dim[0] not in rule.fixed and dim[0] not in taken:
                    votes[dim[0]] = votes.get(dim[0], 0.0) + array_bytes(atom)
        divisible = {f: v for f, v in votes.items() if rule.sizes[f] % self._sizes[axis] == 0}
        return max(divisible, key=lambda f: divisible[f]) if divisible else None

    def _align(
        self, axis: str, factor: int | None, eqn: Any, rule: Rule, inputs: list[Axes], is_param: list[bool], work: Work
    ) -> None:
        """Gather operands that lie otherwise; note cotangents that will be partial."""
        for i, (atom, axes, dims) in enumerate(zip(eqn.invars, inputs, rule.operands, strict=True)):
            if axis in axes:
                dim = dims[axes.index(axis)]
                if factor is None or not dim or dim[0] != factor:
                    self._gather(atom, axes, {axis}, work)
            elif factor is None or is_param[i] or eqn.primitive.name not in _CONSTRAINED:
                continue
            elif all(factor not in dim for dim in dims) and _is_float(atom):
                work.add_collective(axis, "all_reduce", True, self.local_bytes(atom, axes))

    def _gather(self, atom: Any, axes: Axes, gone: set[str], work: Work) -> None:
        for axis in gone:
            rest = tuple(None if a == axis else a for a in axes)
            size = self.local_bytes(atom, rest)
            work.add_collective(axis, "all_gather", False, size)
            if _is_float(atom):
                work.add_collective(axis, "all_gather", True, size)

    def _result_axes(self, dims: Sequence[tuple[int, ...]], chosen: dict[str, int], rule: Rule, var: Any) -> Axes:
        axes: list[str | None] = []
        for dim, size in zip(dims, var.aval.shape, strict=True):
            found = [axis for axis, factor in chosen.items() if dim and dim[0] == factor]
            fits = found and size % self._sizes[found[0]] == 0
            axes.append(found[0] if fits else None)
        return tuple(axes)

    def _count(self, eqn: Any, chosen: dict[str, int], results: list[Axes], work: Work) -> None:
        name = eqn.primitive.name
        share = 1.0
        for axis in chosen:
            share /= self._sizes[axis]
        work.num_ops += 1
        out_bytes = sum(self.local_bytes(v, axes) for v, axes in zip(eqn.outvars, results, strict=True))
        if name in HEAVY:
            work.add_flops(str(eqn.invars[0].aval.dtype), eqn_flops(eqn) * share)
        if name in ELEMENTWISE:
            # XLA fuses chains of these: about one write in three reaches memory.
            work.moved_bytes += out_bytes / 3
        elif name not in _FREE:
            work.moved_bytes += out_bytes
        if name in HEAVY or name in (
            "exp",
            "tanh",
            "logistic",
            "mul",
            "div",
            "rsqrt",
            "integer_pow",
            "max",
            "select_n",
            "erf",
        ):
            work.saved_bytes += out_bytes


def _is_float(atom: Any) -> bool:
    return "float" in str(getattr(atom.aval, "dtype", ""))


def _joins_streams(eqn: Any) -> bool:
    """Two operands of full size that are computed, not constants: a residual join."""
    shape = eqn.outvars[0].aval.shape
    full = [a for a in eqn.invars if not isinstance(a, _compat.Literal) and a.aval.shape == shape]
    return len(shape) > 1 and len(full) >= 2
