"""Compile and run the split optimizer step of a pipeline."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena_jax.compiler.problem import Problem
from arena_jax.compiler.stages import StageGraph
from arena_jax.runtime.engine import Compile, compile_here
from arena_jax.runtime.layout import Layout, State
from arena_jax.runtime.links import Links
from arena_jax.runtime.stage_programs import StagePrograms
from arena_jax.runtime.update import Slot, SplitUpdate, UpdateProgram, Value

Key = tuple[str, int, Slot]


class UpdateRunner:
    """Runs :class:`SplitUpdate`: sums tied gradients, runs the programs, refreshes tied copies."""

    def __init__(
        self,
        problem: Problem,
        stage_graph: StageGraph,
        layout: Layout,
        split: SplitUpdate,
        stages: Sequence[StagePrograms],
        num_microbatches: int,
        compile: Compile = compile_here,
        *,
        links: Links,
    ) -> None:
        self._links = links
        self._layout = layout
        self._split = split
        self._stages = stages
        self._unit_of = [
            [_parameter_key(stage_graph, var, split) for var in stage.params] for stage in stage_graph.stages
        ]
        self._moves = {target: f"update {n}" for n, (_, _, target) in enumerate(split.transfers)}
        self._optimizer_keys = _optimizer_keys(split, len(stages))
        self._placements = [s.function.placement for s in stages]
        self._weight = np.asarray(num_microbatches, stage_graph.graph.trace.jaxpr.outvars[1].aval.dtype)
        self._adders = self._compile_adders(compile)
        self._compiled = self._compile(compile)

    @cached_property
    def _weights(self) -> list[Any]:
        return [jax.device_put(self._weight, p.replicated) for p in self._placements]

    def __call__(
        self, state: State, gradients: Sequence[Sequence[Any]], weight: Any, loss: Any
    ) -> tuple[list[list[Any]], list[Any]]:
        """Return new parameters per stage (copies included) and the new optimizer arrays."""
        arrays: dict[tuple[Value, int], Any] = {}
        inputs = self._inputs(state, gradients, weight, loss)
        for program, compiled in self._compiled:
            self._receive(program.inputs, program.stage, arrays, inputs)
            if compiled is None:
                arrays.update(((v, program.stage), None) for v in program.outputs)
                continue
            values = [self._input(v, program.stage, arrays, inputs) for v in program.inputs]
            outs = compiled(*values)
            arrays.update(((v, program.stage), x) for v, x in zip(program.outputs, outs, strict=True))
        results = {key: self._result(value, key, arrays, inputs) for key, value in self._split.results.items()}
        params: list[list[Any]] = []
        for s, keys in enumerate(self._unit_of):
            row = []
            for position, key in enumerate(keys):
                new = results[key]
                if key[2].stage != s:
                    entry = self._layout.stages[s].params[position]
                    assert key[2].stage is not None
                    new = self._links.move(f"tied {entry.name} {s}", new, key[2].stage, s, entry.struct)
                row.append(new)
            params.append(row)
        return params, [results[key] for key in self._optimizer_keys]

    def _inputs(self, state: State, gradients: Sequence[Sequence[Any]], weight: Any, loss: Any) -> dict[Key, Any]:
        inputs: dict[Key, Any] = {}
        for s, keys in enumerate(self._unit_of):
            for position, key in enumerate(keys):
                gradient_key = ("gradient", key[1], key[2])
                gradient = gradients[s][position]
                if key[2].stage == s:
                    inputs[key] = state.stages[s].params[position]
                    inputs[gradient_key] = gradient
                else:
                    # A tied parameter: its first user owns it, the others' gradients come to it.
                    assert key[2].stage is not None
                    struct = self._gradient_struct(key)
                    moved = self._links.move(f"gradient {key[1:]} {s}", gradient, s, key[2].stage, struct)
                    if moved is not None:
                        inputs[gradient_key] = self._adders[key](inputs[gradient_key], moved)
        inputs.update(zip(self._optimizer_keys, state.optimizer, strict=True))
        for value in self._wanted_inputs:
            kind, _, slot = value.input_key
            if kind == "loss":
                inputs[value.input_key] = loss
            elif kind == "weight" and slot.stage is not None:
                inputs[value.input_key] = weight
        return inputs

    def _input(self, value: Value, stage: int, arrays: dict[tuple[Value, int], Any], inputs: dict[Key, Any]) -> Any:
        if value.input_key is None:
            if (value, stage) not in arrays:
                self._receive([value], stage, arrays, inputs)
            return arrays[value, stage]
        kind, leaf, slot = value.input_key
        if slot.stage is None:
            return self._weights[stage] if kind == "weight" else inputs[kind, leaf, Slot(stage)]
        return inputs[value.input_key]

    def _receive(
        self, values: Sequence[Value], stage: int, arrays: dict[tuple[Value, int], Any], inputs: dict[Key, Any]
    ) -> None:
        """Copy to a stage what others made for it, in one call; their programs have run, for depths only grow."""
        missing = [v for v in dict.fromkeys(values) if v.input_key is None and (v, stage) not in arrays]
        if not missing:
            return
        sources = []
        for value in missing:
            assert value.maker is not None
            assert value.maker.run is None
            (source,) = value.maker.inputs
            assert source.stage is not None
            sources.append(self._input(source, source.stage, arrays, inputs))
        copies = self._links.move_all(
            [self._moves[v] for v in missing],
            sources,
            [v.maker.inputs[0].stage or 0 for v in missing if v.maker is not None],
            stage,
            [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self._transferred[v]) for v in missing],
        )
        arrays.update(((v, stage), x) for v, x in zip(missing, copies, strict=True))

    def _result(self, value: Value, key: Key, arrays: dict[tuple[Value, int], Any], inputs: dict[Key, Any]) -> Any:
        stage = key[2].stage
        assert stage is not None
        return self._input(value, stage, arrays, inputs)

    @property
    def _wanted_inputs(self) -> list[Value]:
        return [v for p in self._split.programs for v in p.inputs if v.input_key is not None]

    # Compilation.

    def _compile_adders(self, compile: Compile) -> dict[Key, Any]:
        """For each tied parameter what adds another user's gradient to the owner's.

        Compiled now: a jit would compile in the first step.
        """
        tied = dict.fromkeys(key for s, keys in enumerate(self._unit_of) for key in keys if key[2].stage != s)
        adders = {}
        for key in tied:
            if self._links.here(key[2].stage or 0):
                struct = self._gradient_struct(key)
                lowered = jax.jit(jnp.add, donate_argnums=0, out_shardings=struct.sharding).lower(struct, struct)
                adders[key] = compile(f"stage {key[2].stage} add", lowered)
        return adders

    def _compile(self, compile: Compile) -> list[tuple[UpdateProgram, Any]]:
        shardings: dict[tuple[Value, int], Any] = {}
        known = self._known_shardings()
        wanted: dict[Value, Any] = {
            value: known[key] for key, value in self._split.results.items() if value.input_key is None
        }
        kept = {value for value in self._split.results.values() if value.input_key is not None}
        uses: dict[Value, int] = {}
        for program in self._split.programs:
            for value in program.inputs:
                uses[value] = uses.get(value, 0) + 1
        self._transferred: dict[Value, Any] = {}
        for _, source, target in self._split.transfers:
            assert target.stage is not None
            sharding = wanted.get(target, self._placements[target.stage].replicated)
            self._transferred[target] = shardings[target, target.stage] = sharding
            kept.add(source)
        compiled: list[tuple[UpdateProgram, Any]] = []
        for program in self._split.programs:
            if not self._links.here(program.stage):
                compiled.append((program, None))
                continue
            structs, donated = [], []
            for i, value in enumerate(program.inputs):
                if value.input_key is not None:
                    kind, leaf, slot = value.input_key
                    sharding = (
                        self._placements[program.stage].replicated
                        if kind in ("weight", "loss")
                        else known[kind, leaf, Slot(program.stage, slot.start, slot.stop)]
                    )
                    if (
                        kind in ("parameter", "optimizer")
                        and slot.stage is not None
                        and uses[value] == 1
                        and value not in kept
                    ):
                        donated.append(i)
                else:
                    sharding = shardings[value, program.stage]
                structs.append(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
            outs = [wanted.get(v) for v in program.outputs]
            function = _positional(program)
            lowered = jax.jit(function, donate_argnums=tuple(donated), out_shardings=outs).lower(*structs)
            done = compile(f"stage {program.stage} update", lowered)
            for value, sharding in zip(program.outputs, done.output_shardings, strict=True):
                shardings[value, program.stage] = sharding
            compiled.append((program, done))
        return compiled

    def _gradient_struct(self, key: Key) -> jax.ShapeDtypeStruct:
        """Of the gradient of a parameter at its home."""
        assert key[2].stage is not None
        home = self._stages[key[2].stage]
        position = self._unit_of[key[2].stage].index(key)
        dtype = home.gradient_structs[position].dtype
        sharding = home.gradient_shardings[position]
        return jax.ShapeDtypeStruct(home.layout.params[position].shape, dtype, sharding=sharding)

    def _known_shardings(self) -> dict[Key, Any]:
        known: dict[Key, Any] = {}
        for s, keys in enumerate(self._unit_of):
            for position, key in enumerate(keys):
                if key[2].stage == s:
                    known[key] = self._layout.stages[s].params[position].sharding
                    known["gradient", key[1], key[2]] = self._stages[s].gradient_shardings[position]
        for key, entry in zip(self._optimizer_keys, self._layout.optimizer, strict=True):
            known[key] = entry.sharding
        return known


def _positional(program: UpdateProgram) -> Any:
    def run(*arrays: Any) -> list[Any]:
        return program(arrays)

    return run


def _parameter_key(stage_graph: StageGraph, var: Any, split: SplitUpdate) -> Key:
    unit = stage_graph.graph.units[var]
    for slot in split.parameter_homes[unit.leaf]:
        if (slot.start, slot.stop) == (unit.start, unit.stop):
            return ("parameter", unit.leaf, slot)
    raise AssertionError("a parameter has no home")


def _optimizer_keys(split: SplitUpdate, num_stages: int) -> list[Key]:
    """Keys of the optimizer arrays, in the order of ``Layout.optimizer``."""
    keys: list[Key] = []
    for leaf, home in enumerate(split.optimizer_homes):
        slots = [Slot(s) for s in range(num_stages)] if home[0].stage is None else list(home)
        keys.extend(("optimizer", leaf, slot) for slot in slots)
    return keys
