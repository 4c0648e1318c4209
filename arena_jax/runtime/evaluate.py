"""Evaluate a batch under a plan: the model in ``.eval()`` mode, where its parameters live."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from arena_jax.compiler import _compat
from arena_jax.compiler.graph import Graph, Unit, build_graph, split_scans
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.stages import StageGraph, assign_stages, cut_stages
from arena_jax.compiler.trace import Trace, trace_eval
from arena_jax.runtime.engine import Metrics, Sums
from arena_jax.runtime.layout import Layout, State, leaf_names
from arena_jax.runtime.links import Links, LocalLinks
from arena_jax.runtime.placement import StagePlacement
from arena_jax.runtime.put import put
from arena_jax.runtime.stage_function import StageFunction, StageInputs, make_stage_function


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """Evaluation at one number of rows."""

    trace: Trace
    stage_graph: StageGraph
    functions: tuple[StageFunction, ...]
    programs: tuple[Any, ...]
    consts: tuple[list[Any], ...]
    finish: Any


class Evaluator:
    """Evaluates batches of any number of rows; compiles once per number."""

    def __init__(
        self,
        problem: Problem,
        placements: Sequence[StagePlacement],
        layout: Layout,
        links: Links | None = None,
    ) -> None:
        self._links: Links = links or LocalLinks()
        self._problem = problem
        self._placements = placements
        self._layout = layout
        names = {name: i for i, name in enumerate(leaf_names(problem))}
        self._where: dict[Unit, dict[int, int]] = {}
        for position, entry in enumerate(layout.entries):
            if entry.name in names:
                unit = Unit(leaf=names[entry.name], start=entry.slot.start, stop=entry.slot.stop)
                assert entry.slot.stage is not None
                self._where.setdefault(unit, {})[entry.slot.stage] = position
        self._compiled: dict[int, _Compiled] = {}

    def __call__(self, state: State, batch: Sequence[np.ndarray], rows: int) -> Metrics:
        if rows not in self._compiled:
            self._compiled[rows] = self._compile(rows)
        compiled = self._compiled[rows]
        arrays = state.arrays
        units = compiled.stage_graph.graph.units
        made: dict[Any, tuple[int, Any]] = {}
        totals: dict[int, tuple[int, Any]] = {}
        for s, (function, program) in enumerate(zip(compiled.functions, compiled.programs, strict=True)):
            stage, placement = function.stage, function.placement
            leaves = [
                [self._leaf(arrays, units[v], s, rows) for v in group]
                for group in (stage.params, stage.frozen, stage.state)
            ]
            received = []
            for k, var in enumerate(stage.received):
                sharding = self._received_sharding(var, placement, rows)
                struct = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=sharding)
                source, value = made[var]
                received.append(self._links.move(f"eval {rows} {s} {k}", value, source, s, struct))
            sent, outputs = [None] * len(stage.sent), dict.fromkeys(stage.outputs)
            if self._links.here(s):
                rows_placed = put([batch[i] for i in stage.batch_index], self._batch_shardings(function, rows))
                sent, outputs = program(*leaves, rows_placed, compiled.consts[s], received)
            made.update((var, (s, value)) for var, value in zip(stage.sent, sent, strict=True))
            totals.update((p, (s, value)) for p, value in outputs.items())
        gathered = [totals[p] for p in range(len(totals))]
        last = len(compiled.functions) - 1
        if not last:
            return compiled.finish([value for _, value in gathered])
        home = compiled.functions[last].placement.replicated
        outvars = compiled.trace.jaxpr.outvars
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=home) for v in outvars[: len(gathered)]]
        values = self._links.move_all(
            [f"eval {rows} total {p}" for p in range(len(gathered))],
            [value for _, value in gathered],
            [source for source, _ in gathered],
            last,
            structs,
        )
        results, tree = jax.tree.flatten(jax.eval_shape(compiled.finish, structs))
        metrics = jax.tree.leaves(compiled.finish(values)) if self._links.here(last) else [None] * len(results)
        return jax.tree.unflatten(tree, self._links.spread(f"eval {rows} metric", metrics, last, results))

    def _leaf(self, arrays: Sequence[Any], unit: Unit, stage: int, rows: int) -> Any:
        """A leaf on a stage; moved there where evaluation needs it in another stage than training."""
        if unit in self._where:
            places = self._where[unit]
            if stage in places:
                return arrays[places[stage]]
            return self._moved(arrays, *next(iter(places.items())), stage)
        pieces = sorted((u.start or 0, *next(iter(p.items()))) for u, p in self._where.items() if u.leaf == unit.leaf)
        parts = [self._moved(arrays, source, position, stage) for _, source, position in pieces]
        if not self._links.here(stage):
            return None
        whole = np.concatenate([np.asarray(part) for part in parts])
        return jax.device_put(whole, self._placements[stage].replicated)

    def _moved(self, arrays: Sequence[Any], source: int, position: int, stage: int) -> Any:
        entry = self._layout.entries[position]
        struct = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=self._placements[stage].replicated)
        return self._links.move(f"eval leaf {position} {stage}", arrays[position], source, stage, struct)

    def _compile(self, rows: int) -> _Compiled:
        trace = trace_eval(self._problem, rows)
        graph = build_graph(trace)
        num_stages = len(self._placements)
        if num_stages == 1:
            stage_graph = cut_stages(graph, [0], with_state=False)
        else:
            graph, _ = split_scans(graph, self._splits(graph))
            homes = {unit: frozenset(places) for unit, places in self._where.items()}
            stage_graph = assign_stages(graph, homes, num_stages)
        functions = tuple(
            make_stage_function(trace, stage, placement, {}, constrain=False)
            for stage, placement in zip(stage_graph.stages, self._placements, strict=True)
        )
        values = dict(zip(trace.const_vars, trace.consts, strict=True))
        sums = Sums(trace=trace)
        return _Compiled(
            trace=trace,
            stage_graph=stage_graph,
            functions=functions,
            programs=tuple(jax.jit(_program(f)) for f in functions),
            consts=tuple(
                put([values[v] for v in f.stage.consts], [f.placement.replicated] * len(f.stage.consts))
                for f in functions
            ),
            finish=jax.jit(sums.values, out_shardings=functions[-1].placement.replicated),
        )

    def _splits(self, graph: Graph) -> dict[int, list[int]]:
        """Cut scans where training cut them, so that each stage uses the rows it holds."""
        producers = {var: node.eqn for node in graph.nodes for var in node.eqn.outvars}
        starts: dict[int, set[int]] = {}
        for unit in self._where:
            if unit.start:
                starts.setdefault(unit.leaf, set()).add(unit.start)
        splits: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            if node.eqn.primitive.name != "scan":
                continue
            found: set[int] = set()
            for atom in node.eqn.invars[sum(_compat.scan_sizes(node.eqn)) :]:
                while atom in producers and producers[atom].primitive.name == "convert_element_type":
                    atom = producers[atom].invars[0]
                if not isinstance(atom, _compat.Literal) and atom in graph.units:
                    found |= starts.get(graph.units[atom].leaf, set())
            if found:
                splits[index] = sorted(found)
        return splits

    def _batch_shardings(self, function: StageFunction, rows: int) -> list[Any]:
        chosen = [self._problem.batch[i] for i in function.stage.batch_index]
        return [
            function.placement.rows(len(leaf.row_shape) + 1, rows) if leaf.has_rows else function.placement.replicated
            for leaf in chosen
        ]

    def _received_sharding(self, var: Any, placement: StagePlacement, rows: int) -> Any:
        shape = var.aval.shape
        return placement.rows(len(shape), rows) if shape and shape[0] == rows else placement.replicated


def _program(function: StageFunction) -> Any:
    def run(params: Any, frozen: Any, state: Any, batch: Any, consts: Any, received: Any) -> Any:
        inputs = StageInputs(params=params, frozen=frozen, state=state, batch=batch, consts=consts, received=received)
        return function(inputs)

    return run
