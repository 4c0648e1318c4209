"""The strategy solver against trying every choice."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.compiler.engines import elimination as elimination_module
from arena_jax.compiler.engines import highs
from arena_jax.compiler.engines.elimination import Elimination, elimination_order
from arena_jax.compiler.engines.problem import StrategyProblem


def random_problem(
    seed: int, *, num_nodes: int = 5, density: float = 0.6, forbidden: float = 0.0, cap: float | None = None
) -> StrategyProblem:
    """A random graph; integers, so that ties and caps met exactly occur; ``cap`` between least and most memory."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, num_nodes)
    costs = [rng.integers(0, 20, n).astype(float) for n in sizes]
    memory = [rng.integers(0, 12, n).astype(float) for n in sizes]
    edges = {}
    for u in range(num_nodes):
        for v in range(u + 1, num_nodes):
            if v == u + 1 or rng.random() < density:
                edges[u, v] = rng.integers(0, 15, (sizes[u], sizes[v])).astype(float)
                edges[u, v][rng.random(edges[u, v].shape) < forbidden] = np.inf
    if forbidden:
        for cost in costs:
            cost[rng.random(cost.size) < forbidden] = np.inf
    bound = None
    if cap is not None:
        low, high = sum(m.min() for m in memory), sum(m.max() for m in memory)
        bound = float(np.floor(low + cap * (high - low)))
    return StrategyProblem(costs=tuple(costs), memory=tuple(memory), edges=edges, memory_cap=bound)


def brute_force(problem: StrategyProblem) -> float:
    best = np.inf
    for choices in product(*(range(c.size) for c in problem.costs)):
        if problem.memory_cap is None or problem.memory_bytes(choices) <= problem.memory_cap:
            best = min(best, problem.objective(choices))
    return best


def check(problem: StrategyProblem, solution, best: float) -> None:
    if not np.isfinite(best):
        assert solution is None
        return
    assert solution is not None
    assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert problem.objective(solution.choices) == solution.objective
    assert problem.memory_bytes(solution.choices) == solution.memory_bytes
    assert problem.memory_cap is None or solution.memory_bytes <= problem.memory_cap
    assert solution.optimal
    assert solution.bound == pytest.approx(best, rel=1e-6, abs=1e-6)


CAPS = st.sampled_from([None, -0.05, 0.0, 0.1, 0.3, 0.6, 1.0])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.3]), CAPS)
def test_nothing_is_better(seed: int, density: float, forbidden: float, cap: float | None) -> None:
    problem = random_problem(seed, density=density, forbidden=forbidden, cap=cap)
    check(problem, highs.solve_strategies(problem), brute_force(problem))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]), CAPS)
def test_nothing_is_better_by_the_integer_program_alone(seed: int, forbidden: float, cap: float | None) -> None:
    problem = random_problem(seed, forbidden=forbidden, cap=cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination_module, "MAX_TABLE", 0)
        solution = highs.solve_strategies(problem)
    check(problem, solution, brute_force(problem))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]))
def test_min_marginals_are_the_best_with_each_strategy(seed: int, forbidden: float) -> None:
    problem = random_problem(seed, num_nodes=4, forbidden=forbidden)
    order = elimination_order(problem)
    assert order is not None
    found = Elimination(problem, order).min_marginals(problem.costs)
    for v, cost in enumerate(problem.costs):
        for i in range(cost.size):
            pinned = [c.copy() for c in problem.costs]
            pinned[v][np.arange(cost.size) != i] = np.inf
            pinned_problem = StrategyProblem(costs=tuple(pinned), memory=problem.memory, edges=problem.edges)
            assert found[v][i] == pytest.approx(brute_force(pinned_problem))


def test_a_gap_that_is_asked_for_is_kept() -> None:
    for seed in range(20):
        problem = random_problem(seed, num_nodes=6, cap=0.3)
        solution = highs.solve_strategies(problem, relative_gap=0.2)
        best = brute_force(problem)
        if solution is None:
            assert best == np.inf
            continue
        assert solution.bound <= best * (1 + 1e-9)
        assert solution.gap <= 0.2 + 1e-9
        assert solution.objective <= best / (1 - 0.2) + 1e-9


def test_out_of_time_gives_the_best_so_far_and_its_bound() -> None:
    rng = np.random.default_rng(0)
    layers = 60
    # Independent nodes are a knapsack: prices leave a gap, and no time is left to close it.
    problem = StrategyProblem(
        costs=tuple(rng.random(6) for _ in range(layers)),
        memory=tuple(rng.random(6) for _ in range(layers)),
        edges={},
        memory_cap=0.2 * layers,
    )
    exact = highs.solve_strategies(problem)
    hurried = highs.solve_strategies(problem, time_limit_s=0.0)
    assert exact is not None
    assert hurried is not None
    assert exact.optimal
    assert hurried.bound <= exact.objective <= hurried.objective
    assert hurried.bound > 0
    assert problem.fits(hurried.memory_bytes)
