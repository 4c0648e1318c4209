"""The memory bound as a price: bounds, feasible choices, and strategies that cannot be in a better one.

For a price ``p`` per byte, the least of ``seconds + p * (bytes - cap)`` bounds the optimum from below,
and elimination finds it exactly. The price that makes the bound highest is found by walking along the
lower envelope of the lines (Handler and Zang 1980). At that price a strategy whose min-marginal is no
better than choices already in hand can go.
"""

import math
from dataclasses import dataclass

import numpy as np

from arena_jax.compiler.engines.elimination import Elimination
from arena_jax.compiler.engines.problem import MEMORY_SLACK, StrategyProblem

_MAX_PRICES = 60


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What prices taught: a proved bound, the price it came from, and the best choices met that fit."""

    bound: float
    price: float
    choices: list[int] | None


def best_price(problem: StrategyProblem, elimination: Elimination) -> Priced:
    """Search the price of a byte with the highest bound; an infinite bound means that nothing is allowed."""
    assert problem.memory_cap is not None
    cap = problem.memory_cap
    cheap, least = elimination.solve(problem.costs)
    if not math.isfinite(least):
        return Priced(bound=math.inf, price=0.0, choices=None)
    if problem.fits(problem.memory_bytes(cheap)):
        return Priced(bound=least, price=0.0, choices=cheap)
    small = _smallest(problem, elimination)
    if not problem.fits(problem.memory_bytes(small)):
        return Priced(bound=math.inf, price=0.0, choices=None)
    over = (problem.objective(cheap), problem.memory_bytes(cheap))
    under = (problem.objective(small), problem.memory_bytes(small))
    best, best_s = small, under[0]
    bound, at = least, 0.0
    for _ in range(_MAX_PRICES):
        if over[1] <= under[1] or under[0] <= over[0]:
            break
        price = (under[0] - over[0]) / (over[1] - under[1])
        choices, total = elimination.solve(_priced(problem, price))
        if total - price * cap > bound:
            bound, at = total - price * cap, price
        seconds, used = problem.objective(choices), problem.memory_bytes(choices)
        line = over[0] + price * over[1]
        if total >= line - 1e-12 * abs(line):
            break
        if problem.fits(used):
            under = (seconds, used)
            if seconds < best_s:
                best, best_s = choices, seconds
        else:
            over = (seconds, used)
    return Priced(bound=bound, price=at, choices=best)


def hopeless(problem: StrategyProblem, elimination: Elimination, price: float, target_s: float) -> list[np.ndarray]:
    """Per node, which strategies no choice within the memory can use and stay below ``target_s``."""
    assert problem.memory_cap is not None
    marginals = elimination.min_marginals(_priced(problem, price))
    limit = target_s + price * problem.memory_cap * (1 + MEMORY_SLACK)
    limit += 1e-11 * abs(limit)
    return [marginal > limit for marginal in marginals]


def _smallest(problem: StrategyProblem, elimination: Elimination) -> list[int]:
    """Choices of fewest bytes among those that are allowed at all."""
    forbidden = {
        pair: np.where(np.isfinite(seconds), 0.0, np.inf)
        for pair, seconds in problem.edges.items()
        if not np.isfinite(seconds).all()
    }
    bytes_only = StrategyProblem(costs=problem.memory, memory=problem.memory, edges=forbidden)
    return Elimination(bytes_only, elimination.order).solve(problem.memory)[0]


def _priced(problem: StrategyProblem, price: float) -> list[np.ndarray]:
    return [cost + price * memory for cost, memory in zip(problem.costs, problem.memory, strict=True)]
