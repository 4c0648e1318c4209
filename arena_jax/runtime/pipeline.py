"""A plan of several stages: 1F1B over programs on separate submeshes, and the split optimizer step."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from arena_jax.compiler.inter_op.schedule import FORWARD, one_f_one_b
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.stages import Boundary, StageGraph
from arena_jax.errors import UsageError
from arena_jax.runtime.engine import Compile, Metrics, Sums, compile_here
from arena_jax.runtime.layout import Layout, StageState, State
from arena_jax.runtime.links import Links, LocalLinks
from arena_jax.runtime.placement import StagePlacement
from arena_jax.runtime.row_shards import RowShards
from arena_jax.runtime.stage_function import StageFunction
from arena_jax.runtime.stage_programs import StagePrograms
from arena_jax.runtime.update import SplitUpdate
from arena_jax.runtime.update_programs import UpdateRunner


class Pipeline:
    """Engine of a plan with several stages, in this process and in others as the links say."""

    def __init__(
        self,
        problem: Problem,
        stage_graph: StageGraph,
        functions: Sequence[StageFunction],
        layout: Layout,
        split: SplitUpdate,
        num_microbatches: int,
        shards: Sequence[RowShards | None],
        *,
        compile: Compile = compile_here,
        links: Links | None = None,
    ) -> None:
        self._links: Links = links or LocalLinks()
        self.rows: np.ndarray | None = None
        self._problem = problem
        self._functions = functions
        self._layout = layout
        self._num_microbatches = num_microbatches
        self._producer = {b.var: b.producer for b in stage_graph.boundaries}
        self._specs = _BoundaryShardings(stage_graph, [f.placement for f in functions])
        self._batch_shardings = [self._stage_batch_shardings(f) for f in functions]
        by_var = {b.var: b for b in stage_graph.boundaries}
        self._stages = [
            StagePrograms(
                problem,
                stage_graph,
                function,
                layout.stages[s],
                num_microbatches,
                received_shardings=[self._specs.at(v, s) for v in function.stage.received],
                sent_shardings=[self._specs.at(v, s) for v in function.stage.sent],
                batch_structs=self._batch_structs(function, self._batch_shardings[s]),
                num_consumers=[len(by_var[v].consumers) for v in function.stage.sent],
                shards=shards[s],
                compile=compile,
                here=self._links.here(s),
            )
            for s, function in enumerate(functions)
        ]
        self._tasks = one_f_one_b(len(functions), num_microbatches)
        self._update = UpdateRunner(
            problem, stage_graph, layout, split, self._stages, num_microbatches, compile, links=self._links
        )
        trace = functions[0].trace
        self._loss_stage = next(s for s, f in enumerate(functions) if 0 in f.stage.outputs)
        sums = Sums(trace=trace)
        self._num_outputs = sums.num_outputs
        self._stage_of_total = {p: s for s, programs in enumerate(self._stages) for p in programs.positions}
        self._total_structs = [
            jax.ShapeDtypeStruct((), trace.jaxpr.outvars[p].aval.dtype, sharding=self._home)
            for p in range(self._num_outputs)
        ]
        finish = jax.jit(lambda totals: sums.finish(totals, num_microbatches), out_shardings=self._home)
        self._metric_structs = jax.eval_shape(finish, self._total_structs)
        self._finish: Any = None
        if self._links.here(self._loss_stage):
            self._finish = compile(f"stage {self._loss_stage} finish", finish.lower(self._total_structs))

    @property
    def stages(self) -> Sequence[StagePrograms]:
        return self._stages

    @property
    def _home(self) -> Any:
        """Where the loss and all metrics end up."""
        return self._functions[self._loss_stage].placement.replicated

    def step(self, state: State, batch: Sequence[np.ndarray]) -> tuple[State, Metrics]:
        gradients, totals, dependent, after = self._run_schedule(state, batch)
        metrics, loss, weight = self._combine(totals)
        params, optimizer = self._update(state, gradients, weight, loss)
        stages = []
        for s, programs in enumerate(self._stages):
            model_state = list(state.stages[s].state)
            if not self._links.here(s):
                stages.append(StageState(params=params[s], frozen=state.stages[s].frozen, state=model_state))
                continue
            for p, value in zip(programs.roles.dependent, dependent[s], strict=True):
                model_state[p] = value
            for p, value in zip(programs.roles.advanced, after[s], strict=True):
                model_state[p] = value
            stages.append(StageState(params=params[s], frozen=state.stages[s].frozen, state=model_state))
        return State(step=state.step + 1, stages=stages, optimizer=optimizer), metrics

    def gradients(self, state: State, batch: Sequence[np.ndarray]) -> tuple[list[list[Any]], Any, Metrics]:
        if not all(self._links.here(s) for s in range(len(self._stages))):
            raise UsageError("grad_step needs all stages in one process", hint="use a plan for one process")
        sums, totals, _, _ = self._run_schedule(state, batch)
        metrics, _, weight = self._combine(totals)
        return sums, weight, metrics

    def _run_schedule(
        self, state: State, batch: Sequence[np.ndarray]
    ) -> tuple[list[list[Any]], list[list[Any]], list[list[Any]], list[list[Any]]]:
        """Issue all microbatches; return gradient sums, totals, dependent state and advanced state per stage."""
        placed = self._place_batch(batch)
        advanced, after = self._advance(state)
        dependent = [
            [state.stages[s].state[p] for p in programs.roles.dependent] for s, programs in enumerate(self._stages)
        ]
        started = [
            programs.start() if self._links.here(s) else ([None] * len(programs.gradient_shardings), [])
            for s, programs in enumerate(self._stages)
        ]
        gradients = [g for g, _ in started]
        totals = [t for _, t in started]
        arrived: dict[tuple[int, int, Any], Any] = {}
        returned: dict[tuple[int, Any], dict[int, Any]] = {}
        kept: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
        for stage, direction, m in self._tasks:
            programs = self._stages[stage]
            if not self._links.here(stage):
                self._pass_by(stage, direction, m, arrived, returned)
                continue
            if direction == FORWARD:
                pool = programs.pool(
                    state.stages[stage].params,
                    state.stages[stage].frozen,
                    dependent[stage],
                    advanced[stage],
                    [state.stages[stage].state[p] for p in programs.roles.constant],
                    placed[stage],
                    [arrived.pop((stage, m, v)) for v in programs.function.stage.received],
                )
                number = programs.microbatch_numbers[m]
                if programs.both is not None:
                    dependent[stage], totals[stage], gradients[stage], back = programs.both(
                        pool, number, totals[stage], gradients[stage]
                    )
                    self._send_back(stage, m, back, returned)
                    continue
                assert programs.forward is not None
                sent, dependent[stage], totals[stage], saved = programs.forward(pool, number, totals[stage])
                kept[stage, m] = saved, [pool[i] for i in programs.from_inputs]
                self._send(stage, m, sent, arrived)
            else:
                assert programs.backward is not None
                saved, inputs = kept.pop((stage, m))
                cotangents = [
                    [back for _, back in sorted(returned.pop((m, v)).items())]
                    for v in programs.function.differentiable_sent
                ]
                gradients[stage], back = programs.backward(saved, inputs, cotangents, gradients[stage])
                self._send_back(stage, m, back, returned)
        reduced = [
            programs.reduced(summed) if self._links.here(s) else summed
            for s, (programs, summed) in enumerate(zip(self._stages, gradients, strict=True))
        ]
        return reduced, totals, dependent, after

    def _combine(self, totals: list[list[Any]]) -> tuple[Metrics, Any, Any]:
        """The step's metrics, its loss sum and its weight, where the loss is computed."""
        by_position: dict[int, Any] = {
            p: value
            for s, programs in enumerate(self._stages)
            if self._links.here(s)
            for p, value in zip(programs.positions, totals[s], strict=True)
        }
        order = range(self._num_outputs)
        gathered = self._links.move_all(
            [f"total {p}" for p in order],
            [by_position.get(p) for p in order],
            [self._stage_of_total[p] for p in order],
            self._loss_stage,
            self._total_structs,
        )
        structs, tree = jax.tree.flatten(self._metric_structs)
        metrics = [None] * len(structs) if self._finish is None else jax.tree.leaves(self._finish(gathered))
        metrics = self._links.spread("metric", metrics, self._loss_stage, structs)
        return jax.tree.unflatten(tree, metrics), gathered[0], gathered[1]

    def _advance(self, state: State) -> tuple[list[list[Any]], list[list[Any]]]:
        """State of all microbatches where it depends on no data, per stage, and what it becomes."""
        stacked: list[list[Any]] = []
        after: list[list[Any]] = []
        for s, programs in enumerate(self._stages):
            if not self._links.here(s) or programs.advance is None:
                stacked.append([])
                after.append([])
                continue
            ahead, final = programs.advance([state.stages[s].state[p] for p in programs.roles.advanced])
            stacked.append(ahead)
            after.append(final)
        return stacked, after

    # Moving values between stages.

    def _send(self, stage: int, m: int, sent: Sequence[Any], arrived: dict[tuple[int, int, Any], Any]) -> None:
        for var, value in zip(self._functions[stage].stage.sent, sent, strict=True):
            for consumer in self._specs.consumers[var]:
                name = f"forward {self._specs.name(var)}"
                struct = self._specs.struct(var, consumer)
                arrived[consumer, m, var] = self._links.move(name, value, stage, consumer, struct)

    def _send_back(
        self, stage: int, m: int, back: Sequence[Any], returned: dict[tuple[int, Any], dict[int, Any]]
    ) -> None:
        for var, value in zip(self._functions[stage].differentiable_received, back, strict=True):
            producer = self._producer[var]
            name = f"backward {self._specs.name(var)}"
            struct = self._specs.struct(var, producer)
            returned.setdefault((m, var), {})[stage] = self._links.move(name, value, stage, producer, struct)

    def _pass_by(
        self,
        stage: int,
        direction: str,
        m: int,
        arrived: dict[tuple[int, int, Any], Any],
        returned: dict[tuple[int, Any], dict[int, Any]],
    ) -> None:
        """The turn of a stage that is elsewhere: take what it sends here."""
        function = self._functions[stage]
        is_last = not function.stage.sent
        if direction == FORWARD:
            for var in function.stage.received:
                arrived.pop((stage, m, var))
            if not is_last:
                self._send(stage, m, [None] * len(function.stage.sent), arrived)
                return
        else:
            for var in function.differentiable_sent:
                returned.pop((m, var))
        self._send_back(stage, m, [None] * len(function.differentiable_received), returned)

    # The batch.

    def _place_batch(self, batch: Sequence[np.ndarray]) -> list[list[Any]]:
        """Every stage gets the leaves it reads, split into microbatches."""
        shaped = [
            a.reshape(self._num_microbatches, len(a) // self._num_microbatches, *a.shape[1:]) if leaf.has_rows else a
            for a, leaf in zip(batch, self._problem.batch, strict=True)
        ]
        return [
            jax.device_put([shaped[i] for i in f.stage.batch_index], shardings) if self._links.here(s) else []
            for s, (f, shardings) in enumerate(zip(self._functions, self._batch_shardings, strict=True))
        ]

    def _stage_batch_shardings(self, function: StageFunction) -> list[Any]:
        rows = self._problem.rows_of(self._num_microbatches)
        chosen = [self._problem.batch[i] for i in function.stage.batch_index]
        return [
            function.placement.rows(len(leaf.row_shape) + 2, rows, lead=1)
            if leaf.has_rows
            else function.placement.replicated
            for leaf in chosen
        ]

    def _batch_structs(self, function: StageFunction, shardings: Sequence[Any]) -> list[Any]:
        rows = self._problem.rows_of(self._num_microbatches)
        structs = []
        for i, sharding in zip(function.stage.batch_index, shardings, strict=True):
            leaf = self._problem.batch[i]
            struct = leaf.struct(rows)
            lead = (self._num_microbatches,) if leaf.has_rows else ()
            structs.append(jax.ShapeDtypeStruct((*lead, *struct.shape), struct.dtype, sharding=sharding))
        return structs


class _BoundaryShardings:
    """How a value that crosses stages lies on each of them."""

    def __init__(self, stage_graph: StageGraph, placements: Sequence[StagePlacement]) -> None:
        self.consumers = {b.var: b.consumers for b in stage_graph.boundaries}
        self._shardings: dict[tuple[Any, int], Any] = {}
        keys = {var: f"{node.key}:{i}" for node in stage_graph.graph.nodes for i, var in enumerate(node.eqn.outvars)}
        self._keys = keys
        rows = stage_graph.graph.trace.rows
        for boundary in stage_graph.boundaries:
            for stage in (boundary.producer, *boundary.consumers):
                self._shardings[boundary.var, stage] = _boundary_sharding(
                    boundary, keys[boundary.var], placements[stage], rows
                )

    def at(self, var: Any, stage: int) -> Any:
        return self._shardings[var, stage]

    def name(self, var: Any) -> str:
        return self._keys[var]

    def struct(self, var: Any, stage: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=self.at(var, stage))


def _boundary_sharding(boundary: Boundary, key: str, placement: StagePlacement, rows: int) -> Any:
    shape = boundary.var.aval.shape
    spec = placement.plan.activations.get(key)
    if spec is not None:
        return placement.named(spec)
    if shape and shape[0] == rows:
        return placement.rows(len(shape), rows)
    return placement.replicated
