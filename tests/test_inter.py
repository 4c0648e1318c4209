"""The inter-op dynamic program against trying every cut."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arena_jax.compiler.inter_op.cuts import Costs, best_stages, least_memory, stage_submeshes
from arena_jax.grid import GridShape, Submesh, tilings

GRIDS = (
    "cpu:1/s1",
    "cpu:4/s1",
    "cpu:2/s2",
    "cpu:4/s2",
    "cpu:4/s3",
    "cpu:6/s2",
    "cpu:8/s3",
    "cpu:2x2/s2",
    "cpu:2x2/s3",
    "cpu:2x3/s3",
)


class Table:
    """Random costs per (stages from the end, submesh, first, last), some of them infinite."""

    def __init__(self, grid: GridShape, num_layers: int, seed: int, *, density: float, monotone: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.costs: dict[tuple[int, Submesh], Costs] = {}
        for k in range(1, grid.num_stages + 1):
            for submesh in stage_submeshes(grid):
                # Few distinct values, so that every bound on the slowest stage is tried.
                seconds = rng.integers(1, 12, (num_layers, num_layers)).astype(float)
                seconds[rng.random(seconds.shape) > density] = np.inf
                seconds[np.tri(num_layers, k=-1, dtype=bool)] = np.inf
                if monotone and k > 1:
                    seconds = np.maximum(seconds, self.costs[k - 1, submesh].seconds)
                self.costs[k, submesh] = Costs(seconds=seconds, option=rng.integers(0, 5, seconds.shape))
        self.boundary_s = np.concatenate([[0.0], rng.integers(0, 4, num_layers - 1).astype(float)])

    def __call__(self, stages_left: int, submesh: Submesh) -> Costs:
        return self.costs[stages_left, submesh]


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]


def all_stagings(grid: GridShape, num_layers: int):
    """Every order of every tiling with every cut: [(submesh, first, last), ...]."""
    for tiling in tilings(grid):
        for order in sorted(set(permutations(tiling))):
            for marks in cuts(num_layers, grid.num_stages):
                yield [(s, marks[i], marks[i + 1] - 1) for i, s in enumerate(order)]


def objective(grid: GridShape, staging, table: Table, num_microbatches: int) -> float:
    """The pipeline formula of Alpa's paper, with the boundaries' cost once a microbatch filling the pipeline."""
    times = [table(grid.num_stages - i, s).seconds[first, last] for i, (s, first, last) in enumerate(staging)]
    moved = sum(table.boundary_s[first] for _, first, _ in staging)
    if np.inf in times:
        return np.inf
    return float(sum(times) + moved + (num_microbatches - 1) * max(times))


@settings(max_examples=80)
@given(
    st.sampled_from(GRIDS),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_no_cut_is_better(text: str, num_layers: int, num_microbatches: int, seed: int, density: float) -> None:
    grid = GridShape.parse(text)
    table = Table(grid, num_layers, seed, density=density)
    values = [objective(grid, staging, table, num_microbatches) for staging in all_stagings(grid, num_layers)]
    best = min(values, default=np.inf)
    found = best_stages(grid, num_layers, num_microbatches, table, table.boundary_s)
    if not np.isfinite(best):
        assert found is None
        return
    assert found is not None
    value, stages = found.objective, found.stages
    assert value == pytest.approx(best)
    staging = [(s.submesh, s.first, s.last) for s in stages]
    assert staging in list(all_stagings(grid, num_layers))
    assert objective(grid, staging, table, num_microbatches) == pytest.approx(value)
    for i, stage in enumerate(stages):
        assert stage.option == table(grid.num_stages - i, stage.submesh).option[stage.first, stage.last]


@settings(max_examples=40)
@example("cpu:2x3/s3", 3, 3, 0.3)
@given(st.sampled_from(GRIDS), st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0]))
def test_least_memory_is_the_least(text: str, num_layers: int, seed: int, density: float) -> None:
    grid = GridShape.parse(text)
    table = Table(grid, num_layers, seed, density=density)
    fullest = [
        max(table(grid.num_stages - i, s).seconds[first, last] for i, (s, first, last) in enumerate(staging))
        for staging in all_stagings(grid, num_layers)
    ]
    found = least_memory(grid, num_layers, lambda k, submesh: table(k, submesh).seconds)
    assert found == min(fullest, default=np.inf)


def test_submeshes_that_add_up_but_do_not_pack_hide_no_cut() -> None:
    """Three pairs have six devices, but two nodes of three hold two of them."""
    grid = GridShape.parse("cpu:2x3/s3")

    def costs(stages_left: int, submesh: Submesh) -> Costs:
        seconds = np.full((3, 3), 1.0 if submesh == Submesh(1, 2) else 2.0)
        seconds[np.tri(3, k=-1, dtype=bool)] = np.inf
        return Costs(seconds=seconds, option=np.zeros((3, 3), int))

    found = best_stages(grid, 3, 2, costs, np.zeros(3))
    assert found is not None
    value, stages = found.objective, found.stages
    assert sorted(s.submesh.num_devices for s in stages) == [1, 2, 3]
    assert value == 2 + 1 + 2 + 2
