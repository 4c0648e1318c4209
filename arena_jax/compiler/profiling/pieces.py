"""Which pieces the candidate plans of a model are made of, and how much each matters for choosing among them.

A candidate is a grid, a submesh of its stages, a mesh and a number of microbatches. It is ranked by
what the cost model says at the time; a piece weighs by the seconds that candidates spend in it, those
of the best ones most, for their order is what a measurement can change.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from arena_jax.compiler.analysis import Analysis, Constraints
from arena_jax.compiler.cost import Hardware, transfer_s
from arena_jax.compiler.cost.links import group_link
from arena_jax.compiler.cost.pieces import BOTH, FORWARD
from arena_jax.compiler.inter_op.cuts import stage_submeshes
from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.profiling.layer_programs import LayerProgram
from arena_jax.compiler.search import grids_of_targets, microbatch_choices
from arena_jax.grid import Allocation, GridShape, Submesh, logical_meshes

# A candidate this much slower than the best, as a share, weighs a third as much.
_CLOSE = 0.15
# Bytes at which collectives and transfers are timed; between them times are interpolated.
_FRESH_BYTES = 64 * 2**20
SIZES = tuple(4096 * 8**i for i in range(5))


@dataclass(frozen=True)
class LayerPiece:
    """A layer's program and which pass of it; ``computed_s`` is what the cost model says of it."""

    program: LayerProgram
    direction: str
    like: str
    computed_s: float
    priority: float

    @property
    def what(self) -> dict[str, object]:
        return {"layer": self.program.key, "pass": self.direction, "like": self.like}


@dataclass(frozen=True)
class ChainPiece:
    """All layers as one program of one device, and the bytes it keeps for its backward pass."""

    program: LayerProgram
    layers: tuple[str, ...]
    saved_bytes: int
    computed_s: float
    priority: float

    @property
    def what(self) -> dict[str, object]:
        return {"chain": self.program.key, "layers": list(self.layers), "saved_bytes": self.saved_bytes}


@dataclass(frozen=True)
class FreshPiece:
    """Memory that the system has to find."""

    num_bytes: int
    computed_s: float
    priority: float


@dataclass(frozen=True)
class UpdatePiece:
    """The optimizer's update of what a layer owns."""

    program: LayerProgram
    key: str
    computed_s: float
    priority: float

    @property
    def what(self) -> dict[str, object]:
        return {"update": self.key}


@dataclass(frozen=True)
class CollectivePiece:
    """A collective of one size, by all groups of that many devices at once."""

    collective: str
    size: int
    num_bytes: int
    computed_s: float
    priority: float


@dataclass(frozen=True)
class TransferPiece:
    """Bytes moved from one device to another."""

    num_bytes: int
    computed_s: float
    priority: float


@dataclass(frozen=True)
class DispatchPiece:
    """The issue of a program on some devices, which does nothing."""

    devices: int
    computed_s: float
    priority: float


_Ranked = TypeVar("_Ranked", LayerPiece, UpdatePiece)


@dataclass
class Pieces:
    """Pieces by kind, the most telling ones first."""

    layers: list[LayerPiece] = field(default_factory=list)
    chains: list[ChainPiece] = field(default_factory=list)
    fresh: list[FreshPiece] = field(default_factory=list)
    updates: list[UpdatePiece] = field(default_factory=list)
    collectives: list[CollectivePiece] = field(default_factory=list)
    transfers: list[TransferPiece] = field(default_factory=list)
    dispatches: list[DispatchPiece] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    mesh: MeshCost
    num_stages: int
    num_microbatches: int
    step_s: float


def pieces_of(
    analysis: Analysis,
    targets: Sequence[Allocation | GridShape],
    hardware_of: Callable[[Allocation], Hardware],
    *,
    constraints: Constraints | None = None,
    num_microbatches: int | None = None,
) -> Pieces:
    """The pieces of all candidate plans on some allocations.

    Args:
        hardware_of: the device type inside an allocation, with what is known of it by now.
    """
    constraints = constraints or Constraints()
    grids = grids_of_targets(targets, constraints)
    choices = microbatch_choices(analysis.problem, num_microbatches)
    candidates = [
        candidate
        for grid in grids
        if grid.num_stages <= analysis.layers.num_layers
        for m in choices
        for candidate in _candidates(analysis, grid, hardware_of(grid.allocation), constraints, m)
    ]
    best = min((c.step_s for c in candidates), default=1.0)
    layers: dict[tuple[str, str], LayerPiece] = {}
    updates: dict[str, UpdatePiece] = {}
    chains: dict[str, ChainPiece] = {}
    moved: dict[tuple[str, int], float] = {}
    between = 0.0
    likes = analysis.programs.likes()
    for candidate in candidates:
        weight = math.exp(-(candidate.step_s / best - 1) / _CLOSE) / candidate.step_s
        mesh, m = candidate.mesh, candidate.num_microbatches
        forward, backward = mesh.plain_s(m)
        for i, program in enumerate(mesh.layer_programs(m)):
            if program is None:
                continue
            for direction, seconds in ((BOTH, forward[i] + backward[i]), (FORWARD, forward[i])):
                known = layers.get((program.key, direction))
                priority = (0.0 if known is None else known.priority) + weight * seconds * m
                layers[program.key, direction] = LayerPiece(program, direction, likes[i], float(seconds), priority)
        chain = analysis.programs.chain(mesh.work.sharding, m)
        parts = [None if program is None else program.key for program in mesh.layer_programs(m)]
        if chain is not None and all(key is not None for key in parts):
            seconds = float((forward + backward).sum())
            # It tells what layers take besides their own times, which is a part of them.
            priority = (chains[chain.key].priority if chain.key in chains else 0.0) + weight * seconds * m / 4
            saved = int(mesh.work.works[:, w.SAVED].sum() / m)
            chains[chain.key] = ChainPiece(chain, tuple(map(str, parts)), saved, seconds, priority)
        for program, key, seconds in zip(mesh.layer_programs(1), mesh.update_keys(), mesh.plain_update_s, strict=True):
            if key and program is not None:
                priority = (updates[key].priority if key in updates else 0.0) + weight * seconds
                updates[key] = UpdatePiece(program, key, float(seconds), float(priority))
        for (kind, size), seconds in _communication(mesh, m).items():
            moved[kind, size] = moved.get((kind, size), 0.0) + weight * seconds
        if candidate.num_stages > 1:
            between += weight * candidate.step_s / 20
    found = Pieces(layers=_few_forward(_ranked(layers.values())), updates=_ranked(updates.values()))
    found.chains = sorted(chains.values(), key=lambda chain: -chain.priority)
    if chains:
        found.fresh = [FreshPiece(_FRESH_BYTES, 2e-9 * _FRESH_BYTES, found.chains[0].priority)]
    hardware = hardware_of(grids[0].allocation).without_measurements
    _add_machine(found, hardware, moved, between, max(g.num_devices for g in grids))
    return found


def _few_forward(ranked: Sequence[LayerPiece]) -> list[LayerPiece]:
    """Of layers that differ in size only, one tells what part of both passes the forward pass is."""
    told: set[str] = set()
    kept = []
    for piece in ranked:
        if piece.direction == FORWARD:
            if piece.like in told:
                continue
            told.add(piece.like)
        kept.append(piece)
    return kept


def _candidates(
    analysis: Analysis, grid: GridShape, hardware: Hardware, constraints: Constraints, num_microbatches: int
) -> Iterator[_Candidate]:
    rows = analysis.problem.global_batch // num_microbatches
    last = analysis.layers.num_layers - 1
    in_turn = (num_microbatches + grid.num_stages - 1) / grid.num_stages
    for submesh in stage_submeshes(grid):
        for dp, tp in logical_meshes(submesh.num_devices):
            if rows % dp or constraints.dp not in (None, dp) or constraints.tp not in (None, tp):
                continue
            if analysis.trace.annotations.fault(dp, tp):
                continue
            for mesh in analysis.meshes(hardware, submesh, dp, tp):
                compute, communication, once = mesh.step_parts(num_microbatches, Option(zero=0, remat=False))
                seconds = float(compute[0, last] + communication[0, last]) * in_turn + float(once[0, last])
                # A submesh other than an even share is of stages that do the more or the less.
                seconds *= submesh.num_devices * grid.num_stages / grid.num_devices
                yield _Candidate(mesh, grid.num_stages, num_microbatches, seconds)


def _communication(mesh: MeshCost, num_microbatches: int) -> dict[tuple[str, int], float]:
    """Seconds of a step in each collective of each group size."""
    found: dict[tuple[str, int], float] = {}
    sizes = {"dp": mesh.dp, "tp": mesh.tp}
    for c in w.collectives(mesh.work.works.sum(axis=0)):
        link = mesh.link(c.axis)
        times = num_microbatches if c.phase in (w.GRADIENT, w.PARAMETER) else 1
        seconds = float(getattr(link, f"{c.kind}_s")(c.num_bytes)) * times
        found[c.kind, sizes[c.axis]] = found.get((c.kind, sizes[c.axis]), 0.0) + seconds
    if mesh.dp > 1:  # ZeRO gathers what dp shards
        held = float(np.sum(mesh.work.parameter_bytes))
        seconds = float(mesh.link("dp").all_gather_s(held)) * num_microbatches
        found["all_gather", mesh.dp] = found.get(("all_gather", mesh.dp), 0.0) + seconds
    return found


def _add_machine(
    found: Pieces, hardware: Hardware, moved: dict[tuple[str, int], float], between: float, num_devices: int
) -> None:
    """What does not depend on the model: a curve for each collective, transfers, dispatches."""
    node = Submesh(1, min(num_devices, hardware.allocation.devices_per_node))
    for (kind, size), priority in sorted(moved.items(), key=lambda item: -item[1]):
        if size > node.num_devices:
            continue  # across nodes: see the cluster's networks
        link = group_link(hardware, node, size, 1)
        for num_bytes in SIZES:
            seconds = float(getattr(link, f"{kind}_s")(float(num_bytes)))
            found.collectives.append(CollectivePiece(kind, size, num_bytes, seconds, priority))
    if between:
        found.transfers = [
            TransferPiece(num_bytes, float(transfer_s(hardware, float(num_bytes), True)), between)
            for num_bytes in SIZES
        ]
    sizes = [n for n in (1, 2, 4, 8) if n <= node.num_devices]
    found.dispatches = [DispatchPiece(n, hardware.dispatch_s, between) for n in sizes]


def _ranked(pieces: Iterable[_Ranked]) -> list[_Ranked]:
    return sorted(pieces, key=lambda piece: -piece.priority)
