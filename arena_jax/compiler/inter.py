"""The inter-op dynamic program: cut layers into a fixed number of stages on submeshes.

Alpa, section 5: minimise ``sum_s t_s + (M - 1) max_s t_s + boundaries`` over all ways to give runs of
layers to submeshes that tile the grid. For each bound on the slowest stage a dynamic program over
(stages left, first layer, devices left) minimises the sum; the bound runs over the stage times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from arena_jax.grid import GridShape, Submesh, place, submesh_choices, tilings

# At most this many bounds on the slowest stage are tried, spread evenly over the stage times.
_MAX_BOUNDS = 64


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


def best_stages(
    grid: GridShape,
    num_layers: int,
    num_microbatches: int,
    costs: Callable[[int, Submesh], Costs],
    boundary_s: np.ndarray,
) -> tuple[float, list[StageChoice]] | None:
    """The best cut of ``num_layers`` layers into the grid's stages.

    Args:
        costs: (stages from the end, counting this one; submesh) -> tables.
        boundary_s: ``[layer]`` seconds to move the values that cross into a layer, per microbatch.

    Returns:
        The objective in seconds and the stages in order, or ``None`` when nothing fits.
    """
    choices = stage_submeshes(grid)
    tables = {(k, submesh): costs(k, submesh) for k in range(1, grid.num_stages + 1) for submesh in choices}
    finite = [t.seconds[np.isfinite(t.seconds)] for t in tables.values()]
    times = np.unique(np.concatenate(finite)) if finite else np.array([])
    if times.size == 0:
        return None
    if times.size > _MAX_BOUNDS:
        times = times[np.unique(np.linspace(0, times.size - 1, _MAX_BOUNDS).astype(int))]
    best: tuple[float, list[StageChoice]] | None = None
    for bound in times:
        if best is not None and (num_microbatches - 1) * bound >= best[0]:
            break
        found = _within(grid, num_layers, choices, tables, boundary_s, float(bound))
        if found is None:
            continue
        total, stages = found
        slowest = max(tables[grid.num_stages - i, s.submesh].seconds[s.first, s.last] for i, s in enumerate(stages))
        objective = total + (num_microbatches - 1) * float(slowest)
        if best is None or objective < best[0]:
            best = objective, stages
    return best


def least_memory(grid: GridShape, num_layers: int, needs: Callable[[int, Submesh], np.ndarray]) -> float:
    """Bytes of the fullest device under the cut that needs fewest, however slow it is.

    Args:
        needs: (stages from the end, counting this one; submesh) -> ``[first, last]`` fewest bytes a
            device needs for that run of layers; infinite where nothing runs it.

    Returns:
        Infinity where no cut runs at all.
    """
    devices = grid.num_devices
    least = np.full((num_layers + 1, devices + 1), np.inf)
    least[num_layers, 0] = 0.0
    for k in range(1, grid.num_stages + 1):
        fewest = np.full_like(least, np.inf)
        for submesh in stage_submeshes(grid):
            n = submesh.num_devices
            if n > devices:
                continue
            fullest = np.maximum(needs(k, submesh)[:, :, None], least[None, 1:, : devices + 1 - n])
            fewest[:num_layers, n:] = np.minimum(fewest[:num_layers, n:], fullest.min(axis=1))
        least = fewest
    return float(least[0, devices])


def stage_submeshes(grid: GridShape) -> tuple[Submesh, ...]:
    """The submeshes a stage may take; one stage takes the whole allocation."""
    if grid.num_stages == 1:
        return (Submesh(grid.allocation.num_nodes, grid.allocation.devices_per_node),)
    return submesh_choices(grid.allocation)


def _within(
    grid: GridShape,
    num_layers: int,
    choices: Sequence[Submesh],
    tables: dict[tuple[int, Submesh], Costs],
    boundary_s: np.ndarray,
    bound: float,
) -> tuple[float, list[StageChoice]] | None:
    """Least sum of stage times with no stage above ``bound``."""
    devices = grid.num_devices
    infinity = np.inf
    # least[i, d]: layers i.. on d devices with the stages left; layer num_layers means none is left.
    least = np.full((num_layers + 1, devices + 1), infinity)
    least[num_layers, 0] = 0.0
    came_from: list[tuple[np.ndarray, np.ndarray]] = []
    for k in range(1, grid.num_stages + 1):
        value = np.full_like(least, infinity)
        which = np.zeros(least.shape, int)
        until = np.zeros(least.shape, int)
        for c, submesh in enumerate(choices):
            n = submesh.num_devices
            if n > devices:
                continue
            seconds = tables[k, submesh].seconds
            seconds = np.where(seconds <= bound, seconds, infinity) + boundary_s[:, None]
            # total[i, j, d]: this stage holds layers i..j on n of d devices.
            total = seconds[:, :, None] + least[None, 1:, : devices + 1 - n]
            last = total.argmin(axis=1)
            smallest = np.take_along_axis(total, last[:, None, :], axis=1)[:, 0, :]
            target = value[:num_layers, n:]
            better = smallest < target
            target[better] = smallest[better]
            which[:num_layers, n:][better] = c
            until[:num_layers, n:][better] = last[better]
        least = value
        came_from.append((which, until))
    if not np.isfinite(least[0, devices]):
        return None
    stages = []
    layer, left = 0, devices
    for k in range(grid.num_stages, 0, -1):
        which, until = came_from[k - 1]
        submesh, last = choices[which[layer, left]], int(until[layer, left])
        option = int(tables[k, submesh].option[layer, last])
        stages.append(StageChoice(first=layer, last=last, submesh=submesh, option=option))
        layer, left = last + 1, left - submesh.num_devices
    if place(grid.allocation, tuple(s.submesh for s in stages)) is None:
        return _within_tilings(grid, num_layers, tables, boundary_s, bound)
    return float(least[0, devices]), stages


def _within_tilings(
    grid: GridShape,
    num_layers: int,
    tables: dict[tuple[int, Submesh], Costs],
    boundary_s: np.ndarray,
    bound: float,
) -> tuple[float, list[StageChoice]] | None:
    """As :func:`_within`, one tiling after the other: slower, for nodes that powers of two do not fill.

    There, submeshes with the right number of devices may not pack, such as three pairs on two nodes of three.
    """
    nothing: tuple[float, tuple[StageChoice, ...]] = (float("inf"), ())

    @cache
    def least(first: int, left: tuple[Submesh, ...]) -> tuple[float, tuple[StageChoice, ...]]:
        if not left:
            return (0.0, ()) if first == num_layers else nothing
        best = nothing
        for submesh in dict.fromkeys(left):
            table = tables[len(left), submesh]
            rest = list(left)
            rest.remove(submesh)
            for last in range(first, num_layers - len(rest)):
                if table.seconds[first, last] > bound:
                    continue
                after, stages = least(last + 1, tuple(rest))
                total = float(table.seconds[first, last] + boundary_s[first]) + after
                if total < best[0]:
                    choice = StageChoice(first=first, last=last, submesh=submesh, option=int(table.option[first, last]))
                    best = total, (choice, *stages)
        return best

    total, stages = min((least(0, tiling) for tiling in tilings(grid)), key=lambda found: found[0], default=nothing)
    return (total, list(stages)) if stages else None
