"""The traced loss as one flat list of operations, bodies of scans and calls included.

The sharding search decides per operation, so it needs every equation at one level: rematerialised
blocks and custom rules are entered, a scan's body appears once with its number of iterations, and
what a scan does to values between iterations (slicing stacked inputs, carrying, stacking results)
becomes operations of its own. Positions in the nested program are kept as keys, by which a plan
refers to values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import Rule, rule_of
from arena_jax.compiler.flops import array_bytes
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.problem import PARAMS
from arena_jax.compiler.residuals import Cast, casts_of, kept_shares
from arena_jax.compiler.rules.rule import Dims

ARGUMENTS = frozenset({"argmax", "argmin"})
# Operations that exist only here.
CARRY, UNSTACK, RESTACK = "scan carry", "scan slice", "scan stack"


@dataclass(frozen=True, eq=False)
class Value:
    """An array of the program."""

    number: int
    shape: tuple[int, ...]
    num_bytes: int
    is_float: bool


@dataclass(frozen=True, eq=False)
class Op:
    """One operation.

    Attributes:
        key: path of its equation; operations that are no equation have none.
        eqn: the equation.
        rule: how dims correspond; ``None`` where nobody described the primitive.
        operands: values it reads; ``None`` for literals. A scan's carry reads one that is made later.
        node: graph node it belongs to.
        times: how often it runs in one pass over the program.
        again: whether the backward pass runs it once more (a rematerialised block).
        can_constrain: whether the emitter can constrain its values.
        signature: equal for operations that do the same to arrays of the same shapes.
        kept: of each result, bytes kept for the backward pass per byte of it; others may read it otherwise, so
            that operations of one signature differ in this.
    """

    name: str
    key: str
    eqn: Any
    rule: Rule | None
    operands: list[Value | None]
    results: list[Value]
    node: int
    times: float
    again: bool
    can_constrain: bool
    signature: int
    kept: tuple[float, ...] = ()


@dataclass(frozen=True)
class Flat:
    """All operations in program order, and the values of the program's inputs.

    Attributes:
        leaves: leaf number -> value.
        batch: position among the batch leaves -> value.
        casts: number of a trainable leaf -> how it is cast, where it is to a narrower dtype.
    """

    ops: list[Op]
    leaves: dict[int, Value]
    batch: dict[int, Value]
    num_values: int
    casts: Mapping[int, Cast] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """Where in the nested program we are."""

    prefix: str
    node: int
    times: float = 1.0
    again: bool = False
    can_constrain: bool = True


@dataclass
class _Flattener:
    ops: list[Op] = field(default_factory=list)
    num_values: int = 0
    rules: dict[int, Rule | None] = field(default_factory=dict)
    signatures: dict[Any, int] = field(default_factory=dict)
    described: dict[int, str] = field(default_factory=dict)

    def value(self, aval: Any) -> Value:
        self.num_values += 1
        shape = tuple(getattr(aval, "shape", ()))
        atom = _Typed(aval)
        return Value(self.num_values - 1, shape, array_bytes(atom), "float" in str(getattr(aval, "dtype", "")))

    def run(self, key: str, eqn: Any, env: dict[Any, Value], place: _Place) -> None:
        name = eqn.primitive.name
        inputs = [None if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
        if name == "scan":
            self._scan(key, eqn, inputs, env, place)
            return
        rule = self._rule(eqn)
        if rule is None:
            body = _body(eqn)
            if body is not None and len(body.invars) == len(inputs):
                enters = name in _compat.INLINED or name in _compat.REMAT
                inner = _Place(
                    key, place.node, place.times, place.again or name in _compat.REMAT, place.can_constrain and enters
                )
                outs = self._body(body, inputs, inner)
                self._assign(eqn.outvars, outs, env)
                return
        results = [self.value(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, results, strict=True))
        self._add(name, key, eqn, rule, list(inputs), results, place)

    def _assign(self, outvars: Sequence[Any], outs: Sequence[Value | None], env: dict[Any, Value]) -> None:
        for var, out in zip(outvars, outs, strict=True):
            env[var] = self.value(var.aval) if out is None else out

    def _body(self, jaxpr: Any, inputs: Sequence[Value | None], place: _Place) -> list[Value | None]:
        env: dict[Any, Value] = {}
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            env[var] = self.value(var.aval) if value is None else value
        for var in jaxpr.constvars:
            env[var] = self.value(var.aval)
        for i, eqn in enumerate(jaxpr.eqns):
            self.run(f"{place.prefix}/{i}", eqn, env, place)
        return [None if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]

    def _scan(self, key: str, eqn: Any, inputs: Sequence[Value | None], env: dict[Any, Value], place: _Place) -> None:
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        num_consts, num_carry = _compat.scan_sizes(eqn)
        length = float(eqn.params["length"])
        inner = _Place(key, place.node, place.times * length, place.again, place.can_constrain)
        consts = list(inputs[:num_consts])
        carries: list[Op] = []
        entering: list[Value | None] = []
        for i, var in enumerate(jaxpr.invars[num_consts : num_consts + num_carry]):
            value = self.value(var.aval)
            start = inputs[num_consts + i]
            carries.append(self._add(CARRY, "", eqn, _same(value, 2), [start, value], [value], inner))
            entering.append(value)
        slices: list[Value | None] = []
        for var, stacked in zip(jaxpr.invars[num_consts + num_carry :], inputs[num_consts + num_carry :], strict=True):
            value = self.value(var.aval)
            self._add(UNSTACK, "", eqn, _stacking(value, eqn.params["length"], stack=False), [stacked], [value], inner)
            slices.append(value)
        outs = self._body(jaxpr, [*consts, *entering, *slices], inner)
        for carry, out in zip(carries, outs[:num_carry], strict=True):
            carry.operands[1] = out
        self._assign(eqn.outvars[:num_carry], outs[:num_carry], env)
        for var, out in zip(eqn.outvars[num_carry:], outs[num_carry:], strict=True):
            value = self.value(var.aval)
            one = self.value(_compat.drop_lead(var.aval)) if out is None else out
            self._add(RESTACK, "", eqn, _stacking(one, eqn.params["length"], stack=True), [out], [value], inner)
            env[var] = value

    def _add(
        self,
        name: str,
        key: str,
        eqn: Any,
        rule: Rule | None,
        operands: list[Value | None],
        results: list[Value],
        place: _Place,
    ) -> Op:
        op = Op(
            name=name,
            key=key,
            eqn=eqn,
            rule=rule,
            operands=operands,
            results=results,
            node=place.node,
            times=place.times,
            again=place.again,
            can_constrain=place.can_constrain and bool(key),
            signature=self._signature(name, eqn, operands, results, place),
        )
        self.ops.append(op)
        return op

    def _rule(self, eqn: Any) -> Rule | None:
        if id(eqn) not in self.rules:
            rule = rule_of(eqn)
            if rule is not None and eqn.primitive.name in ARGUMENTS:
                # XLA compares the best of each part; results of parts do not combine by themselves.
                gone = rule.fixed
                rule = replace(rule, fixed=set(), reduced=dict.fromkeys(gone, eqn.primitive.name))
            self.rules[id(eqn)] = rule
        return self.rules[id(eqn)]

    def _signature(self, name: str, eqn: Any, operands: list[Value | None], results: list[Value], place: _Place) -> int:
        what = self._params(eqn) if name not in (CARRY, UNSTACK, RESTACK) else ""
        key = (
            name,
            what,
            place.times,
            place.again,
            place.can_constrain,
            tuple(None if v is None else (v.shape, v.num_bytes, v.is_float) for v in operands),
            tuple((v.shape, v.num_bytes) for v in results),
        )
        return self.signatures.setdefault(key, len(self.signatures))

    def _params(self, eqn: Any) -> str:
        """An equation's parameters as text, without addresses."""
        if id(eqn) not in self.described:
            items = (f"{k}={v}" for k, v in sorted(eqn.params.items()) if not callable(v))
            self.described[id(eqn)] = re.sub(r"0x[0-9a-f]+", "0x", ";".join(items))
        return self.described[id(eqn)]


def flatten(graph: Graph) -> Flat:
    """Flatten a graph whose scans are whole."""
    trace = graph.trace
    flattener = _Flattener()
    env: dict[Any, Value] = {var: flattener.value(var.aval) for var in trace.jaxpr.invars}
    for index, node in enumerate(graph.nodes):
        flattener.run(node.key, node.eqn, env, _Place("", index))
    leaves = {unit.leaf: env[var] for var, unit in graph.units.items()}
    batch = {i: env[var] for i, var in enumerate(trace.batch_vars)}
    trainable = {value.number: leaf for leaf, value in leaves.items() if trace.leaves[leaf].kind == PARAMS}
    made = {result.number for op in flattener.ops for result in op.results}
    shares = kept_shares(flattener.ops, trainable, set(range(flattener.num_values)) - made)
    ops = [replace(op, kept=tuple(shares.get(v.number, 0.0) for v in op.results)) for op in flattener.ops]
    casts = {trainable[number]: cast for number, cast in casts_of(ops, trainable).items()}
    return Flat(ops, leaves, batch, flattener.num_values, casts)


@dataclass(frozen=True)
class _Typed:
    aval: Any


def _body(eqn: Any) -> Any:
    try:
        return _compat.inner_jaxpr(eqn)[0]
    except KeyError:
        return None


def _dims(shape: tuple[int, ...], first: int = 0) -> tuple[Dims, dict[int, int]]:
    dims = tuple((first + i,) if size > 1 else () for i, size in enumerate(shape))
    return dims, {first + i: size for i, size in enumerate(shape) if size > 1}


def _same(value: Value, num_operands: int) -> Rule:
    """Operands and result lie alike."""
    dims, sizes = _dims(value.shape)
    return Rule([dims] * num_operands, [dims], sizes)


def _stacking(value: Value, length: int, *, stack: bool) -> Rule:
    """A value beside the stack of ``length`` of them."""
    dims, sizes = _dims(value.shape, 1)
    stacked: Dims = ((0,), *dims)
    pair = ([dims], [stacked]) if stack else ([stacked], [dims])
    return Rule(*pair, {0: length, **sizes}, fixed={0})
