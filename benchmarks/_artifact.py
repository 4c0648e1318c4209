"""The artifact's models and clusters in our terms: recipes, recorded collectives, and times of others.

Every model is traced once, at its smallest batch, and its work scaled to the others: rows are the only
thing that changes. Alpa sums gradients locally and reduces them once a step; here they are charged so.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from arena_jax.compiler.analysis import Analysis, Constraints
from arena_jax.compiler.cost import FITTED, Efficiency, Hardware
from arena_jax.compiler.engines import Engine
from arena_jax.compiler.graph import build_graph
from arena_jax.compiler.inter_op.cuts import StageChoice
from arena_jax.compiler.inter_op.grid_search import GridSearch, plan_grid
from arena_jax.compiler.inter_op.stage_cost import LayerWork, MeshCost, layer_work, mesh_cost
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.sharding import ShardingSearch
from arena_jax.compiler.layers import find_layers
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
    # Where a table over InfiniBand exists it is read, else the one over sockets.
    paths = sorted((FOLDER / "collectives").glob(f"*_{gpu}_*.csv"), key=lambda p: p.stem.endswith("_ib"))
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
    inter = device.inter_node_bandwidth
    across = [
        sizes[-1] * (size - 1) / size / seconds[-1] * min(stride, d)
        for (n, d, size, stride, inside), kinds in tables.items()
        if not inside and n == nodes and "all_gather" in kinds
        for sizes, seconds in [kinds["all_gather"]]
    ]
    if across:  # what a node's network carries in large messages; a share of it is the model's business
        inter = float(np.median(across)) / 0.4
    memory = {"a100": 40, "v100": 32, "a40": 48, "a10": 24}[gpu] * 2**30
    device = replace(
        device,
        devices_per_node=PER_NODE[gpu],
        inter_node_bandwidth=inter,
        inter_node_link="ethernet",
        intra_node_link="nvlink-mesh" if gpu == "a100" else device.intra_node_link,
        memory_bytes=int(memory * 0.8 / 0.9),
    )
    return Hardware(
        device=device,
        allocation=Allocation(device.name, nodes, per_node),
        efficiency=efficiency,
        collectives=nearest,
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
        layers=find_layers(graph, units),
        shardings=ShardingSearch(graph),
        coupling="",
    )
    return Model(batch, analysis, {})


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
                if phase == w.GRADIENT:  # once a step, whatever the rows
                    factors[at : at + 2] = 1 / NUM_MICROBATCHES
    products = tuple(
        replace(
            p,
            shape=tuple(s * (scale if r else 1) for s, r in zip(p.shape, p.rows, strict=True)),
            images=p.images * scale,
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


def estimate(row: Row, pp: int, hardware: Hardware, dp: int | None = None, tp: int | None = None) -> Estimate | None:
    """Our estimate of the best plan of one grid, its mesh pinned or free."""
    constraints = Constraints(stages=pp, dp=dp, tp=tp, zero=0, remat="on", space="alpa")
    grid = GridShape(row.allocation, pp)
    for room in _ROOM:
        found = plan_grid(analysis_of(row.job), grid, roomier(hardware, room), constraints, NUM_MICROBATCHES)
        if found.estimate is not None:
            return found.estimate
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


def best_free_s(row: Row, hardware: Hardware) -> float | None:
    """Step seconds of the best plan there is at as many microbatches: any stages, ZeRO, with remat or without."""
    constraints = Constraints()
    found = []
    for pp in range(1, min(row.num_gpus, analysis_of(row.job).layers.num_layers, MAX_STAGES) + 1):
        grid = GridShape(row.allocation, pp)
        for room in _ROOM:
            e = plan_grid(analysis_of(row.job), grid, roomier(hardware, room), constraints, NUM_MICROBATCHES).estimate
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


def stage_counts(row: Row) -> list[int]:
    """The artifact's pruning rule."""
    if row.job.family == "wide_resnet":
        first, last = max(row.num_gpus // 2, row.nodes), row.num_gpus
    else:
        first, last = row.nodes, 2 * row.nodes
    return [pp for pp in range(first, min(last, row.num_gpus) + 1) if pp & (pp - 1) == 0] or [first]
