"""Improving a set of allocations by moves, from what runs now.

A move takes one job to a better column. Where devices are short it takes them from the jobs of that
type that lose least value per device freed: by shrinking, by moving to another type with room, last
by pausing. A move is made only when it raises the summed value, so nothing changes without a gain
that pays its charges, and a decision touches only what the event makes worth touching.
"""

import numpy as np

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
        self.types = np.append(type_of, -1)
        self.devices = np.append(num_devices, 0)
        self.column = np.where(column < 0, self.none, column)
        self.free = free.astype(np.int64).copy()
        self.settled = settled
        self._rows = np.arange(num_jobs)

    @property
    def total(self) -> float:
        """Summed value."""
        return float(self.value[self._rows, self.column].sum())

    def propose(self, prices: np.ndarray, most: int, slack: float) -> bool:
        """Try the ``most`` moves of largest gain net of prices; ``slack`` admits some that look slightly bad."""
        rent = np.append(prices[self.types[:-1]] * self.devices[:-1], 0.0)
        now = self.value[self._rows, self.column]
        gain = self.value[:, :-1] - rent[:-1]
        gain -= (now - rent[self.column])[:, None]
        gain[self.value[:, :-1] <= now[:, None] + _EPS] = -np.inf
        flat = gain.ravel()
        candidates = np.flatnonzero(flat > -slack)
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

    def _move(self, job: int, column: int) -> bool:
        gain = self.value[job, column] - self.value[job, self.column[job]]
        if gain <= _EPS:
            return False
        short = self._short(job, column)
        if short > 0:
            victims = self._victims(job, column, short, float(gain))
            if victims is None:
                return False
            self.set(job, self.none)
            for victim, to in victims:
                self.set(victim, to)
        self.set(job, column)
        return True

    def _victims(self, job: int, column: int, short: int, gain: float) -> list[tuple[int, int]] | None:
        """Who gives up ``short`` devices of the column's type, losing less than ``gain`` in all."""
        k = self.types[column]
        pool = np.flatnonzero(self.types[self.column] == k)
        pool = pool[(pool != job) & ~self.settled[pool]]
        held = self.column[pool]
        has, worth = self.devices[held], self.value[pool, held]
        room = np.append(self.free, np.iinfo(np.int64).max)  # type -1 is "not running"
        own = self.column[job]
        if own != self.none and self.types[own] != k:
            room[self.types[own]] += self.devices[own]
        same = self.types == k
        possible = np.where(
            same[None, :], self.devices[None, :] < has[:, None], (self.devices <= room[self.types])[None, :]
        )
        loss = np.where(possible, worth[:, None] - self.value[pool], np.inf)
        freed = has[:, None] - np.where(same, self.devices, 0)[None, :]
        room_for = room[self.types]
        one = _one_victim(loss, freed, short)
        per_device = loss / np.minimum(np.maximum(freed, 1), short)
        option = per_device.argmin(axis=1)
        each = np.arange(len(pool))
        order = np.argsort(per_device[each, option], kind="stable")
        # Whoever alone frees enough at the least loss is the answer to beat.
        limit = gain if one is None else min(gain, float(loss[one]))
        chosen: list[tuple[int, int]] = []
        lost, got = 0.0, 0
        for i in order:
            to = int(option[i])
            if to != self.none and self.types[to] != k:
                if self.devices[to] > room_for[to]:
                    continue
                room_for = np.where(self.types == self.types[to], room_for - self.devices[to], room_for)
            lost += float(loss[i, to])
            if lost >= limit - _EPS:
                break
            got += int(freed[i, to])
            chosen.append((int(pool[i]), to))
            if got >= short:
                return chosen
        if one is not None and float(loss[one]) < gain - _EPS:
            return [(int(pool[one[0]]), int(one[1]))]
        return None


def _one_victim(loss: np.ndarray, freed: np.ndarray, short: int) -> tuple[int, int] | None:
    """The (victim, option) of least loss that frees enough by itself."""
    if not loss.size:
        return None
    alone = np.where(freed >= short, loss, np.inf)
    victim, option = divmod(int(alone.argmin()), loss.shape[1])
    return (victim, option) if np.isfinite(alone[victim, option]) else None
