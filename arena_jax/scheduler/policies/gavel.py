"""Gavel: heterogeneity-aware shares of time, realised in rounds (Narayanan et al., OSDI 2020).

X[m, k] is the share of time of job m on type k at its requested count s[m]; sum_k X[m, k] <= 1 and
sum_m s[m] X[m, k] <= N[k]. ``max-min`` maximises min_m s[m] sum_k T[m, k] X[m, k] / (w[m] T_prop[m]),
T_prop the throughput on a proportional share of every type. ``throughput`` maximises
sum_m sum_k T[m, k] X[m, k] in units of each job's best type (so that steps of unlike models add up).
T is 0 where the requested count is infeasible on a type. Each round runs the (job, type) pairs of
largest share owed over share received. No elasticity. Paper: rounds of 360 s.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from arena_jax.errors import ArenaError, UsageError
from arena_jax.scheduler.policy import Decision, Jobs, View


class Gavel:
    """Does not use remaining steps. Solves its program when the set of jobs or the devices that are up change."""

    def __init__(self, *, objective: str = "max-min", round_s: float = 360.0) -> None:
        if objective not in ("max-min", "throughput"):
            raise UsageError(f"gavel: objective must be max-min or throughput, got {objective!r}")
        self.objective, self.round_s = objective, round_s
        self.name = f"gavel-{objective}"
        self.reset()

    def reset(self) -> None:
        self._shares: dict[int, np.ndarray] = {}
        self._received: dict[int, np.ndarray] = {}
        self._solved_for: tuple[int, ...] = ()
        self._last_s: float | None = None
        self._ran: dict[int, int] = {}

    def get_state(self) -> Mapping[str, Any]:
        return {
            "shares": [[k, v.tolist()] for k, v in self._shares.items()],
            "received": [[k, v.tolist()] for k, v in self._received.items()],
            "solved_for": list(self._solved_for),
            "last_s": self._last_s,
            "ran": list(self._ran.items()),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._shares = {int(k): np.array(v) for k, v in state["shares"]}
        self._received = {int(k): np.array(v) for k, v in state["received"]}
        self._solved_for, self._last_s = tuple(state["solved_for"]), state["last_s"]
        self._ran = {int(k): int(v) for k, v in state["ran"]}

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        columns = view.columns
        num_types = len(columns.types)
        elapsed = 0.0 if self._last_s is None else now - self._last_s
        self._last_s = now
        for key, k in self._ran.items():
            if k >= 0:
                self._received.setdefault(key, np.zeros(num_types))[k] += elapsed
        at = self.columns_of(view, jobs)
        keys = tuple(jobs.key.tolist())
        problem = (*keys, *view.capacity.tolist())
        if problem != self._solved_for:
            rate = np.where(at >= 0, 1.0 / np.take_along_axis(jobs.step_s, np.maximum(at, 0), axis=1), 0.0)
            count = columns.num_devices[jobs.request].astype(float)
            shares = self.solve(rate, count, jobs.weight, view.capacity)
            self._shares = dict(zip(keys, shares, strict=True))
            self._received = {key: self._received.get(key, np.zeros(num_types)) for key in keys}
            self._solved_for = problem
        owed = np.array([self._shares[key] for key in keys])
        got = np.array([self._received[key] for key in keys])
        age = np.maximum(now - jobs.arrival_s, 1.0)[:, None]
        # A pair that has received nothing comes first, by what it is owed.
        priority = np.where((owed > 1e-6) & (at >= 0), owed / np.maximum(got / age, 1e-9), -np.inf)
        chosen = np.full(len(jobs), -1, dtype=np.int64)
        free = view.capacity.copy()
        # Among equals the one that runs there already goes first, then the older.
        same = at == jobs.column[:, None]
        order = np.lexsort((np.repeat(np.arange(len(jobs)), num_types), ~same.ravel(), -priority.ravel()))
        flat = priority.ravel()
        for pair in order:
            if flat[pair] == -np.inf:
                break
            i, k = divmod(int(pair), num_types)
            need = columns.num_devices[at[i, k]]
            if chosen[i] < 0 and need <= free[k]:
                chosen[i] = at[i, k]
                free[k] -= need
        # Work conserving: devices left over go to whoever can use them.
        for i in np.flatnonzero(chosen < 0).tolist():
            for k in np.argsort(-owed[i]).tolist():
                if at[i, k] >= 0 and columns.num_devices[at[i, k]] <= free[k]:
                    chosen[i] = at[i, k]
                    free[k] -= columns.num_devices[at[i, k]]
                    break
        self._ran = {key: int(columns.type_of[c]) if c >= 0 else -1 for key, c in zip(keys, chosen, strict=True)}
        return Decision(chosen, now + self.round_s)

    @staticmethod
    def columns_of(view: View, jobs: Jobs) -> np.ndarray:
        """Jobs x types: the fastest column at the requested count, -1 where infeasible."""
        columns = view.columns
        count = columns.num_devices[jobs.request]
        found = np.full((len(jobs), len(columns.types)), -1, dtype=np.int64)
        for k in range(len(columns.types)):
            cells = np.where(
                (columns.type_of == k)[None, :] & (columns.num_devices[None, :] == count[:, None]), jobs.step_s, np.inf
            )
            best = cells.argmin(axis=1)
            found[:, k] = np.where(np.isfinite(cells[np.arange(len(jobs)), best]), best, -1)
        return found

    def solve(self, rate: np.ndarray, count: np.ndarray, weight: np.ndarray, capacity: np.ndarray) -> np.ndarray:
        """Shares of time, jobs x types, from steps/s ``rate`` at ``count`` devices."""
        num_jobs, num_types = rate.shape
        job, k = np.nonzero(rate > 0)
        cells = np.arange(len(job))
        rows, cols, values = [job, num_jobs + k], [cells, cells], [np.ones(len(job)), count[job]]
        limit = [np.ones(num_jobs), capacity.astype(float)]
        cost = np.zeros(len(job) + 1)
        if self.objective == "throughput":
            cost[:-1] = -(rate / rate.max(axis=1, keepdims=True))[job, k]
        else:
            fair = rate @ (capacity / capacity.sum())
            # A job whose types are all down gets nothing, and does not hold the others down to that.
            up = fair > 0
            worth = np.where(up, count / (weight * np.where(up, fair, 1.0)), 0.0)[job] * rate[job, k]
            rows += [num_jobs + num_types + job, num_jobs + num_types + np.arange(num_jobs)]
            cols += [cells, np.full(num_jobs, len(job))]
            values += [-worth, up.astype(float)]
            limit.append(np.zeros(num_jobs))
            # Among max-min optima prefer the one that also uses what is left.
            cost[:-1], cost[-1] = -1e-4 * (rate / rate.max(axis=1, keepdims=True))[job, k] / num_jobs, -1.0
        bound = np.concatenate(limit)
        matrix = coo_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))), shape=(len(bound), len(cost))
        )
        solved = linprog(cost, A_ub=matrix.tocsr(), b_ub=bound, bounds=(0, None), method="highs-ds")
        if solved.x is None:
            raise ArenaError(f"{self.name}: the program was not solved: {solved.message}")
        shares = np.zeros_like(rate)
        shares[job, k] = solved.x[:-1]
        return shares
