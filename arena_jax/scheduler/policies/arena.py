"""The ``arena`` policy: joint, elastic, heterogeneity-aware, and decided in milliseconds.

At every event it maximises the summed value of allocations (:mod:`._value`) over all types at once,
from what runs now: prices per device type (:mod:`._prices`) propose moves, and moves are made where
they raise the sum (:mod:`._moves`). ``docs/scheduler.md`` states the program it solves.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.policies._moves import Moves
from arena_jax.scheduler.policies._prices import update, wanted
from arena_jax.scheduler.policies._repack import affordable, price_bound, repack
from arena_jax.scheduler.policies._value import ValueRules, settled, values
from arena_jax.scheduler.policy import Decision, Jobs, View

# A sum so close to the prices' bound is good enough; else device types are dealt out anew, which so
# many table entries hold to a few milliseconds. Only small clusters are within that, or need it.
_GOOD_ENOUGH = 0.02
_REPACK_ENTRIES = 3e6
# On larger ones, up to so many active jobs, a decision also starts from what the prices would choose.
_SECOND_START = 600

OBJECTIVES = ("time", "cost", "cost-under-deadline")


class Arena:
    """Our policy. Uses remaining steps and the step times of all allocations.

    Args:
        objective: ``time`` minimises weighted completion time; ``cost`` runs each job on what is
            cheapest for it; ``cost-under-deadline`` on the cheapest that meets its deadline.
        resize: ``False`` keeps each job at the allocation it first got (for ablations).
        rules: constants of the objective; single ones may be given by keyword.
    """

    name = "arena"

    def __init__(
        self, *, objective: str = "time", resize: bool = True, rules: ValueRules | None = None, **constants: Any
    ) -> None:
        if objective not in OBJECTIVES:
            raise UsageError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
        self.objective, self.resize = objective, resize
        self.rules = replace(rules or ValueRules(), **constants)
        self._prices: np.ndarray | None = None

    def reset(self) -> None:
        self._prices = None

    def get_state(self) -> Mapping[str, Any]:
        return {"prices": None if self._prices is None else self._prices.tolist()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._prices = None if state["prices"] is None else np.array(state["prices"])

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        columns = view.columns
        value = values(view, jobs, now, self.rules, self._allowed(view, jobs, now))
        if not self.resize:
            _pin(value, jobs.column)
        num_jobs = len(jobs)
        # Large clusters change little by one event: fewer steps and proposals, never fewer than these.
        scale = max(1.0, num_jobs / 300.0)
        prices = np.zeros(len(columns.types)) if self._prices is None else self._prices
        fresh = not prices.any()
        self._prices = update(
            prices,
            value,
            columns.type_of,
            columns.num_devices,
            view.capacity,
            max_steps=60 if fresh else max(5, int(12 / scale)),
            first_step=0.5 if fresh else 0.2,
        )
        fixed = settled(jobs, now, self.rules)
        if not self.resize:
            fixed = fixed | (jobs.column >= 0)
        best = self._improve(jobs.column, value, fixed, view)
        if affordable(best, _REPACK_ENTRIES):
            bound = price_bound(self._prices, value, columns.type_of, columns.num_devices, view.capacity)
            repack(best, bound, within=_GOOD_ENOUGH, budget=_REPACK_ENTRIES)
        elif num_jobs <= _SECOND_START:
            other = self._improve(wanted(self._prices, value, jobs.column, fixed, view), value, fixed, view)
            best = max(best, other, key=lambda moves: moves.total)
        chosen = np.where(best.column == best.none, -1, best.column)
        return Decision(chosen, self._wake(jobs, now, chosen))

    @staticmethod
    def effort(num_jobs: int) -> tuple[int, int]:
        """Passes and proposals in each: as many as keep a decision short."""
        return (3 if num_jobs <= 2000 else 2), max(10, min(200, 12000 // num_jobs))

    def _improve(self, start: np.ndarray, value: np.ndarray, fixed: np.ndarray, view: View) -> Moves:
        columns = view.columns
        assert self._prices is not None
        free = view.capacity - columns.usage(start)
        moves = Moves(value, start, columns.type_of, columns.num_devices, free, fixed)
        passes, most = self.effort(len(value))
        for _ in range(passes):
            proposed = moves.propose(self._prices, most, 0.02)
            filled = moves.fill()
            if not (proposed or filled):
                break
        return moves

    def _allowed(self, view: View, jobs: Jobs, now: float) -> np.ndarray | None:
        """Columns that the money objectives leave to each job."""
        if self.objective == "time":
            return None
        prices = view.cluster.prices_per_hour()
        if np.isnan(prices).any():
            missing = [name for name, price in zip(view.cluster.types, prices, strict=True) if np.isnan(price)]
            raise UsageError(
                f"objective {self.objective!r} needs a price for {', '.join(missing)}",
                hint="give price_per_hour in the cluster file's [types.NAME]",
            )
        remaining = jobs.remaining_s
        dollars = remaining * (prices[view.columns.type_of] * view.columns.num_devices)
        if self.objective == "cost-under-deadline":
            charge = jobs.restart_s.max()
            in_time = now + remaining + charge <= jobs.deadline_s[:, None]
            late = ~in_time.any(axis=1)
            in_time[late] = remaining[late] <= remaining[late].min(axis=1, keepdims=True)
            dollars = np.where(in_time, dollars, np.inf)
        return dollars <= dollars.min(axis=1, keepdims=True) * 1.02

    def _wake(self, jobs: Jobs, now: float, chosen: np.ndarray) -> float | None:
        """Deadlines whose slack runs out between events, and the end of minimum runs while jobs wait."""
        times = []
        hurried = np.flatnonzero(np.isfinite(jobs.deadline_s))
        if len(hurried):
            tight = jobs.deadline_s[hurried] - 1.5 * jobs.remaining_s[hurried].min(axis=1) - 340.0
            later = tight[np.isfinite(tight) & (tight > now)]
            if len(later):
                times.append(float(later.min()) + 1.0)
        if self.rules.min_run_s and (chosen < 0).any():
            ends = jobs.since_s[jobs.column >= 0] + self.rules.min_run_s
            ends = ends[ends > now]
            if len(ends):
                times.append(float(ends.min()))
        return min(times) if times else None


def _pin(value: np.ndarray, column: np.ndarray) -> None:
    """Leave running jobs only the column they hold."""
    running = np.flatnonzero(column >= 0)
    kept = value[running, column[running]].copy()
    value[running] = -np.inf
    value[running, column[running]] = kept
