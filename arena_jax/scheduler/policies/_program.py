"""Assignment programs solved by HiGHS: each job at most one column, devices per type within capacity."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array

from arena_jax.errors import ArenaError

_INTEGRAL = 1e-6


@dataclass(frozen=True)
class Assignment:
    """A solution: a column (or -1) per job, its objective, and a bound on the optimum.

    ``gap`` is (bound - objective) / |bound|: what rounding cost at most. ``num_fractional`` counts
    the jobs that the relaxation split.
    """

    column: np.ndarray
    objective: float
    bound: float
    num_fractional: int

    @property
    def gap(self) -> float:
        return (self.bound - self.objective) / max(abs(self.bound), 1e-12)


def assign(
    worth: np.ndarray, type_of: np.ndarray, num_devices: np.ndarray, capacity: np.ndarray, *, exact: bool = False
) -> Assignment:
    """Maximise summed worth (jobs x columns, -inf = not offered); not running is worth 0.

    The relaxation has at most as many split jobs as there are types: those are rounded greedily into
    the devices left. ``exact`` solves the integer program instead.
    """
    job, column = np.nonzero(np.isfinite(worth) & (worth > 0))
    chosen = np.full(len(worth), -1, dtype=np.int64)
    if not len(job):
        return Assignment(chosen, 0.0, 0.0, 0)
    cells = np.arange(len(job))
    gain = worth[job, column]
    num_jobs = len(worth)
    rows = np.concatenate([job, num_jobs + type_of[column]])
    values = np.concatenate([np.ones(len(job)), num_devices[column].astype(float)])
    matrix = csr_array(coo_array((values, (rows, np.tile(cells, 2))), shape=(num_jobs + len(capacity), len(job))))
    limit = np.concatenate([np.ones(num_jobs), capacity.astype(float)])
    if exact:
        solved = milp(
            -gain,
            constraints=LinearConstraint(matrix, ub=limit),
            integrality=np.ones(len(job)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-9},
        )
    else:
        solved = linprog(-gain, A_ub=matrix, b_ub=limit, bounds=(0, 1), method="highs-ds")
    if solved.x is None:
        raise ArenaError(f"the assignment program was not solved: {solved.message}")
    whole = solved.x > 1 - _INTEGRAL
    chosen[job[whole]] = column[whole]
    split = np.unique(job[(solved.x > _INTEGRAL) & ~whole])
    free = capacity - np.bincount(
        type_of[column[whole]], weights=num_devices[column[whole]], minlength=len(capacity)
    ).astype(np.int64)
    offered = np.where(np.isfinite(worth[split]), worth[split], -np.inf)
    for i, row in sorted(zip(split, offered, strict=True), key=lambda item: -item[1].max()):
        fits = np.where(num_devices <= free[type_of], row, -np.inf)
        best = int(fits.argmax())
        if fits[best] > 0:
            chosen[i] = best
            free[type_of[best]] -= num_devices[best]
    held = np.flatnonzero(chosen >= 0)
    return Assignment(chosen, float(worth[held, chosen[held]].sum()), float(-solved.fun), len(split))
