"""The inter-op level: cut layers into a fixed number of stages on submeshes that tile the grid.

An engine's dynamic program counts devices; whether the submeshes pack into the nodes is looked at here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arena_jax.compiler.engines import Engine, StageProblem, StageSolution, engine
from arena_jax.grid import GridShape, Submesh, place, submesh_choices, tilings


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """One stage of the best cut: layers ``[first, last]`` on a submesh, and which option it runs."""

    first: int
    last: int
    submesh: Submesh
    option: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost tables of one submesh for one number of stages from the end.

    Attributes:
        seconds: ``[first, last]`` least time of a microbatch plus its share of once-a-step work over
            the options that fit; infinite where none does.
        option: index of that option.
    """

    seconds: np.ndarray
    option: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The best cut of a grid: its objective in seconds, the stages in order, and what each engine asked has found."""

    objective: float
    stages: tuple[StageChoice, ...]
    objectives: Mapping[str, float]


def best_stages(
    grid: GridShape,
    num_layers: int,
    num_microbatches: int,
    costs: Callable[[int, Submesh], Costs],
    boundary_s: np.ndarray,
    *,
    solver: Engine | None = None,
) -> Cut | None:
    """The best cut of ``num_layers`` layers into the grid's stages; exact.

    Args:
        costs: (stages from the end, counting this one; submesh) -> tables.
        boundary_s: ``[layer]`` seconds to move the values that cross into a layer, per microbatch.
        solver: runs the dynamic program; ours by default.

    Returns:
        ``None`` when nothing fits.
    """
    solver = solver or engine("highs")
    choices = stage_submeshes(grid)
    tables = {(k, submesh): costs(k, submesh) for k in range(1, grid.num_stages + 1) for submesh in choices}

    def solve(sizes: Mapping[Submesh, int], total: int) -> StageSolution | None:
        problem = StageProblem(
            num_microbatches=num_microbatches,
            seconds=np.array(
                [[tables[k, submesh].seconds for submesh in sizes] for k in range(1, grid.num_stages + 1)]
            ),
            boundary_s=np.asarray(boundary_s, float),
            sizes=tuple(sizes.values()),
            total=total,
        )
        return solver.best_stages(problem)

    submeshes: Sequence[Submesh] = choices
    found = solve({submesh: submesh.num_devices for submesh in choices}, grid.num_devices)
    if found and place(grid.allocation, tuple(choices[c] for _, _, c in found.stages)) is None:
        # The right number of devices that do not pack, such as three pairs on two nodes of three.
        found = None
        for tiling in tilings(grid):
            sizes, total = _sizes(tiling, grid.num_stages)
            packed = solve(sizes, total)
            if packed and (found is None or packed.objective < found.objective):
                found, submeshes = packed, tuple(sizes)
    if found is None:
        return None
    stages = tuple(
        StageChoice(
            first=first,
            last=last,
            submesh=submeshes[c],
            option=int(tables[grid.num_stages - i, submeshes[c]].option[first, last]),
        )
        for i, (first, last, c) in enumerate(found.stages)
    )
    return Cut(objective=found.objective, stages=stages, objectives=found.objectives)


def least_memory(grid: GridShape, num_layers: int, needs: Callable[[int, Submesh], np.ndarray]) -> float:
    """Bytes of the fullest device under the cut that needs fewest, however slow it is.

    Args:
        needs: (stages from the end, counting this one; submesh) -> ``[first, last]`` fewest bytes a
            device needs for that run of layers; infinite where nothing runs it.

    Returns:
        Infinity where no cut runs at all.
    """
    per_node = grid.allocation.devices_per_node
    if per_node & (per_node - 1) == 0 or grid.allocation.num_nodes == 1:
        counted = {submesh: submesh.num_devices for submesh in stage_submeshes(grid)}
        return _least_memory(num_layers, grid.num_stages, needs, counted, grid.num_devices)
    # Submeshes with the right number of devices need not pack.
    found = (_sizes(tiling, grid.num_stages) for tiling in tilings(grid))
    return min(_least_memory(num_layers, grid.num_stages, needs, sizes, total) for sizes, total in found)


def _sizes(tiling: Sequence[Submesh], num_stages: int) -> tuple[dict[Submesh, int], int]:
    """Sizes of which only this many of each kind have this total: digits of a number to base S + 1."""
    counts = Counter(tiling)
    sizes = {submesh: (num_stages + 1) ** i for i, submesh in enumerate(counts)}
    return sizes, sum(sizes[submesh] * count for submesh, count in counts.items())


def _least_memory(
    num_layers: int,
    num_stages: int,
    needs: Callable[[int, Submesh], np.ndarray],
    sizes: Mapping[Submesh, int],
    total: int,
) -> float:
    least = np.full((num_layers + 1, total + 1), np.inf)
    least[num_layers, 0] = 0.0
    for k in range(1, num_stages + 1):
        fewest = np.full_like(least, np.inf)
        for submesh, n in sizes.items():
            if n > total:
                continue
            fullest = np.maximum(needs(k, submesh)[:, :, None], least[None, 1:, : total + 1 - n])
            fewest[:num_layers, n:] = np.minimum(fewest[:num_layers, n:], fullest.min(axis=1))
        least = fewest
    return float(least[0, total])


def stage_submeshes(grid: GridShape) -> tuple[Submesh, ...]:
    """The submeshes a stage may take; one stage takes the whole allocation."""
    if grid.num_stages == 1:
        return (Submesh(grid.allocation.num_nodes, grid.allocation.devices_per_node),)
    most = grid.num_devices - (grid.num_stages - 1)
    return tuple(submesh for submesh in submesh_choices(grid.allocation) if submesh.num_devices <= most)
