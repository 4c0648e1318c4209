"""Split the optimizer step over pipeline stages by data flow.

The step is traced over whole leaves, as on one device. Every equation is then placed: where its
largest operand lives, or in pieces where its operands are pieces of one stacked leaf, or nowhere in
particular when it depends on no parameter (schedules, counters: each stage computes its own). What
couples leaves of several stages, as a global norm does, becomes a few scalars that travel between
stages; everything else stays at home. Equations of equal depth on one stage form one program.

Correctness never depends on the placement: a value needed elsewhere is moved there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import ELEMENTWISE, REDUCTIONS, rule_of
from arena_jax.compiler.trace import inline

# Primitives whose parameters hold no shapes, so that they run on pieces as they stand.
_SHAPELESS = ELEMENTWISE | frozenset(REDUCTIONS) | {"transpose", "squeeze", "dot_general"}
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "prod": jnp.multiply,
}


@dataclass(frozen=True, order=True)
class Slot:
    """Where a leaf, or the rows ``[start, stop)`` of it, lives. ``stage=None``: a copy on every stage."""

    stage: int | None
    start: int | None = None
    stop: int | None = None


Home = tuple[Slot, ...]
"""Where a whole leaf lives: one slot, or its pieces in order."""


@dataclass(eq=False)
class Value:
    """An array of the split step, on one stage; ``stage=None`` can be computed on any."""

    shape: tuple[int, ...]
    dtype: Any
    stage: int | None
    maker: "Operation | None" = None
    input_key: Any = None


@dataclass(eq=False)
class Operation:
    """A computation on one stage, or (``run=None``) a transfer to it."""

    stage: int | None
    run: Callable[[list[Any]], list[Any]] | None
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class _Pieces:
    """A leaf-sized value in pieces along one dim."""

    dim: int
    parts: tuple[tuple[Value, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class UpdateProgram:
    """Operations of one depth on one stage."""

    stage: int
    depth: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operations: tuple[Operation, ...]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        known: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))

        def need(value: Value) -> Any:
            if value not in known:
                assert value.maker is not None
                assert value.maker.run is not None
                made = value.maker.run([need(v) for v in value.maker.inputs])
                known.update(zip(value.maker.outputs, made, strict=True))
            return known[value]

        for operation in self.operations:
            for value in operation.outputs:
                need(value)
        return [need(v) for v in self.outputs]


@dataclass(frozen=True, kw_only=True)
class SplitUpdate:
    """The split optimizer step.

    Attributes:
        programs: in order of execution.
        transfers: ``(depth, source, target)``: copied after the programs of that depth.
        parameter_homes, optimizer_homes: where each leaf lives.
        results: input key -> the value that replaces it.
    """

    programs: tuple[UpdateProgram, ...]
    transfers: tuple[tuple[int, Value, Value], ...]
    parameter_homes: tuple[Home, ...]
    optimizer_homes: tuple[Home, ...]
    results: dict[Any, Value]


def split_update(
    closed: Any,
    parameter_homes: Sequence[Home],
    num_optimizer: int,
    loss_stage: int,
    num_stages: int,
    weighted: bool,
) -> SplitUpdate:
    """Place the equations of the flat update.

    Args:
        closed: jaxpr of ``flat_update``: inputs gradients, weight, loss sum, optimizer, parameters.
        parameter_homes: where each parameter (and its gradient) lives.
        num_optimizer: number of optimizer leaves.
        loss_stage: the stage that holds the loss sum, and the weight where the loss has its own.
        weighted: whether it has; otherwise every stage knows the weight.
    """
    flat = jax.make_jaxpr(lambda *args: inline_selecting(closed.jaxpr, list(closed.consts), list(args)))(
        *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    )
    scalar_homes = ((Slot(loss_stage if weighted else None),), (Slot(loss_stage),))
    homes: list[Home] = [(Slot(None),)] * num_optimizer
    # A leaf's home follows from its new value's; its new value's may follow from the leaf's.
    for _ in range(4):
        placer = _Placer(flat, parameter_homes, homes, scalar_homes)
        settled = placer.optimizer_homes(homes)
        if settled == homes:
            break
        homes = settled
    placer = _Placer(flat, parameter_homes, homes, scalar_homes)
    return placer.finish(homes, num_stages)


def inline_selecting(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    """As :func:`inline`, with every ``cond`` turned into a select over both branches.

    A branch may couple all leaves (``MultiSteps`` around ``clip_by_global_norm``); as straight-line
    code it can be placed equation by equation.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in _compat.INLINED or name in ("custom_jvp_call", "custom_vjp_call"):
            body, body_consts = _compat.inner_jaxpr(eqn)
            outs = inline_selecting(body, body_consts, values)
        elif name == "cond":
            branches = [inline_selecting(*_compat.open_jaxpr(branch), values[1:]) for branch in eqn.params["branches"]]
            which = jnp.clip(values[0], 0, len(branches) - 1)
            which = which.astype(bool) if len(branches) == 2 else which
            outs = [lax.select_n(jnp.broadcast_to(which, jnp.shape(c[0])), *c) for c in zip(*branches, strict=True)]
            outs = inline_flat(lambda *xs: list(xs), outs)
        else:
            outs = _compat.bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def inline_flat(function: Callable[..., list[Any]], args: list[Any]) -> list[Any]:
    """Call a function so that nested jits in it are inlined as well."""
    closed = jax.make_jaxpr(function)(*args)
    return inline(closed.jaxpr, list(closed.consts), args)


class _Placer:
    """One pass over the equations."""

    def __init__(
        self, flat: Any, parameter_homes: Sequence[Home], optimizer_homes: Sequence[Home], scalar_homes: Sequence[Home]
    ):
        self.parameter_homes = tuple(parameter_homes)
        self.moved: dict[tuple[Value, int], Value] = {}
        jaxpr = flat.jaxpr
        count = len(parameter_homes)
        keys = [("gradient", i) for i in range(count)]
        keys += [("weight", 0), ("loss", 0)]
        keys += [("optimizer", i) for i in range(len(optimizer_homes))]
        keys += [("parameter", i) for i in range(count)]
        homes = [*parameter_homes, *scalar_homes, *optimizer_homes, *parameter_homes]
        self.env: dict[Any, Value | _Pieces] = {}
        for var, key, home in zip(jaxpr.invars, keys, homes, strict=True):
            self.env[var] = self._input(var.aval, key, home)
        for var, const in zip(jaxpr.constvars, flat.consts, strict=True):
            self.env[var] = self._constant(const)
        for eqn in jaxpr.eqns:
            for var, value in zip(eqn.outvars, self._place(eqn), strict=True):
                self.env[var] = value
        outs = [self._read(a) for a in jaxpr.outvars]
        self.new_params, self.new_optimizer = outs[:count], outs[count:]

    def optimizer_homes(self, current: Sequence[Home]) -> list[Home]:
        homes: list[Home] = []
        for value in self.new_optimizer:
            if isinstance(value, Value):
                homes.append((Slot(value.stage),))
            elif value.dim == 0:
                homes.append(tuple(Slot(v.stage, start, stop) for v, start, stop in value.parts))
            else:
                homes.append((Slot(value.parts[0][0].stage),))
        return homes

    def finish(self, optimizer_homes: Sequence[Home], num_stages: int) -> SplitUpdate:
        results: dict[Any, Value] = {}
        pairs = [
            ("parameter", i, v, h) for i, (v, h) in enumerate(zip(self.new_params, self.parameter_homes, strict=True))
        ]
        pairs += [
            ("optimizer", i, v, h) for i, (v, h) in enumerate(zip(self.new_optimizer, optimizer_homes, strict=True))
        ]
        for kind, i, value, home in pairs:
            for slot in home:
                stages = range(num_stages) if slot.stage is None else (slot.stage,)
                for stage in stages:
                    part = value
                    if slot.start is not None:
                        assert slot.stop is not None
                        part = self._part(value, 0, slot.start, slot.stop)
                    results[kind, i, Slot(stage, slot.start, slot.stop)] = self._at(self._whole(part), stage)
        return _assemble(results, self.parameter_homes, tuple(optimizer_homes))

    # Values and where they are.

    def _input(self, aval: Any, key: Any, home: Home) -> Value | _Pieces:
        if len(home) == 1 and home[0].start is None:
            return Value(tuple(aval.shape), aval.dtype, home[0].stage, input_key=(*key, home[0]))
        parts = []
        for slot in home:
            assert slot.start is not None
            assert slot.stop is not None
            shape = (slot.stop - slot.start, *aval.shape[1:])
            parts.append((Value(shape, aval.dtype, slot.stage, input_key=(*key, slot)), slot.start, slot.stop))
        return _Pieces(0, tuple(parts))

    def _constant(self, value: Any) -> Value:
        array = np.asarray(value)
        return self._operation(None, lambda _: [value], [], [(array.shape, array.dtype)])[0]

    def _read(self, atom: Any) -> Value | _Pieces:
        return self._constant(atom.val) if isinstance(atom, _compat.Literal) else self.env[atom]

    def _operation(
        self, stage: int | None, run: Any, inputs: list[Value], results: list[tuple[Any, Any]]
    ) -> list[Value]:
        operation = Operation(stage, run, inputs)
        operation.outputs = [Value(tuple(shape), dtype, stage, maker=operation) for shape, dtype in results]
        return operation.outputs

    def _at(self, value: Value, stage: int | None) -> Value:
        """The value on a stage, moved there if it lives on another."""
        if value.stage == stage or stage is None:
            return value
        if value.stage is None:
            # Computed where it is needed; pinning it gives it a place among the outputs.
            return self._operation(stage, lambda a: a, [value], [(value.shape, value.dtype)])[0]
        if (value, stage) not in self.moved:
            self.moved[value, stage] = self._operation(stage, None, [value], [(value.shape, value.dtype)])[0]
        return self.moved[value, stage]

    def _whole(self, value: Value | _Pieces) -> Value:
        if isinstance(value, Value):
            return value
        stage = value.parts[0][0].stage
        parts = [self._at(part, stage) for part, _, _ in value.parts]
        shape = list(parts[0].shape)
        shape[value.dim] = sum(stop - start for _, start, stop in value.parts)
        return self._operation(
            stage, lambda a: [jnp.concatenate(a, axis=value.dim)], parts, [(tuple(shape), parts[0].dtype)]
        )[0]

    def _part(self, value: Value | _Pieces, dim: int, start: int, stop: int) -> Value:
        """Rows ``[start, stop)`` of a value along ``dim``."""
        if isinstance(value, _Pieces):
            if value.dim == dim:
                for part, first, last in value.parts:
                    if (first, last) == (start, stop):
                        return part
            value = self._whole(value)
        shape = list(value.shape)
        shape[dim] = stop - start
        return self._operation(
            value.stage,
            lambda a: [lax.slice_in_dim(a[0], start, stop, axis=dim)],
            [value],
            [(tuple(shape), value.dtype)],
        )[0]

    # Equations.

    def _place(self, eqn: Any) -> list[Value | _Pieces]:
        operands = [self._read(a) for a in eqn.invars]
        if any(isinstance(v, _Pieces) for v in operands):
            placed = self._place_pieces(eqn, operands)
            if placed is not None:
                return placed
        values = [self._whole(v) for v in operands]
        homed = [v for v in values if v.stage is not None]
        stage = max(homed, key=lambda v: (int(np.prod(v.shape)), -(v.stage or 0))).stage if homed else None
        inputs = [self._at(v, stage) if v.stage is not None else v for v in values]
        results = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        return list(self._operation(stage, lambda a: _compat.bind(eqn, a), inputs, results))

    def _place_pieces(self, eqn: Any, operands: list[Value | _Pieces]) -> list[Value | _Pieces] | None:
        """Run an equation piece by piece, or ``None`` where it cannot be."""
        rule = rule_of(eqn)
        name = eqn.primitive.name
        if rule is None or name not in _SHAPELESS | {"broadcast_in_dim", "reshape"}:
            return None
        lead = next(v for v in operands if isinstance(v, _Pieces))
        factors = {
            dims[value.dim][0]
            for value, dims in zip(operands, rule.operands, strict=True)
            if isinstance(value, _Pieces) and dims[value.dim]
        }
        if len(factors) != 1 or factors & rule.fixed:
            return None
        (factor,) = factors
        if sum(stop - start for _, start, stop in lead.parts) != rule.sizes[factor]:
            return None
        columns: list[list[Value]] = []
        for value, dims in zip(operands, rule.operands, strict=True):
            where = [i for i, dim in enumerate(dims) if factor in dim]
            if not where:
                whole = self._whole(value)
                columns.append(
                    [self._at(whole, part.stage) if whole.stage is not None else whole for part, _, _ in lead.parts]
                )
            elif dims[where[0]] != (factor,):
                return None
            else:
                columns.append([self._at(self._part(value, where[0], a, b), p.stage) for p, a, b in lead.parts])
        made = [
            self._run_piece(eqn, rule, factor, [column[k] for column in columns], part.stage, stop - start)
            for k, (part, start, stop) in enumerate(lead.parts)
        ]
        out: list[Value | _Pieces] = []
        for i, dims in enumerate(rule.results):
            pieces = [results[i] for results in made]
            where = [d for d, dim in enumerate(dims) if factor in dim]
            if where:
                scale = int(np.prod([rule.sizes[f] for f in dims[where[0]] if f != factor]))
                parts = tuple((v, a * scale, b * scale) for v, (_, a, b) in zip(pieces, lead.parts, strict=True))
                out.append(_Pieces(where[0], parts))
            else:
                out.append(self._combine(pieces, rule.reduced[factor]))
        return out

    def _run_piece(
        self, eqn: Any, rule: Any, factor: int, inputs: list[Value], stage: int | None, size: int
    ) -> list[Value]:
        shapes = []
        for dims, var in zip(rule.results, eqn.outvars, strict=True):
            shape = list(var.aval.shape)
            for d, dim in enumerate(dims):
                if factor in dim:
                    shape[d] = shape[d] // rule.sizes[factor] * size
            shapes.append(tuple(shape))
        params = dict(eqn.params)
        if eqn.primitive.name == "broadcast_in_dim":
            params["shape"] = shapes[0]
        elif eqn.primitive.name == "reshape":
            params["new_sizes"] = shapes[0]
        piece = eqn.replace(params=params)
        results = [(shape, var.aval.dtype) for shape, var in zip(shapes, eqn.outvars, strict=True)]
        return self._operation(stage, lambda a: _compat.bind(piece, a), inputs, results)

    def _combine(self, pieces: list[Value], kind: str) -> Value:
        stage = pieces[0].stage
        inputs = [self._at(v, stage) for v in pieces]
        combine = _COMBINE[kind]

        def run(arrays: list[Any]) -> list[Any]:
            total = arrays[0]
            for array in arrays[1:]:
                total = combine(total, array)
            return [total]

        return self._operation(stage, run, inputs, [(pieces[0].shape, pieces[0].dtype)])[0]


def _assemble(
    results: dict[Any, Value], parameter_homes: tuple[Home, ...], optimizer_homes: tuple[Home, ...]
) -> SplitUpdate:
    """Group the operations that the results need into programs by depth and stage."""
    depth: dict[Value, int] = {}
    grouped: dict[tuple[int, int], list[Operation]] = {}
    transfers: dict[tuple[Value, Value], int] = {}
    visited: set[Operation] = set()

    def depth_of(value: Value) -> int:
        """Depth at which a value exists; visits makers in order. Recursion is bounded by the jaxpr's length."""
        if value in depth:
            return depth[value]
        maker = value.maker
        at = 0 if maker is None else max((depth_of(v) for v in maker.inputs), default=0)
        if maker is not None and maker.run is None:
            transfers[maker.inputs[0], value] = at
            at += 1
        depth[value] = at
        if maker is not None and maker not in visited:
            visited.add(maker)
            for other in maker.outputs:
                depth[other] = at
            if maker.run is not None and maker.stage is not None:
                grouped.setdefault((at, maker.stage), []).append(maker)
        return at

    for value in _in_order(results.values()):
        depth_of(value)
    wanted = set(results.values()) | {source for source, _ in transfers}
    programs = []
    made_in = {v: key for key, operations in grouped.items() for op in operations for v in op.outputs}
    inputs_of: dict[tuple[int, int], list[Value]] = {}
    for key, operations in grouped.items():
        inputs_of[key] = _external_inputs(operations, made_in, key)
        wanted.update(v for v in inputs_of[key] if v in made_in)
    for key in sorted(grouped):
        outputs = [v for op in grouped[key] for v in op.outputs if v in wanted]
        programs.append(
            UpdateProgram(
                stage=key[1],
                depth=key[0],
                inputs=tuple(inputs_of[key]),
                outputs=tuple(outputs),
                operations=tuple(grouped[key]),
            )
        )
    moves = tuple(sorted(((at, s, t) for (s, t), at in transfers.items()), key=lambda move: move[0]))
    return SplitUpdate(
        programs=tuple(programs),
        transfers=moves,
        parameter_homes=parameter_homes,
        optimizer_homes=optimizer_homes,
        results=results,
    )


def _in_order(values: Any) -> list[Value]:
    """All values that the given ones need, makers before users, without deep recursion."""
    order: list[Value] = []
    seen: set[Value] = set()
    for root in values:
        stack = [(root, False)]
        while stack:
            value, ready = stack.pop()
            if ready:
                order.append(value)
                continue
            if value in seen:
                continue
            seen.add(value)
            stack.append((value, True))
            if value.maker is not None:
                stack.extend((v, False) for v in value.maker.inputs if v not in seen)
    return order


def _external_inputs(
    operations: Sequence[Operation], made_in: dict[Value, tuple[int, int]], key: tuple[int, int]
) -> list[Value]:
    """What a program takes in: inputs of the step, and values of other programs or transfers."""
    found: dict[Value, None] = {}
    pending = [v for op in operations for v in op.inputs]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen or made_in.get(value) == key:
            continue
        seen.add(value)
        maker = value.maker
        if maker is not None and maker.stage is None:
            pending.extend(maker.inputs)  # computed inside, wherever it is needed
        else:
            found[value] = None
    return list(found)
