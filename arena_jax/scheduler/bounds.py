"""Lower bounds on the mean completion time that no policy can beat.

Without contention: each job alone on its fastest allocation, plus one start charge.

Under load, an interval-indexed linear program over fluid schedules. Time after the first arrival is
cut into intervals t; y[i, c, t] are the seconds that job i spends on column c in t, p[i, c] its time
there from beginning to end, a_i its arrival, n_c the devices of a column, N_k those of a type::

    sum_ct y / p = 1                          every job is done
    sum_c y <= |t after a_i|                  one allocation at a time
    sum_{i, c of k} n_c y <= N_k |t|          devices
    C_i >= sum (y / p)(start of t - a_i) + min_c p / 2
    C_i >= sum y,   C_i >= min_c p
    C_i >= sum_{t from theta} (y / p)(theta - a_i) + y     for a few theta >= a_i

Each right-hand side is at most the completion time of any schedule that runs job i on one allocation
at a time: the mean position of its work lies half its least time before its end, the seconds it runs
fit before its end, and what it does after theta ends after theta. So the optimum of sum C_i, plus one
start charge a job, bounds every policy, clairvoyant ones included.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from arena_jax.errors import ArenaError
from arena_jax.scheduler.jobs import Workload


def isolated_bound_s(workload: Workload, start_charge_s: float) -> float:
    """Mean over jobs of the fastest isolated time plus one start charge."""
    return float(workload.isolated_s.mean()) + start_charge_s


def interval_bound_s(
    workload: Workload,
    start_charge_s: float,
    *,
    num_intervals: int = 64,
    num_thetas: int = 3,
    method: str = "highs-ipm",
) -> float:
    """The optimum of the interval program over the number of jobs, in seconds.

    About 40 s for 438 jobs and 40 intervals. Raises :class:`ArenaError` when the solver gives up.
    """
    arrival = workload.arrival_s - workload.arrival_s.min()
    times = workload.num_steps[:, None] * workload.step_s
    edges = _edges(arrival, times, workload, num_intervals)
    starts, lengths = edges[:-1], np.diff(edges)
    columns = workload.columns
    num_jobs, num_t = len(arrival), len(starts)

    pairs = [(i, c) for i in range(num_jobs) for c in _efficient(times[i], columns.type_of, columns.num_devices)]
    pair_job = np.array([i for i, _ in pairs])
    pair_col = np.array([c for _, c in pairs])
    pair_p = times[pair_job, pair_col]
    # One variable per pair and interval that ends after the arrival.
    alive = edges[1:][None, :] > arrival[:, None]
    pair_of, t_of = np.nonzero(alive[pair_job])
    job, col, p = pair_job[pair_of], pair_col[pair_of], pair_p[pair_of]
    num_y = len(pair_of)
    y, done = np.arange(num_y), 1.0 / p
    begin = np.maximum(starts[t_of] - arrival[job], 0.0)
    completion = num_y + np.arange(num_jobs)
    fastest = times.min(axis=1)

    blocks: list[tuple[csr_array, np.ndarray]] = []

    def at_most(rows: np.ndarray, cols: np.ndarray, values: np.ndarray, rhs: np.ndarray) -> None:
        shape = (len(rhs), num_y + num_jobs)
        blocks.append((coo_array((values, (rows, cols)), shape=shape).tocsr(), rhs))

    def before_completion(values: np.ndarray, rhs: np.ndarray) -> None:
        used = values != 0
        at_most(
            np.concatenate([job[used], np.arange(num_jobs)]),
            np.concatenate([y[used], completion]),
            np.concatenate([values[used], -np.ones(num_jobs)]),
            rhs,
        )

    room = np.clip(edges[1:][None, :] - np.maximum(starts[None, :], arrival[:, None]), 0.0, None)
    at_most(job * num_t + t_of, y, np.ones(num_y), room.ravel())
    at_most(
        columns.type_of[col] * num_t + t_of,
        y,
        columns.num_devices[col].astype(float),
        (columns.capacity[:, None] * lengths[None, :]).ravel(),
    )
    before_completion(done * begin, -fastest / 2)
    before_completion(np.ones(num_y), np.zeros(num_jobs))
    for factor in np.linspace(0.5, 2.0, num_thetas) if num_thetas else ():
        # Each job's own theta: the first edge at or after arrival + factor x fastest time.
        place = np.minimum(np.searchsorted(edges, arrival + factor * fastest), num_t - 1)
        theta = edges[place][job]
        after = (starts[t_of] >= theta - 1e-9) & (theta >= arrival[job])
        before_completion(np.where(after, done * (theta - arrival[job]) + 1.0, 0.0), np.zeros(num_jobs))

    whole = coo_array((done, (job, y)), shape=(num_jobs, num_y + num_jobs)).tocsr()
    cost = np.concatenate([np.zeros(num_y), np.ones(num_jobs)])
    bounds = np.zeros((num_y + num_jobs, 2))
    bounds[:, 1] = np.inf
    bounds[num_y:, 0] = fastest
    stacked = _vstack([block for block, _ in blocks])
    solved = linprog(
        cost,
        A_ub=stacked,
        b_ub=np.concatenate([rhs for _, rhs in blocks]),
        A_eq=whole,
        b_eq=np.ones(num_jobs),
        bounds=bounds,
        method=method,
    )
    if not solved.success:
        raise ArenaError(f"the lower-bound program was not solved: {solved.message}")
    return float(solved.fun) / num_jobs + start_charge_s


def _vstack(blocks: list[csr_array]) -> csr_array:
    from scipy.sparse import vstack

    return csr_array(vstack(blocks))


def _efficient(times: np.ndarray, type_of: np.ndarray, num_devices: np.ndarray) -> np.ndarray:
    """Columns that no other of the same type beats in both time and device-time."""
    finite = np.flatnonzero(np.isfinite(times))
    kept = []
    for c in finite:
        same = finite[(type_of[finite] == type_of[c]) & (finite != c)]
        area, areas = times[c] * num_devices[c], times[same] * num_devices[same]
        beaten = (times[same] <= times[c]) & (areas <= area) & ((times[same] < times[c]) | (areas < area) | (same < c))
        if not beaten.any():
            kept.append(c)
    return np.array(kept, dtype=np.int64)


def _edges(arrival: np.ndarray, times: np.ndarray, workload: Workload, num_intervals: int) -> np.ndarray:
    """Interval edges: even over the arrivals, then growing to a horizon by which all can be done."""
    columns = workload.columns
    area = (times * columns.num_devices).min(axis=1).sum() / max(int(columns.capacity.sum()), 1)
    last = float(arrival.max())
    horizon = max(last, 1.0) + 3.0 * area + times.min(axis=1).max() * 2.0
    even = max(2, num_intervals * 3 // 5)
    dense_end = min(max(last + area, horizon / 50), horizon)
    first = np.linspace(0.0, dense_end, even + 1)
    width = dense_end / even
    ratios = np.geomspace(1.0, max(1.0001, (horizon - dense_end) / width + 1.0), num_intervals - even + 1) - 1.0
    rest = dense_end + ratios[1:] * width
    return np.concatenate([first, rest])
