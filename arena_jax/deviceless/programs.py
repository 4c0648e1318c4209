"""Compile every program of a plan's steps for devices that are not here; equal programs once."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from arena_jax.compiler.hlo import collectives
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.trace import Trace
from arena_jax.deviceless.account import Resident, StageAccount, account_of_stage, account_of_step
from arena_jax.deviceless.store import Compiled, ProgramStore, fingerprint
from arena_jax.deviceless.target import describe, gpu_config, gpu_topology, tpu_slice
from arena_jax.grid import AXES, DeviceType, Plan, StagePlan
from arena_jax.runtime.lower import make_engine
from arena_jax.runtime.pipeline import Pipeline
from arena_jax.runtime.placement import StagePlacement
from arena_jax.runtime.stage_programs import StagePrograms

# Autotuning would run kernels. Products as calls of the library need none, and compile faster.
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "cuda": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    "tpu": {},
}
_REFUSED = ("RESOURCE_EXHAUSTED", "Ran out of memory")
_EXCEEDED = re.compile(r"[Ee]xceeded \w+ capacity by ([\d.]+)([KMGT]?)")
_REQUIRED = re.compile(r"required.*?\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Done:
    """One program of a plan, for who reports on it.

    Attributes:
        name: ``stage 0 forward``.
        known: whether it was compiled before, in this call or another.
    """

    name: str
    fingerprint: str
    known: bool
    compiled: Compiled


class _Stopped(Exception):
    """A program was refused, and what depends on it cannot be lowered."""


@dataclass
class DevicelessCompiler:
    """Compiles plans of one problem for one device type.

    Args:
        versions: of the compiler.
        progress: told of every program.
    """

    problem: Problem
    whole: Trace
    device: DeviceType
    versions: Mapping[str, str]
    store: ProgramStore
    progress: Callable[[Done], None]
    _meshes: dict[tuple[Any, ...], Mesh] = field(default_factory=dict)

    def compile(self, plan: Plan) -> list[StageAccount]:
        """Compile what the plan's steps run, and account for it stage by stage."""
        found: list[dict[str, list[Compiled]]] = [{} for _ in plan.stages]

        def look_up(name: str, lowered: Any) -> Any:
            number, role = re.fullmatch(r"stage (\d+) (\w+)", name).groups()  # type: ignore[union-attr]
            stage = plan.stages[int(number)]
            done = self._program(name, stage, lowered)
            found[int(number)].setdefault(role, []).append(done.compiled)
            self.progress(done)
            if done.compiled.message and role != "update":
                raise _Stopped
            return _Shardings(self._mesh(stage), lowered, done.compiled)

        placements = [StagePlacement(plan=stage, mesh=self._mesh(stage)) for stage in plan.stages]
        engine = None
        try:
            engine, layout = make_engine(self.problem, plan, placements, self.whole, compile=look_up)
        except _Stopped:
            pass
        if len(plan.stages) == 1:
            (step,) = found[0]["step"]
            return [account_of_step(step, plan.num_microbatches)]
        if not isinstance(engine, Pipeline):
            return [account_of_stage(programs, Resident(), 1) for programs in found]
        entries: list[list[Any]] = [[] for _ in plan.stages]
        for entry in layout.entries:
            assert entry.slot.stage is not None
            entries[entry.slot.stage].append(entry.struct)
        return [
            account_of_stage(programs, _resident(stage, entries[s]), min(len(plan.stages) - s, plan.num_microbatches))
            for s, (stage, programs) in enumerate(zip(engine.stages, found, strict=True))
        ]

    def _program(self, name: str, stage: StagePlan, lowered: Any) -> Done:
        text = re.sub(r"^module @\S+", "module", lowered.as_text())
        options = _OPTIONS[self.device.platform]
        key = fingerprint(text, describe(self.device, stage.submesh), self.versions, options)
        known = self.store.get(key)
        if known is not None and (known.output_specs is not None or not name.endswith("forward")):
            return Done(name=name, fingerprint=key, known=True, compiled=known)
        compiled = _compile(lowered, options)
        self.store.put(key, compiled)
        return Done(name=name, fingerprint=key, known=False, compiled=compiled)

    def _mesh(self, stage: StagePlan) -> Mesh:
        """A stage's mesh on a topology of its own, so that equal stages are equal programs."""
        key = stage.submesh, stage.dp, stage.tp
        if key not in self._meshes:
            count = stage.submesh.num_devices
            if self.device.platform == "tpu":
                topology = topologies.get_topology_desc(platform="tpu", topology_name=tpu_slice(self.device, count))
            else:
                topology = topologies.get_topology_desc(
                    platform="cuda", target_config=gpu_config(self.device), topology=gpu_topology(stage.submesh)
                )
            grid: np.ndarray = np.array(topology.devices[:count]).reshape(stage.dp, stage.tp)
            self._meshes[key] = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return self._meshes[key]


class _Shardings:
    """As much of a compiled program as lowering the next one asks for."""

    def __init__(self, mesh: Mesh, lowered: Any, compiled: Compiled) -> None:
        specs = compiled.output_specs
        leaves, treedef = jax.tree.flatten(lowered.out_info)
        if specs is None:
            specs = ((),) * len(leaves)
        shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
        self.output_shardings = jax.tree.unflatten(treedef, shardings)


def _compile(lowered: Any, options: Mapping[str, Any]) -> Compiled:
    started = time.perf_counter()
    try:
        done = lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if not any(sign in message for sign in _REFUSED):
            raise
        return Compiled(
            compile_s=time.perf_counter() - started, missing_bytes=_exceeded(message), message=message.splitlines()[0]
        )
    compile_s = time.perf_counter() - started
    memory = done.memory_analysis()
    return Compiled(
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        temp_bytes=int(memory.temp_size_in_bytes),
        collectives=collectives(done.as_text()),
        compile_s=compile_s,
        output_specs=_specs(done.output_shardings),
    )


def _exceeded(message: str) -> int:
    """Bytes by which a program is too large, as the TPU compiler says; at least 1 where it is not said."""
    by = _EXCEEDED.search(message)
    if by:
        return max(1, math.ceil(float(by[1]) * _UNITS[by[2]]))
    of = _REQUIRED.search(message)
    return max(1, math.ceil(float(of[1]) * _UNITS[of[2]] - float(of[3]) * _UNITS[of[4]])) if of else 1


def _specs(shardings: Any) -> tuple[tuple[Any, ...], ...] | None:
    leaves = jax.tree.leaves(shardings)
    if not all(isinstance(leaf, NamedSharding) for leaf in leaves):
        return None
    return tuple(tuple(leaf.spec) for leaf in leaves)


def _resident(stage: StagePrograms, state: Sequence[jax.ShapeDtypeStruct]) -> Resident:
    """What stays beside a stage's programs; ``state`` is its parameters, frozen leaves, state and optimizer."""
    layout = stage.layout
    num_state = len(layout.params) + len(layout.frozen) + len(stage.roles.dependent)
    num_received = len(stage.function.stage.received)
    pool = stage.pool_structs
    received = pool[len(pool) - num_received :]
    # States ahead of all microbatches, constants and the batch: what of the pool no entry of the state is.
    constant = num_state + len(stage.roles.advanced)
    beside = [*pool[num_state:constant], *pool[constant + len(stage.roles.constant) : len(pool) - num_received]]
    kept_inputs = [pool[i] for i in stage.from_inputs if i >= len(pool) - num_received]
    return Resident(
        always=_bytes(state) + _bytes(stage.gradient_structs) + _bytes(beside),
        kept=_bytes(stage.kept_structs) + _bytes(kept_inputs),
        received=_bytes(received),
    )


def _bytes(structs: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes of one device."""
    total = 0
    for struct in structs:
        shape = struct.shape if struct.sharding is None else struct.sharding.shard_shape(struct.shape)
        dtype = struct.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
            total += math.prod(shape) * math.prod(data.shape) * data.dtype.itemsize
        else:
            total += math.prod(shape) * np.dtype(dtype).itemsize
    return total
