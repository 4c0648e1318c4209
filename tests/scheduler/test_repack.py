"""Dealing out device types anew: against the exact program, and the promises of the bound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.scheduler.policies._moves import Moves
from arena_jax.scheduler.policies._program import assign
from arena_jax.scheduler.policies._repack import deal, price_bound, repack

# Two types with columns of 1, 2 and 4 devices, one with 1 and 3.
TYPES = np.array([0, 0, 0, 1, 1, 1, 2, 2])
DEVICES = np.array([1, 2, 4, 1, 2, 4, 1, 3])


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Values (some -inf), capacity, a set of columns that fits, and which jobs are settled."""
    rng = np.random.default_rng(seed)
    num_jobs = int(rng.integers(1, 8))
    value = rng.uniform(0.01, 1.0, (num_jobs, 1)) * DEVICES ** rng.uniform(0.3, 1.2) * rng.uniform(0.5, 1.5, (1, 8))
    value[rng.random(value.shape) < 0.25] = -np.inf
    capacity = rng.integers(1, 7, 3)
    column, free = np.full(num_jobs, -1), capacity.copy()
    for job in range(num_jobs):
        fits = np.flatnonzero((free[TYPES] >= DEVICES) & np.isfinite(value[job]))
        if len(fits) and rng.random() < 0.7:
            column[job] = rng.choice(fits)
            free[TYPES[column[job]]] -= DEVICES[column[job]]
    return value, capacity, column, (column >= 0) & (rng.random(num_jobs) < 0.2)


def moves_of(value: np.ndarray, capacity: np.ndarray, column: np.ndarray, settled: np.ndarray) -> Moves:
    held = column[column >= 0]
    free = capacity - np.bincount(TYPES[held], weights=DEVICES[held], minlength=3).astype(int)
    return Moves(value, column, TYPES, DEVICES, free, settled)


def check(moves: Moves, capacity: np.ndarray, column: np.ndarray, settled: np.ndarray) -> None:
    held = moves.column[moves.column != moves.none]
    used = np.bincount(TYPES[held], weights=DEVICES[held], minlength=3)
    assert (used + moves.free == capacity).all()
    assert (moves.free >= 0).all()
    assert (moves.column[settled] == column[settled]).all()


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_dealing_out_all_types_is_the_optimum(seed: int) -> None:
    value, capacity, column, settled = instance(seed)
    moves = moves_of(value, capacity, column, settled)
    pinned = value.copy()
    pinned[settled] = -np.inf
    # Settled jobs are counted in by a value that the program cannot pass by.
    pinned[settled, column[settled]] = 1e3
    exact = assign(pinned, TYPES, DEVICES, capacity, exact=True)
    optimum = exact.objective - 1e3 * settled.sum() + value[settled, column[settled]].sum()
    before = moves.total
    changed = deal(moves, (0, 1, 2))
    assert np.isclose(moves.total, optimum)
    assert changed == (optimum > before + 1e-9)
    check(moves, capacity, column, settled)


@given(st.integers(0, 10_000), st.sampled_from([(0,), (1, 2), (2, 0)]), st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_dealing_out_some_types_never_lowers_the_sum(seed: int, subset: tuple[int, ...], unit: int) -> None:
    value, capacity, column, settled = instance(seed)
    moves = moves_of(value, capacity, column, settled)
    before = moves.total
    changed = deal(moves, subset, unit)
    assert moves.total > before if changed else moves.total == before
    moved = moves.column != np.where(column < 0, moves.none, column)
    # Who moved came from or went to one of the types.
    for job in np.flatnonzero(moved):
        ends = {int(moves.types[moves.column[job]]), int(moves.types[column[job]]) if column[job] >= 0 else -1}
        assert ends & set(subset)
    check(moves, capacity, column, settled)


@given(st.integers(0, 10_000), st.lists(st.floats(0, 2), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_prices_bound_the_optimum(seed: int, prices: list[float]) -> None:
    value, capacity, _, _ = instance(seed)
    exact = assign(value, TYPES, DEVICES, capacity, exact=True)
    assert price_bound(np.array(prices), value, TYPES, DEVICES, capacity) >= exact.objective - 1e-9


def test_a_budget_and_a_good_enough_sum_end_it() -> None:
    value, capacity, column, settled = instance(3)
    best = moves_of(value, capacity, column, settled)
    repack(best, np.inf, within=0.0, budget=1e9)
    assert best.total > moves_of(value, capacity, column, settled).total
    for arguments in ({"bound": np.inf, "within": 0.0, "budget": 0.0}, {"bound": 0.0, "within": 0.0, "budget": 1e9}):
        moves = moves_of(value, capacity, column, settled)
        repack(moves, **arguments)  # type: ignore[arg-type]
        assert moves.total == moves_of(value, capacity, column, settled).total
