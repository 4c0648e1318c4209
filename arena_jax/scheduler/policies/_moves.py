"""Improving a set of allocations by moves, from what runs now.

A move takes one job to a better column. Where devices are short it takes them from the jobs of that
type that lose least value per device freed: by shrinking, by moving to another type with room, last
by pausing. A move is made only when it raises the summed value, so nothing changes without a gain
that pays its charges, and a decision touches only what the event makes worth touching.
"""

import numpy as np

from arena_jax.scheduler.policies._givers import Givers

_EPS = 1e-9


class Moves:
    """Allocations being improved.

    Attributes:
        column: chosen column per job; ``num_columns`` stands for none.
        free: devices left per type.
        settled: jobs from which nothing may be taken.

    Args:
        value: jobs x columns, see :mod:`._value`.
    """

    def __init__(
        self,
        value: np.ndarray,
        column: np.ndarray,
        type_of: np.ndarray,
        num_devices: np.ndarray,
        free: np.ndarray,
        settled: np.ndarray,
    ) -> None:
        num_jobs, self.none = value.shape
        # One more column for "not running": worth nothing, needs nothing.
        self.value = np.concatenate([value, np.zeros((num_jobs, 1))], axis=1)
        self._offered = value
        self.types = np.append(type_of, -1)
        self.devices = np.append(num_devices, 0)
        self.column = np.where(column < 0, self.none, column)
        self.free = free.astype(np.int64).copy()
        self.settled = settled
        self._rows = np.arange(num_jobs)
        self._gain = self._promising = np.empty(0)
        self._weighed: tuple[np.ndarray, float] | None = None
        self._changed: set[int] = set()
        self._givers = Givers(self.value, self.column, self.types, self.devices, settled)

    @property
    def total(self) -> float:
        """Summed value."""
        return float(self.value[self._rows, self.column].sum())

    def propose(self, prices: np.ndarray, most: int, slack: float) -> bool:
        """Try the ``most`` moves of largest gain net of prices; ``slack`` admits some that look slightly bad."""
        self._weigh(prices, slack)
        flat = self._gain.ravel()
        candidates = np.flatnonzero(self._promising)
        if len(candidates) > most:
            candidates = candidates[np.argpartition(-flat[candidates], most)[:most]]
        candidates = candidates[np.argsort(-flat[candidates], kind="stable")]
        moved: set[int] = set()
        # Per type, (devices short, gain) of moves that failed: who needs more for less fails too.
        failed: dict[int, list[tuple[int, float]]] = {}
        for candidate in candidates:
            job, column = divmod(int(candidate), self.none)
            if job in moved:
                continue
            k = int(self.types[column])
            short, worth = self._short(job, column), float(self.value[job, column] - self.value[job, self.column[job]])
            if any(short >= other and worth <= gained for other, gained in failed.get(k, ())):
                continue
            if self._move(job, column):
                moved.add(job)
                failed.clear()
            else:
                failed.setdefault(k, []).append((short, worth))
        return bool(moved)

    def _weigh(self, prices: np.ndarray, slack: float) -> None:
        """Bring gains net of ``prices`` up to date: of all jobs, or of those that changed since the same was asked."""
        if self._weighed is None or self._weighed[0] is not prices or self._weighed[1] != slack:
            jobs: np.ndarray | slice = slice(None)
            self._gain, self._promising = np.empty_like(self._offered), np.empty(self._offered.shape, dtype=bool)
        else:
            jobs = np.fromiter(self._changed, dtype=np.int64)
        rent = np.append(prices[self.types[:-1]] * self.devices[:-1], 0.0)
        offered, held = self._offered[jobs], self.column[jobs]
        now = self.value[self._rows[jobs], held]
        gain = offered - rent[:-1]
        gain -= (now - rent[held])[:, None]
        self._gain[jobs] = gain
        self._promising[jobs] = (gain > -slack) & (offered > (now + _EPS)[:, None])
        self._weighed = (prices, slack)
        self._changed.clear()

    def fill(self, most: int = 64) -> bool:
        """Use free devices: largest gain in value first."""
        filled = False
        while (self.free > 0).any():
            now = self.value[self._rows, self.column]
            own = self.devices[self.column]
            own_type = self.types[self.column]
            room = self.free[self.types[:-1]][None, :] + np.where(
                own_type[:, None] == self.types[None, :-1], own[:, None], 0
            )
            gain = np.where(self.devices[None, :-1] <= room, self.value[:, :-1] - now[:, None], -np.inf)
            best = gain.argmax(axis=1)
            top = gain[self._rows, best]
            hopeful = np.flatnonzero(top > _EPS)
            hopeful = hopeful[np.argsort(-top[hopeful], kind="stable")][:most]
            changed = False
            for job in hopeful:
                if self._fits(int(job), int(best[job])):
                    self.set(int(job), int(best[job]))
                    changed = filled = True
            if not changed:
                break
        return filled

    def _fits(self, job: int, column: int) -> bool:
        return self._short(job, column) <= 0

    def _short(self, job: int, column: int) -> int:
        """Devices missing for ``job`` to run on ``column``."""
        k, held = self.types[column], self.column[job]
        own = self.devices[held] if self.types[held] == k else 0
        return int(self.devices[column] - own - self.free[k])

    def set(self, job: int, column: int) -> None:
        """Give ``job`` a column, which must fit, or none."""
        held = self.column[job]
        if held != self.none:
            self.free[self.types[held]] += self.devices[held]
        if column != self.none:
            self.free[self.types[column]] -= self.devices[column]
        self.column[job] = column
        self._givers.moved(job)
        self._changed.add(job)

    def _move(self, job: int, column: int) -> bool:
        gain = self.value[job, column] - self.value[job, self.column[job]]
        if gain <= _EPS:
            return False
        short = self._short(job, column)
        if short > 0:
            victims = self._givers.give(job, int(self.types[column]), short, float(gain), self.free)
            if victims is None:
                return False
            self.set(job, self.none)
            for victim, to in victims:
                self.set(victim, to)
        self.set(job, column)
        return True
