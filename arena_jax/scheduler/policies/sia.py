"""Sia: goodput-maximising integer program with a restart factor (Jayaram Subramanya et al., SOSP 2023).

Each job's throughputs G[i, j] over configurations are divided by their least. A running job's
configurations other than the present one are multiplied by (age - restarts x S) / (age + S). With
U = G^p the program is max sum_i [sum_j A[i, j] U[i, j] - lambda (1 - |A[i]|)], each job at most one
configuration, devices per type within capacity; for p < 0 it is the minimum with + lambda. With the
``ramp`` a job starts at the smallest feasible allocation of a type and at most doubles with each
decision. Paper: p = 0.5, ramp, rounds of 60 s; artifact: p = -0.5; lambda = 1.1. Decided at events it
does better without the ramp.
"""

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.policies._program import assign
from arena_jax.scheduler.policy import Decision, Jobs, Stateless, View


class Sia(Stateless):
    """Does not use remaining steps. ``gaps`` collects the rounding gap of every decision.

    Args:
        p: exponent of the fairness; not zero.
        penalty: lambda, what leaving a job out costs.
        ramp: limit growth as the paper does.
        round_s: decide again after so long even without an event; 0 never.
    """

    def __init__(
        self, *, p: float = 0.5, penalty: float = 1.1, ramp: bool = False, round_s: float = 0.0, exact: bool = False
    ) -> None:
        if p == 0:
            raise UsageError("sia: p must not be 0")
        self.p, self.penalty, self.ramp, self.round_s, self.exact = p, penalty, ramp, round_s, exact
        self.name = f"sia{p:+g}"
        self.gaps: list[float] = []

    def reset(self) -> None:
        self.gaps = []

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        columns = view.columns
        worth = self.worth(view, jobs, now)
        solved = assign(worth, columns.type_of, columns.num_devices, view.capacity, exact=self.exact)
        self.gaps.append(solved.gap)
        return Decision(solved.column, now + self.round_s if self.round_s else None)

    def worth(self, view: View, jobs: Jobs, now: float) -> np.ndarray:
        """Gain of each cell over leaving the job out; -inf where not offered."""
        types, devices = view.columns.type_of, view.columns.num_devices
        rate = 1.0 / jobs.step_s
        feasible = np.isfinite(jobs.step_s)
        goodput = rate / np.where(feasible, rate, np.inf).min(axis=1, keepdims=True)
        running = np.flatnonzero(jobs.column >= 0)
        held = jobs.column[running]
        restart = float(jobs.restart_s.max())
        age = now - jobs.arrival_s[running]
        factor = np.clip((age - jobs.num_restarts[running] * restart) / (age + restart), 1e-3, 1.0)
        stay = goodput[running, held].copy()
        goodput[running] *= factor[:, None]
        goodput[running, held] = stay
        with np.errstate(divide="ignore"):
            utility = goodput**self.p
        worth = utility + self.penalty if self.p > 0 else self.penalty - utility
        offered = feasible & _reachable(types, devices, jobs, feasible) if self.ramp else feasible
        return np.where(offered, worth, -np.inf)


def _reachable(types: np.ndarray, devices: np.ndarray, jobs: Jobs, feasible: np.ndarray) -> np.ndarray:
    """At most twice the devices held, or the smallest feasible allocation of a type."""
    held = np.where(jobs.column >= 0, devices[np.maximum(jobs.column, 0)], 0)
    reachable = devices[None, :] <= 2 * held[:, None]
    for k in np.unique(types):
        count = np.where(feasible & (types == k)[None, :], devices[None, :], np.iinfo(np.int64).max)
        reachable |= (count == count.min(axis=1, keepdims=True)) & feasible
    return reachable
