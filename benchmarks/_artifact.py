"""The artifact's models and clusters in our terms: recipes, recorded collectives, and times of others.

Every model is traced once, at its smallest batch, and its work scaled to the others: rows are the only
thing that changes. Alpa sums gradients locally and reduces them once a step; here they are charged so.
"""

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.compiler.analysis import Analysis, Constraints
from arena_jax.compiler.cost import FITTED, Efficiency, Hardware
from arena_jax.compiler.cost.pieces import Curve, Pieces
from arena_jax.compiler.engines import Engine
from arena_jax.compiler.graph import Graph, build_graph
from arena_jax.compiler.inter_op.cuts import Costs, StageChoice, best_stages
from arena_jax.compiler.inter_op.grid_search import GridSearch, plan_grid
from arena_jax.compiler.inter_op.layer_work import LayerWork, layer_work
from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option, mesh_cost
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.sharding import ShardingSearch
from arena_jax.compiler.layers import Layers, find_layers
from arena_jax.compiler.search import MAX_STAGES
from arena_jax.compiler.trace import trace_loss
from arena_jax.grid import CATALOGUE, Allocation, Estimate, GridShape, Submesh, tilings
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from benchmarks._operators import DATA

FOLDER = DATA / "arena_artifact"
NUM_MICROBATCHES = 16
# Alpa's units: the largest of the artifact's counts that divides the blocks (16 in a wide_resnet of 50 layers).
_UNITS = (16, 8, 6)
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
PER_NODE = {"a100": 4, "v100": 16, "a40": 2, "a10": 2}


@dataclass(frozen=True)
class Job:
    family: str
    params: str
    global_batch: int

    @property
    def recipe(self) -> str:
        return f"{self.family}_{self.params.lower().replace('.', '_')}"


@dataclass(frozen=True)
class Row:
    """One measured iteration of the plan that was picked."""

    job: Job
    gpu: str
    nodes: int
    per_node: int
    seconds: float

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def allocation(self) -> Allocation:
        return Allocation(CATALOGUE.canonical(self.gpu), self.nodes, self.per_node)


@dataclass(frozen=True)
class PlanRow:
    """One plan of the breakdown: its pipeline depth, mesh, and estimated parts."""

    row: Row
    pp: int
    dp: int
    tp: int
    compute: float
    intra: float
    inter: float


def _read(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open() as lines:
        yield from csv.DictReader(lines)


def _row(r: Mapping[str, str], seconds: str) -> Row:
    job = Job(r["family"], r["params"], int(r["global_batch"]))
    return Row(job, r["gpu"], int(r["nodes"]), int(r["gpus_per_node"]), float(seconds))


def measured() -> list[Row]:
    return [_row(r, r["seconds"]) for r in _read("measured_iteration_seconds.csv") if r["seconds"]]


def breakdown() -> list[PlanRow]:
    return [
        PlanRow(
            _row(r, r["iteration"]),
            *(int(r[c]) for c in ("pp", "dp", "tp")),
            *(float(r[c]) for c in ("compute", "intra_stage_comm", "inter_stage_comm")),
        )
        for r in _read("plan_breakdown_seconds.csv")
    ]


# ------------------------------------------------------------------------------------------ clusters


@cache
def collectives(gpu: str) -> Mapping[tuple[int, int, int, int, bool], dict[str, Any]]:
    """Recorded collectives by (nodes, devices per node, size, stride, inside a node), then kind."""
    found: dict[tuple[int, int, int, int, bool], dict[str, dict[float, float]]] = {}
    paths = sorted((FOLDER / "collectives").glob(f"*_{gpu}_*.csv"), key=_over_sockets, reverse=True)
    for path in paths:
        nodes, _, _, _, per_node = path.stem.split("_")[:5]
        with path.open() as lines:
            for r in csv.DictReader(lines):
                groups = json.loads(r["replica_groups"]) if r["replica_groups"] else []
                if r["op"] not in _KINDS or r["dtype"] != "float32" or not groups:
                    continue
                group = groups[0]
                steps = set(np.diff(group).tolist())
                if len(steps) != 1:
                    continue
                inside = all(g[0] // int(per_node) == g[-1] // int(per_node) for g in groups)
                key = int(nodes), int(per_node), len(group), steps.pop(), inside
                points = found.setdefault(key, {}).setdefault(_KINDS[r["op"]], {})
                points[4.0 * int(r["elements"])] = float(r["seconds"])
    return {
        key: {kind: (tuple(sorted(points)), tuple(points[b] for b in sorted(points))) for kind, points in kinds.items()}
        for key, kinds in found.items()
    }


@cache
def sends(gpu: str) -> Mapping[bool, Curve]:
    """Recorded sends from one GPU to another, in a node (``True``) and between two: bytes and seconds, ascending."""
    found: dict[bool, Curve] = {}
    for inside, nodes, per_node in ((True, 1, 2), (False, 2, 1)):
        paths = sorted((FOLDER / "collectives").glob(f"{nodes}_{gpu}_{nodes}_n_{per_node}_d*.csv"), key=_over_sockets)
        for path in paths[:1]:
            with path.open() as lines:
                sent = [r for r in csv.DictReader(lines) if r["op"] == "send" and not r["replica_groups"]]
            points = sorted((4.0 * int(r["elements"]), float(r["seconds"])) for r in sent if r["dtype"] == "float32")
            found[inside] = tuple(b for b, _ in points), tuple(s for _, s in points)
    return found


def _over_sockets(path: Path) -> bool:
    """Where a table over InfiniBand exists it is read, else the one over sockets."""
    return not path.stem.endswith("_ib")


@cache
def hardware(gpu: str, nodes: int, per_node: int, efficiency: Efficiency = FITTED) -> Hardware:
    """A catalogue's type on the artifact's cluster: its nodes, 80 % of memory, its recorded collectives."""
    device = CATALOGUE[gpu]
    tables = collectives(gpu)
    # The table of these nodes first, then of the nearest number of nodes.
    nearest: dict[tuple[int, int, bool], Any] = {}
    for n, d, size, stride, inside in sorted(
        tables, key=lambda k: (abs(k[0] - nodes), abs(k[1] - per_node)), reverse=True
    ):
        nearest[size, stride, inside] = tables[n, d, size, stride, inside]
    known = sends(gpu)
    inter, latency_s = device.inter_node_bandwidth, device.inter_node_latency_s
    if False in known:  # a transfer between nodes takes what was recorded of large ones, and of small ones besides
        sizes, seconds = known[False]
        latency_s = seconds[0]
        inter = sizes[-1] / (seconds[-1] - latency_s) / 0.4  # of which the model gives a share to a transfer
    memory = {"a100": 40, "v100": 32, "a40": 48, "a10": 24}[gpu] * 2**30
    device = replace(
        device,
        devices_per_node=PER_NODE[gpu],
        inter_node_bandwidth=inter,
        inter_node_latency_s=latency_s,
        inter_node_link="ethernet",
        intra_node_link="nvlink-mesh" if gpu == "a100" else device.intra_node_link,
        memory_bytes=int(memory * 0.8 / 0.9),
    )
    return Hardware(
        device=device,
        allocation=Allocation(device.name, nodes, per_node),
        efficiency=efficiency,
        collectives=nearest,
        pieces=Pieces(transfers=known.get(True)),
    )


def roomier(hardware: Hardware, times: float) -> Hardware:
    """The same with more memory."""
    device = replace(hardware.device, memory_bytes=int(hardware.device.memory_bytes * times))
    return replace(hardware, device=device)


# -------------------------------------------------------------------------------------------- models


@dataclass
class Model:
    """One model traced at ``global_batch``; work per (dp, tp) is found once."""

    global_batch: int
    analysis: Analysis
    works: dict[tuple[int, int], LayerWork]


@cache
def model(family: str, params: str) -> Model:
    batch = min(row.job.global_batch for row in measured() if (row.job.family, row.job.params) == (family, params))
    recipe = load_recipe(Job(family, params, batch).recipe, ["plan.space=alpa", f"global_batch={batch}"])
    job = build(recipe)
    problem = job.problem()
    trace = trace_loss(problem, 1)
    graph = build_graph(trace)
    blocks = recipe.model.model_dump().get("num_layers", 16)
    units = next(u for u in _UNITS if blocks % u == 0)
    analysis = Analysis(
        problem=problem,
        trace=trace,
        graph=graph,
        layers=_units_of(graph, units),
        shardings=ShardingSearch(graph),
        coupling="",
    )
    return Model(batch, analysis, {})


def _units_of(graph: Graph, units: int) -> Layers:
    """As many layers as Alpa's recipe asks for, at heavy cuts where light ones make fewer."""
    light = find_layers(graph, units)
    return light if light.num_layers == units else find_layers(graph, units, only_light=False)


class _Scaled(Analysis):
    """A traced model at another global batch."""

    def meshes(
        self, hardware: Hardware, submesh: Submesh, dp: int, tp: int, solver: Engine | None = None
    ) -> tuple[MeshCost, ...]:
        work = _work(self.key, self.problem.global_batch, dp, tp)  # type: ignore[attr-defined]
        return (mesh_cost(work, hardware, submesh, self.ratios, self.layers),)


@cache
def _work(key: tuple[str, str], global_batch: int, dp: int, tp: int) -> LayerWork:
    base = model(*key)
    if (dp, tp) not in base.works:
        analysis = base.analysis
        base.works[dp, tp] = layer_work(analysis.graph, analysis.layers, analysis.shardings.find(dp, tp))
    work, scale = base.works[dp, tp], global_batch / base.global_batch
    factors = np.full(w.SIZE, scale)
    factors[w.NUM_OPS] = 1.0
    for axis in w.AXES:
        for kind in w.KINDS:
            for phase in w.PHASES:
                at = w.collective_at(axis, kind, phase)
                factors[at + 1] = 1.0
                if phase == w.PARAMETER:  # whatever the rows
                    factors[at] = 1.0
                if phase == w.GRADIENT:  # once a step, whatever the rows
                    factors[at : at + 2] = 1 / NUM_MICROBATCHES
    products = tuple(
        replace(
            p,
            shape=tuple(s * (scale if r else 1) for s, r in zip(p.shape, p.rows, strict=True)),
        )
        for p in work.products
    )
    return replace(work, works=work.works * factors, products=products)


@cache
def analysis_of(job: Job) -> Analysis:
    base = model(job.family, job.params)
    scale = job.global_batch / base.global_batch
    layers = base.analysis.layers
    scaled = _Scaled(
        problem=replace(base.analysis.problem, global_batch=job.global_batch),
        trace=base.analysis.trace,
        graph=base.analysis.graph,
        layers=replace(layers, live_bytes=tuple(int(b * scale) for b in layers.live_bytes)),
        shardings=base.analysis.shardings,
        coupling="",
    )
    object.__setattr__(scaled, "key", (job.family, job.params))
    return scaled


# The plan ran: where ours does not fit, that is our memory's error.
_ROOM = (1.0, 1.3, 1.7, 2.5, 100.0)


# Alpa's ``stage_imbalance_tolerance`` in the artifact: how far a stage's share of the FLOPs may lie from that of its
# GPUs; where no cut keeps to it, the next.
_TOLERANCES = (0.25, 0.5, 1.0, np.inf)


class _AlpaSearch(GridSearch):
    """Stages as Alpa picked them in the artifact, which ran it with its "HLO cost model".

    To that, compute is FLOPs shared out evenly over a stage's GPUs, a stage's own collectives count and neither the
    reduction of gradients (``skip_grad_sync``) nor transfers between stages do.
    """

    tolerance: float = np.inf
    gpus_a_stage: range = range(1, 1 << 20)

    def costs(self, stages_left: int, submesh: Submesh) -> Costs:
        count = self._analysis.layers.num_layers
        seconds, option = np.full((count, count), np.inf), np.zeros((count, count), int)
        if submesh.num_devices not in self.gpus_a_stage:
            return Costs(seconds=seconds, option=option)
        share, fair = self._flops_shares, submesh.num_devices / self._grid.num_devices
        even = (share <= fair * (1 + self.tolerance)) & (share >= fair / (1 + self.tolerance))
        for i, (mesh, choice) in enumerate(self._options(submesh)):
            fits = mesh.memory(self._m, min(stages_left, self._m), choice) <= self._hardware.usable_bytes
            total = self._whole_s * share / submesh.num_devices + mesh.passes_s(self._m, choice)
            total = np.where(fits & even & ~np.tri(count, k=-1, dtype=bool), total, np.inf)
            better = total < seconds
            seconds[better], option[better] = total[better], i
        return Costs(seconds=seconds, option=option)

    def boundary_s(self) -> np.ndarray:
        return np.zeros(self._analysis.layers.num_layers)

    @cached_property
    def _flops_shares(self) -> np.ndarray:
        """``[first, last]`` share of the model's products that a run of layers has."""
        work = self._analysis.meshes(self._hardware, Submesh(1, 1), 1, 1)[0].work
        flops = work.times @ np.array([p.flops for p in work.products])
        total = np.concatenate([[0.0], np.cumsum(flops / flops.sum())])
        return total[None, 1:] - total[:-1, None]

    @cached_property
    def _whole_s(self) -> float:
        """Seconds of one microbatch of the whole model on one GPU."""
        mesh = self._analysis.meshes(self._hardware, Submesh(1, 1), 1, 1)[0]
        compute, _, _ = mesh.step_parts(self._m, Option(zero=0, remat=True))
        return float(compute[0, -1])


@dataclass(frozen=True)
class Picked:
    """The plan of one number of stages that Alpa picks: what its cost model says of it, and our estimate.

    Attributes:
        room: times the memory that a device has which the plan needs by our account.
    """

    objective: float
    estimate: Estimate
    room: float


def estimate(row: Row, pp: int, hardware: Hardware, dp: int | None = None, tp: int | None = None) -> Picked | None:
    """The plan of so many stages that Alpa picks, or that whose mesh is pinned."""
    constraints = Constraints(stages=pp, dp=dp, tp=tp, zero=0, remat="on", space="alpa")
    grid, analysis = GridShape(row.allocation, pp), analysis_of(row.job)
    count = analysis.layers.num_layers
    if pp > count:
        return None
    for room, tolerance in itertools.product(_ROOM, _TOLERANCES):
        search = _AlpaSearch(analysis, grid, roomier(hardware, room), constraints, NUM_MICROBATCHES)
        search.tolerance = tolerance
        search.gpus_a_stage = gpus_a_stage(row) if dp is None else range(1, row.num_gpus + 1)
        if not search.meshes_exist:
            return None
        found = best_stages(grid, count, NUM_MICROBATCHES, search.costs, search.boundary_s(), solver=search.solver)
        if found is not None:
            return Picked(found.objective, search.estimate(found.stages), room)
    return None


def estimate_equal(row: Row, pp: int, hardware: Hardware) -> Estimate | None:
    """The same with as many units in each stage, instead of stages that take equally long."""
    constraints = Constraints(stages=pp, zero=0, remat="on", space="alpa")
    grid, analysis = GridShape(row.allocation, pp), analysis_of(row.job)
    tiling = next((t for t in tilings(grid) if len(set(t)) == 1), None)
    count = analysis.layers.num_layers
    if tiling is None or pp > count:
        return None
    marks = [round(i * count / pp) for i in range(pp + 1)]
    for room in _ROOM:
        search = GridSearch(analysis, grid, roomier(hardware, room), constraints, NUM_MICROBATCHES)
        stages = []
        for i, submesh in enumerate(tiling):
            costs = search.costs(pp - i, submesh)
            first, last = marks[i], marks[i + 1] - 1
            if np.isfinite(costs.seconds[first, last]):
                option = int(costs.option[first, last])
                stages.append(StageChoice(first=first, last=last, submesh=submesh, option=option))
        if len(stages) == pp:
            return search.estimate(stages)
    return None


def best_free_s(row: Row, hardware: Hardware, room: float) -> float | None:
    """Step seconds of the best plan there is at as many microbatches: any stages, ZeRO, with remat or without.

    Args:
        room: memory that the plans may take at least, since the plan they stand beside takes it.
    """
    found = []
    for pp in range(1, min(row.num_gpus, analysis_of(row.job).layers.num_layers, MAX_STAGES) + 1):
        grid = GridShape(row.allocation, pp)
        for more in (r for r in _ROOM if r >= room):
            roomy = roomier(hardware, more)
            e = plan_grid(analysis_of(row.job), grid, roomy, Constraints(), NUM_MICROBATCHES).estimate
            if e is not None:
                found.append(e.step_time_s)
                break
    return min(found, default=None)


def iteration_s(e: Estimate) -> float:
    """Seconds of an iteration under Alpa's runtime, which hides no transfer between stages.

    With every microbatch a stage waits for what it receives and what it sends, forward and back; transfers
    between other stages pass meanwhile. The slowest stage, transfers included, sets the pace.
    """
    entering = [stage.transfer_s for stage in e.stages] + [0.0]
    busy = [s.time_s + 2 * (entering[i] + entering[i + 1]) for i, s in enumerate(e.stages)]
    return e.step_time_s + (NUM_MICROBATCHES - 1) * (max(busy) - max(s.time_s for s in e.stages))


def gpus_a_stage(row: Row) -> range:
    """The artifact's pruning rule of GPUs a stage: from its bounds on dp and tp."""
    if row.job.family == "wide_resnet":
        most = row.num_gpus // max(row.num_gpus // 2, row.nodes)
        return range(1, most + 1)
    return range(max(row.per_node // 2, 1), row.per_node + 1)


def stage_counts(row: Row) -> list[int]:
    """The artifact's pruning rule of stages."""
    if row.job.family == "wide_resnet":
        first, last = max(row.num_gpus // 2, row.nodes), row.num_gpus
    else:
        first, last = row.nodes, 2 * row.nodes
    return [pp for pp in range(first, min(last, row.num_gpus) + 1) if pp & (pp - 1) == 0] or [first]
