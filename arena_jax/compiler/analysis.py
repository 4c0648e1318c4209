"""What planning needs to know of a problem before it knows any hardware, and what a user may pin."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from arena_jax.compiler.cost import Hardware
from arena_jax.compiler.coupling import couples_samples
from arena_jax.compiler.engines import Engine, engine
from arena_jax.compiler.graph import Graph, build_graph
from arena_jax.compiler.inter_op.layer_work import layer_work
from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option, StateRatios, mesh_cost, state_ratios
from arena_jax.compiler.intra_op.prices import prices_of
from arena_jax.compiler.intra_op.sharding import ShardingSearch
from arena_jax.compiler.layers import Layers, find_layers
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.profiling.layer_programs import LayerPrograms
from arena_jax.compiler.row_shards import has_row_shards
from arena_jax.compiler.trace import Trace, trace_loss
from arena_jax.grid import Submesh

# Memory cannot bind where the whole model takes less than this part of a device.
_MOST_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Pins and switches of the search; ``None`` and ``"search"`` leave a choice open.

    Attributes:
        stages: number of pipeline stages.
        dp, tp: mesh sizes of every stage.
        zero: 0 to 3, or ``"search"``.
        remat: ``"search"``, ``"on"`` or ``"off"``.
        space: ``"full"``, or ``"alpa"`` (no ZeRO).
        engine: ``"highs"``, ``"alpa"``, or ``"both"`` compared.
    """

    stages: int | None = None
    dp: int | None = None
    tp: int | None = None
    zero: int | str = "search"
    remat: str = "search"
    space: str = "full"
    engine: str = "highs"

    def options(self) -> tuple[Option, ...]:
        """The ZeRO levels and rematerialisation choices that are open, cheapest first."""
        levels: Sequence[int] = (0, 1, 2, 3) if self.zero == "search" else (int(self.zero),)
        if self.space == "alpa":
            levels = (0,)
        remats = {"search": (False, True), "on": (True,), "off": (False,)}[self.remat]
        return tuple(Option(zero=zero, remat=remat) for remat in remats for zero in levels)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What planning needs to know of a problem, on any hardware."""

    problem: Problem
    trace: Trace
    graph: Graph
    layers: Layers
    shardings: ShardingSearch
    coupling: str
    _meshes: dict[object, tuple[MeshCost, ...]] = field(default_factory=dict)

    @cached_property
    def programs(self) -> LayerPrograms:
        """The layers as programs of one device."""
        return LayerPrograms(self.problem, self.trace, self.graph, self.layers, self.shardings)

    @cached_property
    def ratios(self) -> StateRatios:
        return state_ratios(self.problem)

    @cached_property
    def row_shards(self) -> bool:
        """Whether dp shards sum the gradients of their own rows, for one reduction a step."""
        return has_row_shards(self.trace, self.coupling)

    def meshes(
        self, hardware: Hardware, submesh: Submesh, dp: int, tp: int, solver: Engine | None = None
    ) -> tuple[MeshCost, ...]:
        """Costs of all runs of layers on a submesh arranged as ``dp x tp``, found once.

        Under the fastest sharding, and where the model might not fit under that, under a lean one too.
        """
        solver = solver or engine("highs")
        on_cpu = hardware.device.platform == "cpu"  # whose devices share what the machine has
        devices = hardware.allocation.num_devices if on_cpu else None
        alone = submesh.num_devices == hardware.allocation.num_devices
        key = hardware.device.name, hardware.generation, devices, alone, submesh, dp, tp, solver.name
        if key not in self._meshes:
            ratios, shardings = self.ratios, []
            # Experts over dp have no shards of rows: shardings with and without them, at the prices of each.
            for late_gradients in (
                (True, False) if self.row_shards and self.shardings.has_experts else (self.row_shards,)
            ):
                prices = prices_of(
                    hardware,
                    submesh,
                    dp,
                    tp,
                    update_ratio=ratios.update,
                    parameter_memory=ratios.held,
                    late_gradients=late_gradients,
                )
                fastest = self.shardings.find(dp, tp, prices, solver)
                shardings.append(fastest)
                # A stage holds a part of the model, so much of it that memory may bind.
                if fastest.solution.memory_bytes > hardware.usable_bytes / _MOST_STAGES:
                    lean = self.shardings.find_lean(dp, tp, prices, solver)
                    shardings += [lean] if lean is not None else []
            self._meshes[key] = tuple(
                mesh_cost(
                    layer_work(self.graph, self.layers, found, self.shardings.casts),
                    hardware,
                    submesh,
                    ratios,
                    self.layers,
                    row_shards=self.row_shards,
                    programs=self.programs,
                )
                for i, found in enumerate(shardings)
                if all(found.specs != other.specs or found.parameters != other.parameters for other in shardings[:i])
            )
        return self._meshes[key]


def analyse(problem: Problem, trace: Trace | None = None, coupling: str | None = None) -> Analysis:
    """Trace the whole global batch as one microbatch (unless ``trace`` is that) and find its layers.

    Args:
        coupling: what :func:`couples_samples` says of the trace, where it is at hand.
    """
    trace = trace or trace_loss(problem, 1)
    graph = build_graph(trace)
    return Analysis(
        problem=problem,
        trace=trace,
        graph=graph,
        layers=find_layers(graph),
        shardings=ShardingSearch(graph),
        coupling=couples_samples(trace) if coupling is None else coupling,
    )
