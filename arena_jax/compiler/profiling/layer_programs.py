"""What one device computes of one layer, as a program of its own, under a name that equal layers share.

The program of a layer under data parallelism alone is the layer at fewer rows; where parameters are
sharded, its operations run at local shapes (:mod:`.one_device`). Layers of any model whose programs
are equal, equation by equation, share a key, and so a measurement.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from arena_jax.compiler import _compat
from arena_jax.compiler.emit import Emitter
from arena_jax.compiler.graph import Graph, build_graph, split_scans
from arena_jax.compiler.intra_op.layout import DP, MeshShape, to_layout
from arena_jax.compiler.intra_op.sharding import Sharding, ShardingSearch
from arena_jax.compiler.layers import Layers
from arena_jax.compiler.problem import PARAMS, STATE, Problem
from arena_jax.compiler.profiling.one_device import NotLocalError, OneDevice, line_of, local_shape
from arena_jax.compiler.stages import Stage, StageGraph, cut_stages, is_differentiable
from arena_jax.compiler.trace import Trace, trace_loss
from arena_jax.errors import ArenaError

Run = Callable[[Sequence[tuple[str, Any]], dict[Any, Any]], None]
Structs = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """One layer on one device.

    Attributes:
        key: of everything that decides its time but the device.
        params, others, received: local shapes of its trainable parameters, of what else it holds or
            reads of the batch, and of what comes from layers before.
        owned: positions of the parameters that no earlier layer uses: it updates them.
    """

    key: str
    params: Structs
    others: Structs
    received: Structs
    owned: tuple[int, ...]
    _stage: Stage = field(repr=False)
    _outvars: Sequence[Any] = field(repr=False)
    _run: Run = field(repr=False)

    def forward(self, params: Sequence[Any], others: Sequence[Any], received: Sequence[Any]) -> list[Any]:
        """What it sends on and what it gives of the loss; the differentiable ones first."""
        smooth, rest = self._outputs(params, others, received)
        return smooth + rest

    def both(
        self,
        params: Sequence[Any],
        others: Sequence[Any],
        received: Sequence[Any],
        cotangents: Sequence[Any],
        sums: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Forward and backward pass: sums of gradients, cotangents of what was received, other outputs.

        Args:
            cotangents: as :meth:`cotangents` has them.
            sums: of gradients, like the parameters.
        """
        smooth = [jnp.issubdtype(x.dtype, jnp.floating) for x in received]

        def run(params: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = iter(floats)
            return self._outputs(
                params, others, [next(given) if s else x for s, x in zip(smooth, received, strict=True)]
            )

        floats = [x for s, x in zip(smooth, received, strict=True) if s]
        _, pull, rest = jax.vjp(run, list(params), floats, has_aux=True)
        gradients, back = pull(list(cotangents))
        return [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)], back, rest

    def cotangents(self) -> Structs:
        """Shapes of the cotangents that its backward pass starts from."""
        out = jax.eval_shape(lambda p, o, r: self._outputs(p, o, r)[0], self.params, self.others, self.received)
        return tuple(out)

    def _outputs(
        self, params: Sequence[Any], others: Sequence[Any], received: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        stage = self._stage
        env: dict[Any, Any] = {}
        env.update(zip(stage.params, params, strict=True))
        env.update(zip(_others(stage), others, strict=True))
        env.update(zip(stage.received, received, strict=True))
        self._run([(n.key, n.eqn) for n in stage.nodes], env)
        sent = [(is_differentiable(v), env[v]) for v in stage.sent]
        outputs = [(p == 0, _read(self._outvars[p], env)) for p in stage.outputs]
        return [x for s, x in sent + outputs if s], [x for s, x in sent + outputs if not s]


class LayerPrograms:
    """The layers' programs of one problem, under any sharding and number of microbatches."""

    def __init__(self, problem: Problem, trace: Trace, graph: Graph, layers: Layers, shardings: ShardingSearch) -> None:
        self._problem = problem
        self._trace = trace
        self._graph = graph
        self._layers = layers
        self._shardings = shardings
        self._cuts: dict[int, _Cut | None] = {}
        self._chains: dict[int, LayerProgram] = {}
        self._found: dict[tuple[int, int], tuple[Sharding, tuple[LayerProgram | None, ...]]] = {}

    def of(self, sharding: Sharding, num_microbatches: int) -> tuple[LayerProgram | None, ...]:
        """A program per layer; ``None`` for what cannot be run alone."""
        key = id(sharding), num_microbatches
        if key not in self._found:
            self._found[key] = sharding, self._of(sharding, num_microbatches)
        return self._found[key][1]

    def chain(self, sharding: Sharding, num_microbatches: int) -> LayerProgram | None:
        """All layers as one program; ``None`` where parameters are sharded."""
        if not _is_whole(sharding):
            return None
        cut = self._cut(max(self._trace.rows // num_microbatches // sharding.dp, 1))
        if cut is None:
            return None
        if cut.trace.rows not in self._chains:
            whole = replace(cut, stages=cut_stages(cut.graph, [0], with_state=False))
            lines = {id(n.eqn): line_of(n.eqn, n.eqn.params, n.eqn.invars, n.eqn.outvars) for n in cut.graph.nodes}
            run = Emitter(None, {}).run
            (stage,) = whole.stages.stages
            self._chains[cut.trace.rows] = _program(whole, stage, lambda v: tuple(v.aval.shape), lines, run)
        return self._chains[cut.trace.rows]

    def likes(self) -> tuple[str, ...]:
        """Per layer, a name that its programs of all sizes share; found without tracing anything."""
        cut = self._cut(self._trace.rows)
        return () if cut is None else tuple(_like(stage) for stage in cut.stages.stages)

    def update_key(self, program: LayerProgram | None) -> str:
        """Of the optimizer's update of what a layer owns; empty where there is nothing to update alone."""
        if program is None or not program.owned or not self._optimizer:
            return ""
        shapes = sorted(str(program.params[i]) for i in program.owned)
        return _digest(repr((self._optimizer, shapes)))

    @cached_property
    def _optimizer(self) -> str:
        """The optimizer's equations for one small parameter, without their constants; empty where it needs all."""
        struct = jax.ShapeDtypeStruct((8, 8), self._problem.of_kind(PARAMS)[0].dtype)
        try:
            jaxpr = jax.make_jaxpr(partial(updated, self._problem.optimizer))(*update_inputs(self._problem, [struct]))
        except Exception:  # the user's: one that is told parameters apart by their names, for instance
            return ""
        return re.sub(r"0x[0-9a-f]+|\d+\.\d+(e-?\d+)?", "", str(jaxpr))

    def _of(self, sharding: Sharding, num_microbatches: int) -> tuple[LayerProgram | None, ...]:
        rows = self._trace.rows // num_microbatches
        whole = _is_whole(sharding)
        cut = self._cut(max(rows // sharding.dp, 1) if whole else rows)
        if cut is None:
            return (None,) * self._layers.num_layers
        programs: list[LayerProgram | None] = []
        if whole:
            lines = {id(n.eqn): line_of(n.eqn, n.eqn.params, n.eqn.invars, n.eqn.outvars) for n in cut.graph.nodes}
            for stage in cut.stages.stages:
                run: Run = Emitter(None, {}).run
                programs.append(_program(cut, stage, lambda v: tuple(v.aval.shape), lines, run))
            return tuple(programs)
        if any(node.eqn.primitive.name == "scan" for node in cut.graph.nodes):
            return (None,) * self._layers.num_layers
        mesh = MeshShape(sharding.dp, sharding.tp)
        layouts = self._shardings.space(sharding.dp, sharding.tp).layouts(sharding.solution)
        shapes, lines, broken = _local_shapes(cut, sharding, mesh, OneDevice(layouts, mesh))
        for stage in cut.stages.stages:
            if any(id(node.eqn) in broken for node in stage.nodes):
                programs.append(None)
                continue
            run = OneDevice(layouts, mesh).run
            programs.append(_program(cut, stage, lambda v: shapes[v], lines, run))
        return tuple(programs)

    def _cut(self, rows: int) -> "_Cut | None":
        if rows not in self._cuts:
            self._cuts[rows] = self._cut_at(rows)
        return self._cuts[rows]

    def _cut_at(self, rows: int) -> "_Cut | None":
        trace, graph = self._trace, self._graph
        if rows != trace.rows:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the whole trace has said it
                    trace = trace_loss(self._problem.with_batch(rows), 1)
            except ArenaError:
                return None
            graph = build_graph(trace)
            if [n.eqn.primitive for n in graph.nodes] != [n.eqn.primitive for n in self._graph.nodes]:
                return None  # too few rows are another program
        splits: dict[int, list[int]] = {}
        for position in self._layers.starts:
            if position.iteration:
                splits.setdefault(position.node, []).append(position.iteration)
        graph, where = split_scans(graph, splits)
        starts = [where[p.node, p.iteration] for p in self._layers.starts]
        return _Cut(trace, graph, cut_stages(graph, starts, with_state=False))


def _is_whole(sharding: Sharding) -> bool:
    """Whether every device holds all parameters, so that devices differ in their rows only."""
    return sharding.tp == 1 and not any("dp" in str(axes) for axes in sharding.parameters.values())


def update_inputs(problem: Problem, params: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, Any, Any]:
    """Abstract inputs of :func:`updated`: parameters, sums of their gradients, optimizer state."""
    named = {str(i): struct for i, struct in enumerate(params)}
    sums = {k: jax.ShapeDtypeStruct(x.shape, problem.accumulation_dtype(x.dtype)) for k, x in named.items()}
    return named, sums, jax.eval_shape(problem.optimizer.init, named)


def updated(optimizer: optax.GradientTransformation, params: Any, sums: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state after an update."""
    gradients = jax.tree.map(lambda g, p: (g / jnp.ones((), g.dtype)).astype(p.dtype), sums, params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


@dataclass(frozen=True)
class _Cut:
    """A trace at some number of rows, cut into layers."""

    trace: Trace
    graph: Graph
    stages: StageGraph


def _program(
    cut: _Cut, stage: Stage, shape_of: Callable[[Any], tuple[int, ...]], lines: Mapping[int, str], run: Run
) -> LayerProgram:
    def structs(variables: Sequence[Any]) -> Structs:
        return tuple(jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype) for v in variables)

    earlier = {v for other in cut.stages.stages[: stage.index] for v in other.params}
    return LayerProgram(
        key=_digest(_text(cut, stage, structs, lines)),
        params=structs(stage.params),
        others=structs(_others(stage)),
        received=structs(stage.received),
        owned=tuple(i for i, v in enumerate(stage.params) if v not in earlier),
        _stage=stage,
        _outvars=cut.trace.jaxpr.outvars,
        _run=run,
    )


def _others(stage: Stage) -> tuple[Any, ...]:
    return (*stage.frozen, *stage.state, *stage.batch, *stage.consts)


def _text(cut: _Cut, stage: Stage, structs: Callable[[Sequence[Any]], Structs], lines: Mapping[int, str]) -> str:
    """The program as text, its values numbered in order, so that equal layers read alike."""
    number: dict[Any, int] = {}
    text = []
    for role, variables in (("params", stage.params), ("others", _others(stage)), ("received", stage.received)):
        for var, struct in zip(variables, structs(variables), strict=True):
            number.setdefault(var, len(number))
            text.append(f"{role} {struct.dtype}{struct.shape}")
    for node in stage.nodes:
        refs = ["_" if isinstance(a, _compat.Literal) else str(number[a]) for a in node.eqn.invars]
        for var in node.eqn.outvars:
            number.setdefault(var, len(number))
        text.append(f"{lines[id(node.eqn)]} {' '.join(refs)}")
    text.append(f"sent {[number[v] for v in stage.sent]}, outputs {[p == 0 for p in stage.outputs]}")
    return "\n".join(text)


def _like(stage: Stage) -> str:
    names = [node.eqn.primitive.name for node in stage.nodes]
    return _digest(repr((names, [(v.aval.shape, str(v.aval.dtype)) for v in stage.params])))


def _local_shapes(
    cut: _Cut, sharding: Sharding, mesh: MeshShape, device: OneDevice
) -> tuple[dict[Any, tuple[int, ...]], dict[int, str], set[int]]:
    """Local shapes of all values, a line per equation by its ``id``, and the equations that have none."""
    trace, graph = cut.trace, cut.graph
    shapes: dict[Any, tuple[int, ...]] = {}
    for number, (var, leaf) in enumerate(zip(trace.leaf_vars, trace.leaves, strict=True)):
        axes = sharding.parameters.get(number, ()) if leaf.kind != STATE else ()
        shapes[var] = local_shape(leaf.shape, to_layout(axes, len(leaf.shape)), mesh)
    for var, has_rows in zip(trace.batch_vars, trace.batch_has_rows, strict=True):
        split = has_rows and mesh.fits(var.aval.shape[0], DP)
        layout = (DP if split else 0, *(0 for _ in var.aval.shape[1:])) if has_rows else ()
        shapes[var] = local_shape(var.aval.shape, layout, mesh)
    shapes.update((var, tuple(var.aval.shape)) for var in trace.const_vars)
    lines: dict[int, str] = {}
    broken: set[int] = set()

    def run(args: Sequence[Any]) -> None:
        env = dict(zip(trace.jaxpr.invars, args, strict=True))
        for node in graph.nodes:
            begun = len(device.lines)
            try:
                device.run([(node.key, node.eqn)], env)
            except NotLocalError:
                broken.add(id(node.eqn))
                env.update((v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in node.eqn.outvars)
            lines[id(node.eqn)] = "\n".join(device.lines[begun:])
            shapes.update((v, tuple(env[v].shape)) for v in node.eqn.outvars)

    jax.eval_shape(run, [jax.ShapeDtypeStruct(shapes[v], v.aval.dtype) for v in trace.jaxpr.invars])
    return shapes, lines, broken


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    return jnp.asarray(atom.val) if isinstance(atom, _compat.Literal) else env[atom]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
