"""A strategy problem as a mixed-integer program, for HiGHS.

Only the nodes' variables are binary: with those at 0 or 1 each edge's variables are settled by its
rows and columns. Equal rows and equal columns of an edge share a variable, which is lossless.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from arena_jax.compiler.engines.problem import StrategyProblem

# HiGHS stops at absolute tolerances of 1e-6 to 1e-7: units are chosen so that these are tiny shares.
_UNITS = 1e4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What HiGHS found: the best choices so far if any, and the bound it proved."""

    choices: list[int] | None
    bound: float


def solve_milp(problem: StrategyProblem, *, time_limit_s: float | None, relative_gap: float) -> Found:
    """Solve with HiGHS; no choices and an infinite bound mean that none is allowed.

    Node costs must be finite. Choices are returned only when they keep the cap as it is written,
    not just within the solver's tolerance.
    """
    cap = problem.memory_cap
    bound = -math.inf
    while True:
        found = _solve(problem, cap, time_limit_s, relative_gap)
        bound = max(bound, found.bound)
        if found.choices is None or problem.memory_cap is None or cap is None:
            return Found(choices=found.choices, bound=bound)
        excess = problem.memory_bytes(found.choices) - problem.memory_cap
        if problem.fits(problem.memory_cap + excess):
            return Found(choices=found.choices, bound=bound)
        cap -= 2 * excess


def _solve(
    problem: StrategyProblem, memory_cap: float | None, time_limit_s: float | None, relative_gap: float
) -> Found:
    sizes = [cost.size for cost in problem.costs]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    num_binaries = int(starts[-1])
    node_costs = np.concatenate(problem.costs)
    base = sum(float(cost.min()) for cost in problem.costs)
    rows: list[np.ndarray] = [np.repeat(np.arange(len(sizes)), sizes)]
    columns: list[np.ndarray] = [np.arange(num_binaries)]
    values: list[np.ndarray] = [np.ones(num_binaries)]
    num_rows, num_columns = len(sizes), num_binaries
    edge_costs: list[np.ndarray] = []
    for (u, v), seconds in problem.edges.items():
        row_of, column_of, small = _merged(seconds)
        allowed = np.argwhere(np.isfinite(small))
        names = num_columns + np.arange(len(allowed))
        edge_costs.append(small[tuple(allowed.T)])
        # Each merged row of the edge's variables sums to its strategies' binaries, and so the columns.
        for axis, node, of in ((0, u, row_of), (1, v, column_of)):
            rows += [num_rows + allowed[:, axis], num_rows + of]
            columns += [names, starts[node] + np.arange(sizes[node])]
            values += [np.ones(len(allowed)), -np.ones(sizes[node])]
            num_rows += small.shape[axis]
        num_columns += len(allowed)
    lower = np.zeros(num_rows)
    lower[: len(sizes)] = 1.0
    upper = lower
    if memory_cap is not None:
        memory = np.concatenate(problem.memory)
        # In units of what may be given away beyond the least: far from the solver's tolerances.
        least = np.repeat([float(m.min()) for m in problem.memory], sizes)
        room = max(memory_cap - sum(float(m.min()) for m in problem.memory), 0.0)
        unit = max(room, float((memory - least).max()) * 1e-6, 1e-300) / _UNITS
        rows.append(np.full(num_binaries, num_rows))
        columns.append(np.arange(num_binaries))
        values.append((memory - least) / unit)
        num_rows += 1
        lower = np.append(lower, -np.inf)
        upper = np.append(upper, room / unit)
    objective = np.concatenate([node_costs - np.repeat([float(c.min()) for c in problem.costs], sizes), *edge_costs])
    # The total matters less than the differences that decide: the largest is some hundreds of units.
    scale = _UNITS / max(float(objective.max(initial=0.0)), 1e-300)
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(num_rows, num_columns)
    ).tocsr()
    options: dict[str, float] = {"mip_rel_gap": relative_gap}
    if time_limit_s is not None:
        options["time_limit"] = max(time_limit_s, 0.0)
    integrality = np.zeros(num_columns)
    integrality[:num_binaries] = 1
    result = milp(
        objective * scale,
        integrality=integrality,
        bounds=Bounds(0.0, np.concatenate([np.ones(num_binaries), np.full(num_columns - num_binaries, np.inf)])),
        constraints=LinearConstraint(matrix, lower, upper),
        options=options,
    )
    if result.status == 2:
        return Found(choices=None, bound=math.inf)
    proved = result.mip_dual_bound
    bound = base + proved / scale if proved is not None and np.isfinite(proved) else -math.inf
    if result.x is None:
        return Found(choices=None, bound=bound)
    choices = [int(result.x[starts[v] : starts[v + 1]].argmax()) for v in range(len(sizes))]
    return Found(choices=choices, bound=bound)


def _merged(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class of each row, class of each column, and the matrix of classes."""
    _, first_rows, row_of = np.unique(seconds, axis=0, return_index=True, return_inverse=True)
    small = seconds[first_rows]
    _, first_columns, column_of = np.unique(small, axis=1, return_index=True, return_inverse=True)
    return row_of.reshape(-1), column_of.reshape(-1), small[:, first_columns]
