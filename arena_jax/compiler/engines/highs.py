"""The default engine: elimination where it is small, prices for the memory, and HiGHS for what is left."""

import math
import time

import numpy as np

from arena_jax.compiler.engines.elimination import Elimination, elimination_order
from arena_jax.compiler.engines.lagrange import best_price, hopeless
from arena_jax.compiler.engines.milp import solve_milp
from arena_jax.compiler.engines.problem import StrategyProblem, StrategySolution
from arena_jax.compiler.engines.reduction import Reduction


def solve_strategies(
    problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0
) -> StrategySolution | None:
    """One strategy per node, of least total cost within the memory cap.

    Args:
        time_limit_s: stop then, with the best choices so far and the bound proved for them.
        relative_gap: stop when nothing better than this share of the objective can be left.

    Returns:
        ``None`` when the cap or the forbidden strategies and pairs leave no choice, or when the time
        ran out before any was found (only where elimination is too large).
    """
    started = time.perf_counter()

    def time_left_s() -> float | None:
        return None if time_limit_s is None else max(time_limit_s - (time.perf_counter() - started), 0.0)

    if not problem.may_fit():
        return None
    if (order := elimination_order(problem)) is not None:
        # Without the cap this is all; with it, often the answer, and a bound otherwise.
        choices, objective = Elimination(problem, order).solve(problem.costs)
        if not math.isfinite(objective):
            return None
        if problem.fits(problem.memory_bytes(choices)):
            return problem.solution(choices, objective, relative_gap=relative_gap)
    reduction = Reduction(problem).run()
    if not reduction.feasible:
        return None
    reduced = reduction.problem()
    order = elimination_order(reduced)
    if order is None:
        found = solve_milp(reduced, time_limit_s=time_left_s(), relative_gap=relative_gap)
        if found.choices is None:
            return None
        return problem.solution(reduction.original(found.choices), found.bound, relative_gap=relative_gap)
    elimination = Elimination(reduced, order)
    if reduced.memory_cap is None:
        choices, objective = elimination.solve(reduced.costs)
        if not math.isfinite(objective):
            return None
        return problem.solution(reduction.original(choices), objective, relative_gap=relative_gap)
    priced = best_price(reduced, elimination)
    if priced.choices is None:
        return None
    best = reduction.original(priced.choices)
    best_s = problem.objective(best)
    target_s = best_s - relative_gap * abs(best_s)
    bound = priced.bound
    if bound < target_s:
        for v, gone in enumerate(hopeless(reduced, elimination, priced.price, target_s)):
            # What is in hand stays: it is compared below, and every node needs a strategy.
            reduction.keep(v, ~gone | (np.arange(gone.size) == priced.choices[v]))
        reduction.run()
        # Whatever was dropped costs at least the target.
        found = solve_milp(reduction.problem(), time_limit_s=time_left_s(), relative_gap=relative_gap)
        bound = max(bound, min(found.bound, target_s))
        if found.choices is not None:
            choices = reduction.original(found.choices)
            if problem.objective(choices) < best_s:
                best = choices
    return problem.solution(best, bound, relative_gap=relative_gap)
