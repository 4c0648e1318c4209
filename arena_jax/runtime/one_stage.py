"""A one-stage plan as a single jitted step: microbatches by ``lax.scan``, then the optimizer."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from arena_jax.compiler.problem import PARAMS, STATE, Problem
from arena_jax.runtime.engine import Compile, Metrics, Sums, compile_here
from arena_jax.runtime.layout import Layout, StageState, State
from arena_jax.runtime.optimizer import flat_update
from arena_jax.runtime.placement import StagePlacement
from arena_jax.runtime.put import own_rows, put, put_rows, spans_processes
from arena_jax.runtime.row_shards import RowShards
from arena_jax.runtime.stage_function import StageFunction, StageInputs


class OneStage:
    """Engine of a one-stage plan."""

    def __init__(
        self,
        problem: Problem,
        function: StageFunction,
        layout: Layout,
        num_microbatches: int,
        shards: RowShards | None = None,
        *,
        skip_nonfinite: bool,
        compile: Compile = compile_here,
    ) -> None:
        self._problem = problem
        self._layout = layout
        self._num_microbatches = num_microbatches
        self._placement = function.placement
        self._batch_shardings = batch_shardings(function.placement, problem, num_microbatches)
        self._function = function
        self._shards = shards
        self._evaluated = function if shards is None else shards.function
        self._step = compile("stage 0 step", self._lower(function, skip_nonfinite))
        self._gradients: Any = None

    def step(self, state: State, batch: Sequence[np.ndarray]) -> tuple[State, Metrics]:
        arrays = state.stages[0]
        params, frozen, model_state, optimizer, metrics = self._step(
            arrays.params, arrays.frozen, arrays.state, state.optimizer, self._consts, self._place(batch)
        )
        after = StageState(params=params, frozen=frozen, state=model_state)
        return State(step=state.step + 1, stages=[after], optimizer=optimizer), metrics

    def gradients(self, state: State, batch: Sequence[np.ndarray]) -> tuple[list[list[Any]], Any, Metrics]:
        arrays = state.stages[0]
        if self._gradients is None:
            self._gradients = jax.jit(
                make_gradients(self._problem, self._function, self._num_microbatches, self._shards)
            )
        sums, numbers, _, metrics = self._gradients(
            arrays.params, arrays.frozen, arrays.state, self._consts, self._place(batch)
        )
        return [sums], numbers[1], metrics

    @cached_property
    def _consts(self) -> list[Any]:
        consts = consts_of(self._evaluated)
        return put(consts, [self._placement.replicated] * len(consts))

    def compiled_text(self) -> str:
        """The compiled step as XLA prints it."""
        text: str = self._step.as_text()
        return text

    @cached_property
    def rows(self) -> np.ndarray | None:
        """See :class:`Engine`."""
        rows = self._problem.rows_of(self._num_microbatches)
        for leaf, sharding in zip(self._problem.batch, self._batch_shardings, strict=True):
            if leaf.has_rows:
                return own_rows(sharding, self._num_microbatches, rows)
        return None

    def _place(self, batch: Sequence[np.ndarray]) -> list[Any]:
        if self.rows is not None:
            count, rows = self._num_microbatches, self._problem.rows_of(self._num_microbatches)
            return [
                put_rows(a, self.rows, sharding, count, rows) if leaf.has_rows else put([a], [sharding])[0]
                for a, leaf, sharding in zip(batch, self._problem.batch, self._batch_shardings, strict=True)
            ]
        shaped = [self._split(a, leaf.has_rows) for a, leaf in zip(batch, self._problem.batch, strict=True)]
        placed: list[Any] = jax.device_put(shaped, self._batch_shardings)
        return placed

    def _split(self, array: Any, has_rows: bool) -> Any:
        if not has_rows or self._num_microbatches == 1:
            return array
        return array.reshape(self._num_microbatches, len(array) // self._num_microbatches, *array.shape[1:])

    def _lower(self, function: StageFunction, skip_nonfinite: bool) -> Any:
        entries = self._layout.stages[0]
        shardings = (
            [e.sharding for e in entries.params],
            [e.sharding for e in entries.frozen],
            [e.sharding for e in entries.state],
            [e.sharding for e in self._layout.optimizer],
            # Where several processes take part, all of them read the metrics.
            self._placement.replicated if spans_processes(self._placement.replicated) else None,
        )
        step = make_step(self._problem, function, self._num_microbatches, self._shards, skip_nonfinite=skip_nonfinite)
        jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3), out_shardings=shardings)
        rows = self._problem.rows_of(self._num_microbatches)
        batch = []
        for leaf, sharding in zip(self._problem.batch, self._batch_shardings, strict=True):
            struct = leaf.struct(rows)
            lead = (self._num_microbatches,) if leaf.has_rows and self._num_microbatches > 1 else ()
            batch.append(jax.ShapeDtypeStruct((*lead, *struct.shape), struct.dtype, sharding=sharding))
        return jitted.lower(
            [e.struct for e in entries.params],
            [e.struct for e in entries.frozen],
            [e.struct for e in entries.state],
            [e.struct for e in self._layout.optimizer],
            const_structs(self._evaluated),
            batch,
        )


def make_step(
    problem: Problem,
    function: StageFunction,
    num_microbatches: int,
    shards: RowShards | None = None,
    *,
    skip_nonfinite: bool,
) -> Any:
    """The whole step as a pure function of parameters, frozen, state, optimizer, constants, batch."""
    gradients = make_gradients(problem, function, num_microbatches, shards)
    update = flat_update(problem, skip_nonfinite=skip_nonfinite)

    def step(
        params: list[Any],
        frozen: list[Any],
        state: list[Any],
        optimizer: list[Any],
        consts: list[Any],
        batch: list[Any],
    ) -> Any:
        sums, numbers, state, metrics = gradients(params, frozen, state, consts, batch)
        params, optimizer = update(sums, numbers[1], numbers[0], optimizer, params)
        return params, frozen, state, optimizer, metrics

    return step


def make_gradients(
    problem: Problem, function: StageFunction, num_microbatches: int, shards: RowShards | None = None
) -> Any:
    """Gradient sums, loss numbers, new state and metrics of a global batch, as a pure function.

    Args:
        shards: the function shard by shard of the rows; gradients are then reduced over dp once.
    """
    trace, stage, placement = function.trace, function.stage, function.placement
    sums = Sums(trace=trace)
    leaf_of = {var: i for i, var in enumerate(trace.leaf_vars)}
    stage_state = [leaf_of[v] for v in stage.state]
    leaves = problem.of_kind(PARAMS)
    shardings = [placement.gradient(leaf.name, leaf.shape) for leaf in leaves]
    state_index = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]

    def microbatch(params: list[Any], frozen: list[Any], state: list[Any], consts: list[Any], batch: list[Any]) -> Any:
        def loss(values: list[Any]) -> tuple[Any, Any]:
            rows = [batch[i] for i in stage.batch_index]
            inputs = StageInputs(params=values, frozen=frozen, state=state, batch=rows, consts=consts, received=())
            _, outputs = (shards or function)(inputs)
            return outputs[0], outputs

        (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        numbers = [outputs[p] for p in range(sums.num_outputs)]
        by_leaf = {leaf: outputs[sums.num_outputs + k] for k, leaf in enumerate(state_index)}
        return gradients, numbers, [by_leaf[leaf] for leaf in stage_state]

    def constrain(value: Any, sharding: Any) -> Any:
        return lax.with_sharding_constraint(value, sharding) if placement.mesh.size > 1 else value

    summed = shardings if shards is None else [shards.gradient_sharding(s) for s in shardings]

    def zeros(params: list[Any]) -> list[Any]:
        return [
            constrain(jnp.zeros(p.shape, problem.accumulation_dtype(p.dtype)), s)
            for p, s in zip(params, summed, strict=True)
        ]

    def accumulate(totals: list[Any], gradients: list[Any]) -> list[Any]:
        return [constrain(t + g.astype(t.dtype), s) for t, g, s in zip(totals, gradients, summed, strict=True)]

    def reduced(totals: list[Any]) -> list[Any]:
        if shards is None:
            return totals
        return [constrain(t.sum(0), s) for t, s in zip(totals, shardings, strict=True)]

    def run(params: list[Any], frozen: list[Any], state: list[Any], consts: list[Any], batch: list[Any]) -> Any:
        if shards is not None:
            params = shards.spread(params)
        if num_microbatches == 1:
            gradients, numbers, state = microbatch(params, frozen, state, consts, batch)
            totals = accumulate(zeros(params), gradients)
            return reduced(totals), numbers, state, sums.finish(numbers, 1)

        def body(carry: Any, rows: Any) -> tuple[Any, None]:
            totals, running, state = carry
            gradients, numbers, state = microbatch(params, frozen, state, consts, _with_scalars(rows, batch, problem))
            running = [sums.add(p, r, n) for p, (r, n) in enumerate(zip(running, numbers, strict=True))]
            return (accumulate(totals, gradients), running, state), None

        start = [jnp.zeros((), a.aval.dtype) for a in trace.jaxpr.outvars[: sums.num_outputs]]
        sliced = [b for b, leaf in zip(batch, problem.batch, strict=True) if leaf.has_rows]
        (totals, numbers, state), _ = lax.scan(body, (zeros(params), start, state), sliced)
        return reduced(totals), numbers, state, sums.finish(numbers, num_microbatches)

    return run


def batch_shardings(placement: StagePlacement, problem: Problem, num_microbatches: int) -> list[Any]:
    """Rows over dp, behind the microbatch dim where there is one."""
    rows = problem.rows_of(num_microbatches)
    lead = 1 if num_microbatches > 1 else 0
    return [
        placement.rows(len(leaf.row_shape) + 1 + lead, rows, lead=lead) if leaf.has_rows else placement.replicated
        for leaf in problem.batch
    ]


def consts_of(function: StageFunction) -> list[Any]:
    """Values of the captured constants a stage uses."""
    values = dict(zip(function.trace.const_vars, function.trace.consts, strict=True))
    return [values[v] for v in function.stage.consts]


def const_structs(function: StageFunction) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the captured constants a stage uses, which every device of it holds whole."""
    replicated = function.placement.replicated
    return [
        jax.ShapeDtypeStruct(
            jnp.shape(c), c.dtype if isinstance(c, jax.Array) else jnp.result_type(c), sharding=replicated
        )
        for c in consts_of(function)
    ]


def _with_scalars(rows: Sequence[Any], batch: Sequence[Any], problem: Problem) -> list[Any]:
    """Row leaves of one microbatch together with the scalars, which all microbatches share."""
    values = iter(rows)
    return [next(values) if leaf.has_rows else b for b, leaf in zip(batch, problem.batch, strict=True)]
