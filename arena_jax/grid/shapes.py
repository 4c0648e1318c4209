"""Allocations, submeshes and grid shapes: the words in which schedulers and compilers talk.

``TYPE:NxD`` is N nodes with D devices of each, ``TYPE:K`` is one node; ``/sS`` appends a number of
pipeline stages. All of it is pure arithmetic, so that a scheduler needs neither jax nor a model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from arena_jax.errors import UsageError
from arena_jax.grid.catalogue import CATALOGUE, Catalogue

_GRID = re.compile(r"(?P<type>[A-Za-z][\w.-]*):(?:(?P<nodes>\d+)x)?(?P<devices>\d+)(?:/s(?P<stages>\d+))?")
_FORMS = "TYPE:K, TYPE:NxD, or either with /sSTAGES, as in a100:2x4/s2"


@dataclass(frozen=True, order=True)
class Allocation:
    """A rectangular set of devices: ``num_nodes`` nodes with ``devices_per_node`` of each."""

    device_type: str
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def allocation(self) -> "Allocation":
        """Itself: what is asked for, an allocation or a grid of one, has an allocation either way."""
        return self

    @classmethod
    def parse(cls, text: str, catalogue: Catalogue | None = CATALOGUE) -> "Allocation":
        """Read ``a100:2x4`` or ``a100:4``; refuse more devices than a node of the type has."""
        allocation, stages = _parse(text, catalogue)
        if stages is not None:
            raise UsageError(f"{text!r} is a grid shape where an allocation is wanted", hint=f"write {allocation}")
        return allocation

    def __str__(self) -> str:
        if self.num_nodes == 1:
            return f"{self.device_type}:{self.devices_per_node}"
        return f"{self.device_type}:{self.num_nodes}x{self.devices_per_node}"


@dataclass(frozen=True, order=True)
class GridShape:
    """An allocation and a number of pipeline stages: what a plan is indexed by."""

    allocation: Allocation
    num_stages: int

    @property
    def num_devices(self) -> int:
        return self.allocation.num_devices

    @classmethod
    def parse(cls, text: str, catalogue: Catalogue | None = CATALOGUE) -> "GridShape":
        """Read ``a100:2x4/s2``; without ``/sS`` the number of stages is one.

        ``catalogue=None`` takes the type as written: for reading what was checked when it was made.
        """
        allocation, stages = _parse(text, catalogue)
        grid = cls(allocation, 1 if stages is None else stages)
        if not 1 <= grid.num_stages <= grid.num_devices:
            raise UsageError(
                f"{text!r}: {grid.num_stages} stages on {grid.num_devices} devices; every stage needs "
                "a device of its own",
                hint=f"use 1 to {grid.num_devices} stages",
            )
        return grid

    def __str__(self) -> str:
        return f"{self.allocation}/s{self.num_stages}"


@dataclass(frozen=True, order=True)
class Submesh:
    """The devices of one stage: ``1 x 2^k`` inside a node, or whole nodes."""

    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}"


def parse_target(text: str) -> GridShape | Allocation:
    """Read ``cpu:4/s2`` as a grid shape and ``cpu:4`` as an allocation."""
    return GridShape.parse(text) if "/" in text else Allocation.parse(text)


def _parse(text: str, catalogue: Catalogue | None) -> tuple[Allocation, int | None]:
    match = _GRID.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is neither an allocation nor a grid shape", hint=f"write {_FORMS}")
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise UsageError(f"{text!r} has no devices", hint=f"write {_FORMS} with numbers of at least 1")
    stages = int(match["stages"]) if match["stages"] else None
    if catalogue is None:
        return Allocation(match["type"], nodes, devices), stages
    device_type = catalogue[match["type"]]
    per_node = device_type.devices_per_node
    if devices > per_node:
        total = nodes * devices
        usable = max(d for d in range(1, per_node + 1) if total % d == 0)
        raise UsageError(
            f"{text!r}: a node of {device_type.name} has {per_node} devices, {devices} were asked for",
            hint=f"write {device_type.name}:{total // usable}x{usable} for {total} devices",
        )
    return Allocation(device_type.name, nodes, devices), stages


def submesh_choices(allocation: Allocation) -> tuple[Submesh, ...]:
    """All submeshes a stage may take (Alpa, section 5.2): 1 x 2^k inside a node, or whole nodes."""
    per_node = allocation.devices_per_node
    inside = [Submesh(1, 1 << k) for k in range(per_node.bit_length()) if 1 << k < per_node]
    whole = [Submesh(n, per_node) for n in range(1, allocation.num_nodes + 1)]
    return tuple(inside + whole)


@lru_cache(maxsize=4096)
def tilings(grid: GridShape) -> tuple[tuple[Submesh, ...], ...]:
    """Every multiset of ``num_stages`` submeshes that tiles the grid, each largest first.

    The order of the stages is the planner's choice; :func:`place` accepts any permutation.
    Powers of two divide one another, so first-fit decreasing decides packing exactly.
    """
    choices = sorted(submesh_choices(grid.allocation), key=lambda s: -s.num_devices)
    found: list[tuple[Submesh, ...]] = []

    def extend(chosen: tuple[Submesh, ...], start: int, left: int) -> None:
        missing = grid.num_stages - len(chosen)
        if missing == 0:
            if left == 0 and place(grid.allocation, chosen) is not None:
                found.append(chosen)
            return
        if left < missing:
            return
        for i in range(start, len(choices)):
            if choices[i].num_devices <= left - (missing - 1):
                extend((*chosen, choices[i]), i, left - choices[i].num_devices)

    extend((), 0, grid.num_devices)
    return tuple(found)


def place(allocation: Allocation, stages: tuple[Submesh, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Give each stage its device numbers (node-major), or ``None`` when they do not pack.

    Stages that lie in one node keep pipeline order there as far as packing allows.
    """
    per_node = allocation.devices_per_node
    free = {node: list(range(node * per_node, (node + 1) * per_node)) for node in range(allocation.num_nodes)}
    placed: dict[int, tuple[int, ...]] = {}
    order = sorted(range(len(stages)), key=lambda i: (-stages[i].num_devices, i))
    for i in order:
        stage = stages[i]
        if stage.devices_per_node == per_node:
            nodes = [node for node, devices in free.items() if len(devices) == per_node]
            if len(nodes) < stage.num_nodes:
                return None
            taken = [device for node in nodes[: stage.num_nodes] for device in free[node]]
            for node in nodes[: stage.num_nodes]:
                free[node] = []
        else:
            fit = [node for node, devices in free.items() if len(devices) >= stage.num_devices]
            if not fit:
                return None
            taken = free[fit[0]][: stage.num_devices]
            free[fit[0]] = free[fit[0]][stage.num_devices :]
        placed[i] = tuple(taken)
    return tuple(placed[i] for i in range(len(stages)))


def logical_meshes(num_devices: int) -> Iterator[tuple[int, int]]:
    """All ``(dp, tp)`` with ``dp * tp == num_devices``, data parallel first."""
    for tp in range(1, num_devices + 1):
        if num_devices % tp == 0:
            yield num_devices // tp, tp


def grids_of(allocation: Allocation, max_stages: int) -> tuple[GridShape, ...]:
    """The grid shapes of an allocation with 1 to ``max_stages`` stages that some tiling forms."""
    grids = (GridShape(allocation, s) for s in range(1, min(max_stages, allocation.num_devices) + 1))
    return tuple(grid for grid in grids if tilings(grid))
