"""Plan a problem: the best plan of every grid of some allocations."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import arena_jax.grid as grid_package
from arena_jax.compiler.cost import Hardware, hardware_of, transfer_s
from arena_jax.compiler.coupling import couples_samples
from arena_jax.compiler.flops import jaxpr_flops
from arena_jax.compiler.graph import Graph, build_graph
from arena_jax.compiler.inter import Costs, StageChoice, best_stages, least_memory
from arena_jax.compiler.layers import Layers, find_layers
from arena_jax.compiler.problem import PARAMS, Problem
from arena_jax.compiler.propagate import Axes
from arena_jax.compiler.sharding import Sharding, ShardingSearch
from arena_jax.compiler.stage_cost import LayerWork, MeshCost, Option, layer_work, state_ratios
from arena_jax.compiler.trace import Trace, trace_loss
from arena_jax.errors import UsageError
from arena_jax.grid import (
    CATALOGUE,
    Allocation,
    Catalogue,
    Estimate,
    GridShape,
    IndexRow,
    JobKey,
    Plan,
    PlanIndex,
    Spec,
    StageEstimate,
    StagePlan,
    Submesh,
    grids_of,
    logical_meshes,
    tilings,
)

MAX_STAGES = 8
MAX_MICROBATCHES = 32


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Pins and switches of the search; ``None`` and ``"search"`` leave a choice open.

    Attributes:
        stages: number of pipeline stages.
        dp, tp: mesh sizes of every stage.
        zero: 0 to 3, or ``"search"``.
        remat: ``"search"``, ``"on"`` or ``"off"``.
        space: ``"full"``, or ``"alpa"`` (no ZeRO).
        engine: ``"highs"``, the only engine of this release.
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
    works: dict[tuple[int, int], LayerWork] = field(default_factory=dict)

    def work(self, dp: int, tp: int) -> LayerWork:
        """Work per layer on a ``dp x tp`` mesh, found once."""
        if (dp, tp) not in self.works:
            self.works[dp, tp] = layer_work(self.graph, self.layers, self.shardings.find(dp, tp))
        return self.works[dp, tp]


def analyse(problem: Problem, trace: Trace | None = None) -> Analysis:
    """Trace the whole global batch as one microbatch (unless ``trace`` is that) and find its layers."""
    trace = trace or trace_loss(problem, 1)
    graph = build_graph(trace)
    return Analysis(
        problem=problem,
        trace=trace,
        graph=graph,
        layers=find_layers(graph),
        shardings=ShardingSearch(graph),
        coupling=couples_samples(trace),
    )


def plan_problem(
    problem: Problem,
    targets: Iterable[Allocation | GridShape],
    *,
    constraints: Constraints | None = None,
    num_microbatches: int | None = None,
    catalogue: Catalogue = CATALOGUE,
    analysis: Analysis | None = None,
) -> PlanIndex:
    """Plan every grid of the allocations.

    Args:
        targets: allocations, each at every number of stages, and single grids.
        num_microbatches: pinned number; ``None`` chooses one per grid where nothing couples samples,
            and otherwise one for all allocations.

    Returns:
        One row per grid: its best plan, or why none fits.

    Raises:
        UsageError: pins that contradict each other or the batch.
    """
    started = time.perf_counter()
    constraints = constraints or Constraints()
    check_pins(problem, constraints, num_microbatches)
    analysis = analysis or analyse(problem)
    choices = _microbatch_choices(problem, num_microbatches)
    grids = [(grid, hardware_of(grid.allocation, catalogue)) for grid in grids_of_targets(targets, constraints)]
    rows = {
        (grid, m): _plan_grid(analysis, grid, hardware, constraints, m) for grid, hardware in grids for m in choices
    }
    if num_microbatches is None and analysis.coupling:
        chosen = _common_microbatches(rows, [g for g, _ in grids], choices)
        picked = [rows[grid, chosen] for grid, _ in grids]
    else:
        picked = [_fastest([rows[grid, m] for m in choices]) for grid, _ in grids]
    key = job_key(
        problem,
        analysis.trace,
        [grid for grid, _ in grids],
        constraints=constraints,
        num_microbatches=num_microbatches,
        coupled=bool(analysis.coupling),
        catalogue=catalogue,
    )
    return PlanIndex(picked, key=key, search_s=time.perf_counter() - started, num_programs_solved=len(rows))


def job_key(
    problem: Problem,
    trace: Trace,
    grids: Sequence[GridShape],
    *,
    constraints: Constraints,
    num_microbatches: int | None,
    coupled: bool,
    catalogue: Catalogue = CATALOGUE,
    name: str = "",
) -> JobKey:
    """Everything a row depends on besides grid and number of microbatches.

    Args:
        grids: what is planned together. Of their device types the key holds the catalogue rows, for
            ``cpu`` as measured here. Where one number of microbatches has to serve all of them
            (``coupled`` and ``num_microbatches`` open), a row depends on the others, and they are in
            the key too.
        name: what people call the model; by default its fingerprint.
    """
    pins = {k: v for k, v in asdict(constraints).items() if k != "stages"}  # a row is of one grid anyway
    types = {grid.allocation.device_type for grid in grids}
    return JobKey(
        {
            "model": name or trace.fingerprint,
            "model_fingerprint": trace.fingerprint,
            "global_batch": problem.global_batch,
            "optimizer": [str(x.dtype) + str(x.shape) for x in jax.tree.leaves(problem.optimizer_struct)],
            "precision": asdict(problem.precision),
            "constraints": pins,
            "num_microbatches": num_microbatches,
            "together": sorted(map(str, grids)) if coupled and num_microbatches is None else [],
            "devices": {t: _facts(hardware_of(Allocation(t, 1, 1), catalogue)) for t in sorted(types)},
            "search": _source_digest(),
            "jax": jax.__version__,
        }
    )


def _facts(hardware: Hardware) -> dict[str, Any]:
    """What a plan can depend on of a device type, its usable memory included."""
    facts = asdict(hardware.device) | {"usable_bytes": hardware.usable_bytes}
    return {k: v for k, v in facts.items() if k not in ("name", "price_per_hour", "source")}


@cache
def _source_digest() -> str:
    """Hash of the source that answers, so that no change of search or cost model serves an old answer."""
    folders = Path(__file__).parent, Path(grid_package.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_pins(problem: Problem, constraints: Constraints, num_microbatches: int | None) -> None:
    """Raise :class:`UsageError` for pins that no grid can satisfy."""
    if constraints.engine != "highs":
        raise UsageError(
            f"engine {constraints.engine!r} is not available in this release", hint="use plan.engine=highs"
        )
    batch = problem.global_batch
    if num_microbatches is not None and (num_microbatches < 1 or batch % num_microbatches):
        nearest = min((m for m in range(1, batch + 1) if batch % m == 0), key=lambda m: abs(m - num_microbatches))
        raise UsageError(
            f"a global batch of {batch} does not split into {num_microbatches} microbatches",
            hint=f"use {nearest}, which divides it",
        )


def _microbatch_choices(problem: Problem, pinned: int | None) -> list[int]:
    if pinned is not None:
        return [pinned]
    batch = problem.global_batch
    # A microbatch of one row may be traced into other equations than a larger one.
    return [m for m in (1, 2, 4, 8, 16, 32) if m == 1 or (batch % m == 0 and m <= min(batch // 2, MAX_MICROBATCHES))]


def grids_of_targets(targets: Iterable[Allocation | GridShape], constraints: Constraints) -> list[GridShape]:
    """The grids meant, each once.

    Raises:
        UsageError: a number of stages that the allocation cannot be cut into.
    """
    grids: dict[GridShape, None] = {}
    for target in targets:
        if isinstance(target, Allocation):
            if constraints.stages is None:
                grids.update(dict.fromkeys(grids_of(target, MAX_STAGES)))
                continue
            target = GridShape(target, constraints.stages)
        if target.num_stages > target.num_devices or not tilings(target):
            possible = ", ".join(str(g.num_stages) for g in grids_of(target.allocation, MAX_STAGES))
            raise UsageError(
                f"{target.allocation} cannot be cut into {target.num_stages} stages",
                hint=f"use one of {possible} stages",
            )
        grids[target] = None
    return list(grids)


def _fastest(rows: Sequence[IndexRow]) -> IndexRow:
    feasible = [row for row in rows if row.feasible]
    if feasible:
        return min(feasible, key=lambda row: row.step_time_s or 0.0)
    return min(rows, key=lambda row: row.least_memory_bytes or float("inf"))


def _common_microbatches(
    rows: dict[tuple[GridShape, int], IndexRow], grids: Sequence[GridShape], choices: Sequence[int]
) -> int:
    """One number for all allocations: most allocations served, then least geometric mean of step times."""

    def quality(m: int) -> tuple[int, float]:
        best: dict[Allocation, float] = {}
        for grid in grids:
            seconds = rows[grid, m].step_time_s
            if seconds is not None:
                best[grid.allocation] = min(seconds, best.get(grid.allocation, seconds))
        return len(best), -float(np.mean(np.log(list(best.values())))) if best else 0.0

    return max(choices, key=quality)


# One grid.


def _plan_grid(
    analysis: Analysis, grid: GridShape, hardware: Hardware, constraints: Constraints, num_microbatches: int
) -> IndexRow:
    layers = analysis.layers
    if grid.num_stages > layers.num_layers:
        return _row(grid, num_microbatches, f"the model has {layers.num_layers} layers to cut, fewer than stages")
    search = _GridSearch(analysis, grid, hardware, constraints, num_microbatches)
    if not search.meshes_exist:
        return _row(grid, num_microbatches, search.why_no_mesh())
    found = best_stages(grid, layers.num_layers, num_microbatches, search.costs, search.boundary_s())
    if found is None:
        return search.nothing_fits()
    _, stages = found
    plan = _make_plan(analysis, grid, num_microbatches, [(s, search.options[s.submesh][s.option]) for s in stages])
    estimate = search.estimate(stages)
    return IndexRow(grid=grid, num_microbatches=num_microbatches, plan=plan, estimate=estimate)


def _row(grid: GridShape, num_microbatches: int, reason: str, least_memory_bytes: int | None = None) -> IndexRow:
    return IndexRow(
        grid=grid,
        num_microbatches=num_microbatches,
        plan=None,
        estimate=None,
        reason=reason,
        least_memory_bytes=least_memory_bytes,
    )


class _GridSearch:
    """Cost tables of one grid at one number of microbatches."""

    def __init__(
        self, analysis: Analysis, grid: GridShape, hardware: Hardware, constraints: Constraints, num_microbatches: int
    ) -> None:
        self._analysis = analysis
        self._grid = grid
        self._hardware = hardware
        self._constraints = constraints
        self._m = num_microbatches
        self.options: dict[Submesh, list[tuple[MeshCost, Option]]] = {}
        self._needs: dict[tuple[int, Submesh], np.ndarray] = {}

    @property
    def _rows(self) -> int:
        return self._analysis.problem.global_batch // self._m

    def _meshes(self, submesh: Submesh) -> list[tuple[int, int]]:
        pins = self._constraints
        return [
            (dp, tp)
            for dp, tp in logical_meshes(submesh.num_devices)
            if self._rows % dp == 0 and pins.dp in (None, dp) and pins.tp in (None, tp)
        ]

    @property
    def meshes_exist(self) -> bool:
        return any(all(self._meshes(s) for s in tiling) for tiling in tilings(self._grid))

    def why_no_mesh(self) -> str:
        pins = self._constraints
        if pins.dp is None and pins.tp is None:
            return f"no dp divides the {self._rows} rows of a microbatch here"
        pinned = " and ".join(f"{name} {size}" for name, size in (("dp", pins.dp), ("tp", pins.tp)) if size is not None)
        return f"pinned {pinned} forms no submesh here with {self._rows} rows a microbatch"

    def costs(self, stages_left: int, submesh: Submesh) -> Costs:
        """Best option per run of layers; a stage that is k from the end keeps k microbatches in flight."""
        count = self._analysis.layers.num_layers
        options = self._options(submesh)
        seconds = np.full((count, count), np.inf)
        option = np.zeros((count, count), int)
        below = np.tri(count, k=-1, dtype=bool)
        in_flight = min(stages_left, self._m)
        needs = np.full((count, count), np.inf)
        for i, (mesh, choice) in enumerate(options):
            compute, communication, once = mesh.step_parts(self._m, choice)
            memory = mesh.memory(self._m, in_flight, choice)
            needs = np.minimum(needs, np.where(below, np.inf, memory))
            # Once-a-step work is spread over the microbatches, so that one number ranks stages.
            total = compute + communication + once / self._m
            total = np.where((memory <= self._hardware.usable_bytes) & ~below, total, np.inf)
            better = total < seconds
            seconds[better], option[better] = total[better], i
        self._needs[stages_left, submesh] = needs
        return Costs(seconds=seconds, option=option)

    def _options(self, submesh: Submesh) -> list[tuple[MeshCost, Option]]:
        if submesh not in self.options:
            analysis = self._analysis
            optimizer, accumulator = state_ratios(analysis.problem)
            live = np.array(analysis.layers.live_bytes, float)
            self.options[submesh] = [
                (
                    MeshCost(
                        work=analysis.work(dp, tp),
                        hardware=self._hardware,
                        submesh=submesh,
                        optimizer_ratio=optimizer,
                        accumulator_ratio=accumulator,
                        live_bytes=live,
                    ),
                    option,
                )
                for dp, tp in self._meshes(submesh)
                for option in self._constraints.options()
                if option.zero == 0 or dp > 1
            ]
        return self.options[submesh]

    def boundary_s(self) -> np.ndarray:
        """Seconds per microbatch to carry values into each layer and cotangents back."""
        same_node = self._grid.allocation.num_nodes == 1
        return np.array(
            [
                2 * (transfer_s(self._hardware, b / self._m, same_node) + self._dispatch_s) if b else 0.0
                for b in self._analysis.layers.live_bytes
            ]
        )

    @property
    def _dispatch_s(self) -> float:
        """Issuing the programs of one more stage; on virtual CPU devices nothing hides it."""
        return self._hardware.dispatch_s * (self._m if self._hardware.device.platform == "cpu" else 1)

    def nothing_fits(self) -> IndexRow:
        """The row of a grid on which nothing fits, with the bytes of the cut that needs fewest."""
        usable = self._hardware.usable_bytes
        least = least_memory(self._grid, self._analysis.layers.num_layers, lambda *at: self._needs[at])
        if not usable < least < np.inf:
            return _row(self._grid, self._m, "no cut of the layers fits the memory of every stage")
        reason = f"needs {_gib(least)} a device, {_gib(usable)} are usable: {_gib(least - usable)} too much"
        return _row(self._grid, self._m, reason, least_memory_bytes=int(least))

    def estimate(self, stages: Sequence[StageChoice]) -> Estimate:
        computes: list[float] = []
        communications: list[float] = []
        onces: list[float] = []
        memories: list[int] = []
        for i, s in enumerate(stages):
            mesh, option = self.options[s.submesh][s.option]
            compute, communication, once = mesh.step_parts(self._m, option)
            in_flight = min(len(stages) - i, self._m)
            at = s.first, s.last
            computes.append(float(compute[at]))
            communications.append(float(communication[at]))
            onces.append(float(once[at]))
            memories.append(int(mesh.memory(self._m, in_flight, option)[at]))
        times = [a + b for a, b in zip(computes, communications, strict=True)]
        slowest = int(np.argmax(times))
        bubbles = (self._m - 1) * times[slowest]
        boundary = self.boundary_s()
        boundaries = float(sum(boundary[s.first] for s in stages[1:]))
        once_s = max(onces)
        step_time_s = sum(times) + bubbles + boundaries + once_s
        rounds = self._m - 1
        breakdown = {
            "compute_s": sum(computes) + rounds * computes[slowest],
            "communication_s": sum(communications) + rounds * communications[slowest],
            "boundary_s": boundaries,
            "gradients_and_update_s": once_s,
        }
        return Estimate(
            step_time_s=step_time_s,
            memory_bytes=max(memories),
            device_memory_bytes=self._hardware.usable_bytes,
            stages=tuple(
                StageEstimate(compute_s=c, communication_s=d, memory_bytes=m)
                for c, d, m in zip(computes, communications, memories, strict=True)
            ),
            flops=3 * jaxpr_flops(self._analysis.trace.jaxpr),
            imbalance=max(times) / (sum(times) / len(times)),
            breakdown=breakdown,
        )


def _make_plan(
    analysis: Analysis,
    grid: GridShape,
    num_microbatches: int,
    stages: Sequence[tuple[StageChoice, tuple[MeshCost, Option]]],
) -> Plan:
    problem = analysis.problem
    return Plan(
        model_fingerprint=analysis.trace.fingerprint,
        global_batch=problem.global_batch,
        grid=grid,
        num_microbatches=num_microbatches,
        precision=problem.precision,
        stages=tuple(
            stage_plan(
                analysis,
                layers=(choice.first, choice.last),
                submesh=choice.submesh,
                sharding=mesh.work.sharding,
                option=option,
            )
            for choice, (mesh, option) in stages
        ),
    )


def stage_plan(
    analysis: Analysis, *, layers: tuple[int, int], submesh: Submesh, sharding: Sharding, option: Option
) -> StagePlan:
    """A stage of a plan: the specs of the values and parameters its layers use."""
    trace = analysis.trace
    first, last = _node_range(analysis.layers, layers, len(analysis.graph.nodes))
    activations = {}
    if sharding.dp * sharding.tp > 1:
        for key, axes in sharding.specs.items():
            if first <= int(key.partition("/")[0].partition(":")[0]) <= last:
                activations[key] = _spec(axes)
    parameters: dict[str, Spec] = {}
    for leaf_number, axes in sharding.parameters.items():
        parameters[trace.leaves[leaf_number].name] = _spec(axes)
    if option.zero == 3:
        for leaf in trace.leaves:
            if leaf.kind == PARAMS:
                parameters[leaf.name] = _over_dp(parameters.get(leaf.name, ()), leaf.shape, sharding.dp)
    used = _used_leaves(analysis, first, last)
    return StagePlan(
        layers=layers,
        submesh=submesh,
        dp=sharding.dp,
        tp=sharding.tp,
        zero=option.zero,
        remat=option.remat,
        parameters={name: spec for name, spec in parameters.items() if name in used and any(spec)},
        activations=activations,
    )


def _node_range(layers: Layers, run: tuple[int, int], num_nodes: int) -> tuple[int, int]:
    """Nodes a run of layers touches; the value that enters it is made by the node before."""
    first = layers.starts[run[0]].node
    if run[1] + 1 == layers.num_layers:
        return max(first - 1, 0), num_nodes - 1
    end = layers.starts[run[1] + 1]
    return max(first - 1, 0), end.node if end.iteration else end.node - 1


def _used_leaves(analysis: Analysis, first: int, last: int) -> set[str]:
    graph = analysis.graph
    producers = {v: node for node in graph.nodes for v in node.eqn.outvars}
    pending: list[Any] = [a for node in graph.nodes[first : last + 1] for a in node.eqn.invars]
    found: set[str] = set()
    seen: set[int] = set()
    while pending:
        atom = pending.pop()
        if hasattr(atom, "val") or id(atom) in seen:
            continue
        seen.add(id(atom))
        if atom in graph.units:
            found.add(analysis.trace.leaves[graph.units[atom].leaf].name)
        elif atom in producers and not producers[atom].placed:
            pending.extend(producers[atom].eqn.invars)
    return found


def _spec(axes: Axes) -> Spec:
    spec = list(axes)
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


def _over_dp(spec: Spec, shape: tuple[int, ...], dp: int) -> Spec:
    """Shard over dp as well: the largest whole dim that dp divides."""
    full = [*spec, *(None,) * (len(shape) - len(spec))]
    free = [i for i, dim in enumerate(full) if dim is None and shape[i] % dp == 0 and shape[i] >= dp]
    if dp == 1 or not free:
        return spec
    full[max(free, key=lambda i: shape[i])] = "dp"
    return _spec(tuple(full))  # type: ignore[arg-type]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
