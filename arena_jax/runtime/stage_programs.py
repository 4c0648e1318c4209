"""The compiled programs of one pipeline stage: forward, backward, and what surrounds them.

A forward program returns what its backward needs as plain arrays, all but what ``residuals.py`` finds again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from arena_jax.compiler.problem import PARAMS, STATE, Problem
from arena_jax.compiler.stages import StageGraph, is_differentiable
from arena_jax.compiler.trace import Trace
from arena_jax.runtime.engine import Compile, Sums, compile_here
from arena_jax.runtime.layout import StageLayout
from arena_jax.runtime.one_stage import const_structs, consts_of
from arena_jax.runtime.residuals import HandOver, hand_over
from arena_jax.runtime.row_shards import RowShards
from arena_jax.runtime.stage_function import StageFunction, StageInputs


@dataclass(frozen=True, kw_only=True)
class StateRoles:
    """Positions among a stage's state variables, by how the state moves on.

    Attributes:
        dependent: updated from data, one microbatch after the other.
        advanced: updated from state alone, for all microbatches ahead.
        constant: never changed.
    """

    dependent: tuple[int, ...]
    advanced: tuple[int, ...]
    constant: tuple[int, ...]


def state_roles(stage_graph: StageGraph, stage_index: int) -> StateRoles:
    """Sort a stage's state variables into roles."""
    trace = stage_graph.graph.trace
    state_leaves = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]
    roles: dict[str, list[int]] = {"dependent": [], "advanced": [], "constant": []}
    for position, var in enumerate(stage_graph.stages[stage_index].state):
        k = state_leaves.index(trace.leaf_vars.index(var))
        if k in stage_graph.state_stage:
            roles["dependent"].append(position)
        elif trace.state_atoms[k] is var:
            roles["constant"].append(position)
        else:
            roles["advanced"].append(position)
    return StateRoles(**{name: tuple(found) for name, found in roles.items()})


class StagePrograms:
    """Compiled programs of one stage.

    Attributes:
        forward: ``(pool, microbatch, totals) -> (sent, dependent state, totals, kept)``.
        reduced: from the gradient sums of a step's microbatches to those over all dp shards, which it consumes.
        backward: ``(kept, inputs, cotangents, gradients) -> (gradients, cotangents of received)``.
        both: for the last stage, ``(pool, microbatch, totals, gradients) -> (dependent state, totals,
            gradients, cotangents of received)``.
        kept_structs: what one microbatch's forward program keeps for its backward program.
        from_inputs: positions in the pool of what the backward program takes beside that.

    A stage that is not ``here`` has no programs, only ``function``, ``layout``, ``roles``, ``positions`` and
    the shardings and structs of its gradients.
    """

    def __init__(
        self,
        problem: Problem,
        stage_graph: StageGraph,
        function: StageFunction,
        layout: StageLayout,
        num_microbatches: int,
        received_shardings: Sequence[Any],
        sent_shardings: Sequence[Any],
        batch_structs: Sequence[Any],
        num_consumers: Sequence[int],
        shards: RowShards | None = None,
        compile: Compile = compile_here,
        *,
        here: bool = True,
    ) -> None:
        self.function = function
        self.layout = layout
        self.num_microbatches = num_microbatches
        self.roles = state_roles(stage_graph, function.stage.index)
        self.from_inputs: tuple[int, ...] = ()
        self._problem = problem
        self._sums = Sums(trace=function.trace)
        self._received_shardings = list(received_shardings)
        self._sent_shardings = list(sent_shardings)
        self._num_consumers = list(num_consumers)
        self._compile = compile
        trace, placement = function.trace, function.placement
        self._shards = shards
        self._evaluated = function if shards is None else shards.function
        self._number_struct = jax.ShapeDtypeStruct((), np.int32, sharding=placement.replicated)
        self.positions = [p for p in function.stage.outputs if p < self._sums.num_outputs]
        self.kept_structs: list[jax.ShapeDtypeStruct] = []
        self.gradient_shardings = [placement.gradient(_leaf_name(e.name), e.shape) for e in layout.params]
        lead = () if shards is None else (placement.plan.dp,)
        self._summed_shardings = [s if shards is None else shards.gradient_sharding(s) for s in self.gradient_shardings]
        self._gradient_structs = [
            jax.ShapeDtypeStruct((*lead, *e.shape), problem.accumulation_dtype(e.dtype), sharding=s)
            for e, s in zip(layout.params, self._summed_shardings, strict=True)
        ]
        if not here:
            return
        self._totals_structs = [
            jax.ShapeDtypeStruct((), trace.jaxpr.outvars[p].aval.dtype, sharding=placement.replicated)
            for p in self.positions
        ]
        self.start = self._compile_start()
        self.reduced = self._compile_reduced()
        self.advance, advanced = self._compile_advance(trace)
        self.pool_structs = self._pool_structs(advanced, batch_structs)
        is_last = not self.function.stage.sent
        self.both = self._compile_both() if is_last else None
        self.forward: Any = None
        self.backward: Any = None
        if not is_last:
            self.forward, self.backward = self._compile_pair()

    @cached_property
    def consts(self) -> list[Any]:
        replicated = self.function.placement.replicated
        return [jax.device_put(c, replicated) for c in consts_of(self._evaluated)]

    @cached_property
    def microbatch_numbers(self) -> list[Any]:
        replicated = self.function.placement.replicated
        return [jax.device_put(np.asarray(m, np.int32), replicated) for m in range(self.num_microbatches)]

    @property
    def gradient_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Sums of gradients, which a step holds from its beginning to its end."""
        return list(self._gradient_structs)

    def _compiled(self, role: str, lowered: Any) -> Any:
        return self._compile(f"stage {self.function.stage.index} {role}", lowered)

    # The pool: everything a microbatch's forward takes, in one flat list.

    def pool(
        self,
        params: Sequence[Any],
        frozen: Sequence[Any],
        dependent: Sequence[Any],
        advanced: Sequence[Any],
        constant: Sequence[Any],
        batch: Sequence[Any],
        received: Sequence[Any],
    ) -> list[Any]:
        return [*params, *frozen, *dependent, *advanced, *constant, *self.consts, *batch, *received]

    def _spread(self, pool: Sequence[Any]) -> list[Any]:
        """The pool as the stage takes it: where rows are split into shards, with its parameters spread over them."""
        if self._shards is None:
            return list(pool)
        count = len(self.function.stage.params)
        return [*self._shards.spread(pool[:count]), *pool[count:]]

    def _unpool(self, pool: Sequence[Any], microbatch: Any) -> StageInputs:
        """Stage inputs for one microbatch: rows and advanced state are picked by its number."""
        stage, roles = self.function.stage, self.roles
        values = iter(pool)

        def take(count: int) -> list[Any]:
            return [next(values) for _ in range(count)]

        params, frozen = take(len(stage.params)), take(len(stage.frozen))
        state: list[Any] = [None] * len(stage.state)
        for position in roles.dependent:
            state[position] = next(values)
        for position in roles.advanced:
            state[position] = _pick(next(values), microbatch)
        for position in roles.constant:
            state[position] = next(values)
        consts = take(len(stage.consts))
        batch = [
            _pick(x, microbatch) if self._problem.batch[i].has_rows else x
            for i, x in zip(stage.batch_index, take(len(stage.batch)), strict=True)
        ]
        return StageInputs(
            params=params, frozen=frozen, state=state, batch=batch, consts=consts, received=take(len(stage.received))
        )

    def _pool_structs(self, advanced: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        layout, roles = self.layout, self.roles
        received = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s)
            for v, s in zip(self.function.stage.received, self._received_shardings, strict=True)
        ]
        return [
            *(e.struct for e in layout.params),
            *(e.struct for e in layout.frozen),
            *(layout.state[i].struct for i in roles.dependent),
            *advanced,
            *(layout.state[i].struct for i in roles.constant),
            *const_structs(self._evaluated),
            *batch,
            *received,
        ]

    # Programs.

    def _compile_start(self) -> Any:
        """Zero gradients and totals of a step."""

        def start() -> tuple[list[Any], list[Any]]:
            gradients = [jnp.zeros(s.shape, s.dtype) for s in self._gradient_structs]
            return gradients, [jnp.zeros((), s.dtype) for s in self._totals_structs]

        shardings = (self._summed_shardings, [s.sharding for s in self._totals_structs])
        return self._compiled("start", jax.jit(start, out_shardings=shardings).lower())

    def _compile_reduced(self) -> Any:
        """From the gradient sums of a step to those of all shards of the rows."""
        if self._shards is None:
            return list

        def reduced(gradients: list[Any]) -> list[Any]:
            return [g.sum(0) for g in gradients]

        jitted = jax.jit(reduced, donate_argnums=0, out_shardings=self.gradient_shardings)
        return self._compiled("reduced", jitted.lower(self._gradient_structs))

    def _compile_advance(self, trace: Trace) -> tuple[Any, list[Any]]:
        """State of every microbatch, stacked, and the state after the step."""
        if not self.roles.advanced:
            return None, []
        state_leaves = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]
        leaf_of = {var: i for i, var in enumerate(trace.leaf_vars)}
        leaves = [leaf_of[self.function.stage.state[p]] for p in self.roles.advanced]
        atoms = [trace.state_atoms[state_leaves.index(leaf)] for leaf in leaves]
        jaxpr = _with_outputs(trace.jaxpr, atoms)
        small, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(atoms))
        sources = [i for i, keep in enumerate(used) if keep]
        assert set(sources) <= set(leaves), "state that is advanced ahead depends on state of another stage"

        def advance(state: list[Any]) -> tuple[list[Any], list[Any]]:
            def body(current: list[Any], _: None) -> tuple[list[Any], list[Any]]:
                known = dict(zip(leaves, current, strict=True))
                return jax.core.eval_jaxpr(small, (), *[known[i] for i in sources]), current

            after, stacked = lax.scan(body, state, None, length=self.num_microbatches)
            return stacked, after

        entries = [self.layout.state[p] for p in self.roles.advanced]
        replicated = self.function.placement.replicated
        jitted = jax.jit(advance, out_shardings=replicated)
        compiled = self._compiled("advance", jitted.lower([e.struct for e in entries]))
        stacked = [
            jax.ShapeDtypeStruct((self.num_microbatches, *e.shape), e.dtype, sharding=replicated) for e in entries
        ]
        return compiled, stacked

    def _run(self, pool: list[Any], microbatch: Any, totals: list[Any]) -> Any:
        """Forward with its linearisation; loss and sent values are what is differentiated."""
        inputs = self._unpool(pool, microbatch)
        stage = self.function.stage
        received_float = [x for v, x in zip(stage.received, inputs.received, strict=True) if is_differentiable(v)]

        def run(params: list[Any], floats: list[Any]) -> tuple[list[Any], Any]:
            given = iter(floats)
            received = [
                next(given) if is_differentiable(v) else x for v, x in zip(stage.received, inputs.received, strict=True)
            ]
            sent, outputs = (self._shards or self.function)(
                StageInputs(
                    params=params,
                    frozen=inputs.frozen,
                    state=inputs.state,
                    batch=inputs.batch,
                    consts=inputs.consts,
                    received=received,
                )
            )
            smooth = [x for v, x in zip(stage.sent, sent, strict=True) if is_differentiable(v)]
            if 0 in outputs:
                smooth.append(outputs[0])
            return smooth, (sent, outputs)

        _, closure, (sent, outputs) = jax.vjp(run, list(inputs.params), received_float, has_aux=True)
        totals = [self._sums.add(p, t, outputs[p]) for p, t in zip(self.positions, totals, strict=True)]
        dependent = [outputs[p] for p in self._dependent_positions()]
        return sent, dependent, totals, closure

    def _dependent_positions(self) -> list[int]:
        trace = self.function.trace
        state_leaves = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]
        leaf_of = {var: i for i, var in enumerate(trace.leaf_vars)}
        first = self._sums.num_outputs
        return [first + state_leaves.index(leaf_of[self.function.stage.state[p]]) for p in self.roles.dependent]

    def _pull_back(
        self, closure: Any, cotangents: list[list[Any]], gradients: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Add this microbatch's gradients; return the cotangents of what was received."""
        summed = [sum(parts[1:], parts[0]) for parts in cotangents]
        if 0 in self.function.stage.outputs:
            summed.append(jnp.ones((), self.function.trace.jaxpr.outvars[0].aval.dtype))
        of_params, of_received = closure(summed)
        return [g + d.astype(g.dtype) for g, d in zip(gradients, of_params, strict=True)], of_received

    def _dependent_shardings(self) -> list[Any]:
        return [self.layout.state[p].sharding for p in self.roles.dependent]

    def _received_float_shardings(self) -> list[Any]:
        stage = self.function.stage
        return [s for v, s in zip(stage.received, self._received_shardings, strict=True) if is_differentiable(v)]

    def _compile_both(self) -> Any:
        def both(pool: list[Any], microbatch: Any, totals: list[Any], gradients: list[Any]) -> Any:
            _, dependent, totals, closure = self._run(self._spread(pool), microbatch, totals)
            gradients, cotangents = self._pull_back(closure, [], gradients)
            return dependent, totals, gradients, cotangents

        shardings = (
            self._dependent_shardings(),
            [s.sharding for s in self._totals_structs],
            self._summed_shardings,
            self._received_float_shardings(),
        )
        jitted = jax.jit(both, donate_argnums=(2, 3), out_shardings=shardings)
        lowered = jitted.lower(self.pool_structs, self._number_struct, self._totals_structs, self._gradient_structs)
        return self._compiled("both", lowered)

    def _hand_over(self) -> HandOver:
        """The forward pass, split from what the backward pass takes of it."""
        size, layout = len(self.pool_structs), self.layout

        def run(*flat: Any) -> tuple[Any, Any]:
            pool, microbatch, totals = list(flat[:size]), flat[size], list(flat[size + 1 :])
            sent, dependent, totals, closure = self._run(self._spread(pool), microbatch, totals)
            return (sent, dependent, totals), closure

        structs = [*self.pool_structs, self._number_struct, *self._totals_structs]
        return hand_over(run, structs, lasting=size, fixed=len(layout.params) + len(layout.frozen))

    def _compile_pair(self) -> tuple[Any, Any]:
        split = self._hand_over()

        def forward(pool: list[Any], microbatch: Any, totals: list[Any]) -> Any:
            (sent, dependent, totals), kept = split.forward(*pool, microbatch, *totals)
            return sent, dependent, totals, kept

        shardings = (
            self._sent_shardings,
            self._dependent_shardings(),
            [s.sharding for s in self._totals_structs],
            None,
        )
        lowered = jax.jit(forward, donate_argnums=(2,), out_shardings=shardings).lower(
            self.pool_structs, self._number_struct, self._totals_structs
        )
        compiled = self._compiled("forward", lowered)
        self.kept_structs = kept = [
            jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
            for info, sharding in zip(lowered.out_info[3], compiled.output_shardings[3], strict=True)
        ]

        def backward(kept: list[Any], inputs: list[Any], cotangents: list[list[Any]], gradients: list[Any]) -> Any:
            return self._pull_back(split.linearisation(kept, inputs), cotangents, gradients)

        stage = self.function.stage
        cotangents = [
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s)] * count
            for v, s, count in zip(stage.sent, self._sent_shardings, self._num_consumers, strict=True)
            if is_differentiable(v)
        ]
        self.from_inputs = split.from_inputs
        inputs = [self.pool_structs[i] for i in self.from_inputs]
        jitted = jax.jit(
            backward, donate_argnums=(3,), out_shardings=(self._summed_shardings, self._received_float_shardings())
        )
        return compiled, self._compiled("backward", jitted.lower(kept, inputs, cotangents, self._gradient_structs))


def _pick(stacked: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False)


def _leaf_name(entry_name: str) -> str:
    return entry_name.removeprefix(f"{PARAMS}/")


def _with_outputs(jaxpr: Any, atoms: Sequence[Any]) -> Any:
    """The jaxpr with other outputs."""
    return jaxpr.replace(outvars=list(atoms), debug_info=jaxpr.debug_info.with_unknown_names())
