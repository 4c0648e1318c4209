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
from arena_jax.compiler.engines.units import Units, cap_after


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best choices so far if any, and the bound proved for them."""

    choices: list[int] | None
    bound: float


def solve_milp(problem: StrategyProblem, *, time_limit_s: float | None, relative_gap: float) -> Found:
    """Solve with HiGHS; no choices and an infinite bound mean that none is allowed.

    Node costs must be finite. Choices are returned only when they keep the cap as it is written,
    not just within the solver's tolerance.
    """
    cap, bound = problem.memory_cap, -math.inf
    while True:
        units = Units.of(problem, cap)
        found = _solve(units, time_limit_s, relative_gap)
        bound = max(bound, units.seconds(found.bound))
        if found.choices is None or (tighter := cap_after(problem, cap, found.choices)) is None:
            return Found(choices=found.choices, bound=bound)
        cap = tighter


def _solve(units: Units, time_limit_s: float | None, relative_gap: float) -> Found:
    sizes = [cost.size for cost in units.costs]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    num_binaries = int(starts[-1])
    objective = [*units.costs]
    # Row 0..N-1: one strategy per node.
    rows: list[np.ndarray] = [np.repeat(np.arange(len(sizes)), sizes)]
    columns: list[np.ndarray] = [np.arange(num_binaries)]
    values: list[np.ndarray] = [np.ones(num_binaries)]
    num_rows, num_columns = len(sizes), num_binaries
    for (u, v), costs in units.edges.items():
        row_of, column_of, small = _merged(costs)
        allowed = np.argwhere(np.isfinite(small))
        names = num_columns + np.arange(len(allowed))
        objective.append(small[tuple(allowed.T)])
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
    if units.room is not None:
        rows.append(np.full(num_binaries, num_rows))
        columns.append(np.arange(num_binaries))
        values.append(np.concatenate(units.memory))
        num_rows += 1
        lower, upper = np.append(lower, -np.inf), np.append(upper, units.room)
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(num_rows, num_columns)
    ).tocsr()
    options: dict[str, float] = {"mip_rel_gap": relative_gap}
    if time_limit_s is not None:
        options["time_limit"] = max(time_limit_s, 0.0)
    integrality = np.zeros(num_columns)
    integrality[:num_binaries] = 1
    result = milp(
        np.concatenate(objective),
        integrality=integrality,
        bounds=Bounds(0.0, np.concatenate([np.ones(num_binaries), np.full(num_columns - num_binaries, np.inf)])),
        constraints=LinearConstraint(matrix, lower, upper),
        options=options,
    )
    if result.status == 2:
        return Found(choices=None, bound=math.inf)
    proved = result.mip_dual_bound
    bound = float(proved) if proved is not None and np.isfinite(proved) else -math.inf
    if result.x is None:
        return Found(choices=None, bound=bound)
    return Found(choices=[int(result.x[starts[v] : starts[v + 1]].argmax()) for v in range(len(sizes))], bound=bound)


def _merged(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class of each row, class of each column, and the matrix of classes."""
    _, first_rows, row_of = np.unique(seconds, axis=0, return_index=True, return_inverse=True)
    small = seconds[first_rows]
    _, first_columns, column_of = np.unique(small, axis=1, return_index=True, return_inverse=True)
    return row_of.reshape(-1), column_of.reshape(-1), small[:, first_columns]
