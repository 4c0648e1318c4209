"""Sia's and Gavel's programs: optimum against brute force, rounding of the relaxation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.scheduler import View
from arena_jax.scheduler.policies import Gavel, Sia
from arena_jax.scheduler.policies._program import assign
from arena_jax.scheduler.simulator import Settings, Simulator
from tests.scheduler.build import cluster, job, profiles, workload
from tests.scheduler.test_simulator import random_workload


def brute(worth: np.ndarray, type_of: np.ndarray, devices: np.ndarray, capacity: np.ndarray) -> float:
    best = 0.0
    for choice in itertools.product(range(-1, worth.shape[1]), repeat=len(worth)):
        held = [(i, c) for i, c in enumerate(choice) if c >= 0]
        if any(not np.isfinite(worth[i, c]) for i, c in held):
            continue
        used = np.zeros(len(capacity))
        for _, c in held:
            used[type_of[c]] += devices[c]
        if (used <= capacity).all():
            best = max(best, sum(worth[i, c] for i, c in held))
    return best


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_assignment_optimum_matches_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    type_of, devices = np.array([0, 0, 0, 1, 1]), np.array([1, 2, 4, 1, 2])
    capacity = rng.integers(1, 6, size=2)
    worth = np.where(rng.random((4, 5)) < 0.8, rng.uniform(0.1, 3, (4, 5)), -np.inf)
    exact = assign(worth, type_of, devices, capacity, exact=True)
    assert exact.objective == pytest.approx(brute(worth, type_of, devices, capacity), abs=1e-6)
    rounded = assign(worth, type_of, devices, capacity)
    assert rounded.objective <= exact.objective + 1e-6 <= rounded.bound + 2e-6
    # A vertex of the relaxation splits at most one job per device type.
    assert rounded.num_fractional <= len(capacity)


def test_the_relaxation_is_near_integral_at_scale() -> None:
    rng = np.random.default_rng(0)
    counts = np.array([1, 2, 4, 8, 16])
    type_of, devices = np.repeat(np.arange(4), 5), np.tile(counts, 4)
    worth = rng.uniform(0.5, 1.5, (300, 4)).repeat(5, axis=1) * devices**0.6
    solved = assign(worth, type_of, devices, np.full(4, 320))
    assert solved.num_fractional <= 4
    assert 0 <= solved.gap < 0.02


def test_sia_reports_its_rounding_gap() -> None:
    sia = Sia()
    Simulator(random_workload(5), sia, Settings()).run()
    assert len(sia.gaps) > 10
    assert 0 <= max(sia.gaps) < 0.5


def shares(objective: str, rate: np.ndarray, count: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    return Gavel(objective=objective).solve(rate, count, np.ones(len(rate)), capacity)


def test_gavel_max_min_equalises_what_can_be_equal() -> None:
    # Two jobs on one a and one b device; both twice as fast on a: each gets half of each.
    rate = np.array([[2.0, 1.0], [2.0, 1.0]])
    x = shares("max-min", rate, np.ones(2), np.array([1, 1]))
    normal = (rate * x).sum(axis=1) / 1.5
    assert normal == pytest.approx([1.0, 1.0], abs=1e-3)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_gavel_max_min_matches_a_fine_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rate = rng.uniform(0.2, 3.0, (2, 2))
    capacity = np.array([1, 1])
    x = shares("max-min", rate, np.ones(2), capacity)
    fair = rate @ (capacity / 2)
    value = ((rate * x).sum(axis=1) / fair).min()
    # Shares of the first type, and the first job's of the second; the second job takes what that leaves it.
    a0, b0, share = np.meshgrid(*[np.linspace(0, 1, 41)] * 3, indexing="ij")
    a1 = (1 - a0) * share
    b1 = np.minimum(1 - b0, 1 - a1)
    both = [(rate[0, 0] * a0 + rate[0, 1] * a1) / fair[0], (rate[1, 0] * b0 + rate[1, 1] * b1) / fair[1]]
    best = np.where(a0 + b0 <= 1, np.minimum(*both), 0.0).max()
    assert value >= best - 1e-3


def test_gavel_does_without_types_that_are_down() -> None:
    # The second job runs on the second type only, none of which is up; the others still share as before.
    rate = np.array([[2.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    x = shares("max-min", rate, np.ones(3), np.array([1, 0]))
    assert x[:, 0] == pytest.approx([0.5, 0.0, 0.5], abs=1e-3)
    assert x[:, 1] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


def test_gavel_throughput_respects_infeasible_types() -> None:
    rate = np.array([[1.0, 0.0], [1.0, 0.5]])
    x = shares("throughput", rate, np.ones(2), np.array([1, 1]))
    assert x[0, 1] == 0
    assert x[0, 0] == pytest.approx(1.0)
    assert x[1, 1] == pytest.approx(1.0)


def test_gavel_sees_only_the_requested_count() -> None:
    on = cluster(a100=(1, 4), a10=(1, 2))
    built = workload(
        [job("A", num_devices=4), job("B", num_devices=2)],
        on,
        profiles(m={"a100:2": 1.25, "a100:4": 1.0, "a10:2": 3.0}),
    )
    simulator = Simulator(built, Gavel(), Settings())
    simulator.step()
    _, jobs = simulator.jobs_view()
    columns = Gavel.columns_of(View(built.cluster, built.columns, built.columns.capacity), jobs)
    names = [[str(built.columns.allocations[c]) if c >= 0 else None for c in row] for row in columns]
    assert names == [["a100-40:4", None], ["a100-40:2", "a10:2"]]
