"""Who gives devices up, and where to: shrinking, moving to a type with room, or pausing.

Most of the moves that are tried lack devices, and most of those come to nothing, so this is where a decision
spends its time. What each job would lose by each other column is kept up to date row by row; a bound tells
at once when giving up so many devices of a type costs more than the move gains.
"""

import numpy as np

_EPS = 1e-9
_ENDLESS = np.iinfo(np.int64).max
_NOBODY = -2  # home of a job from which nothing may be taken


class Givers:
    """The jobs' losses from giving way, at the present allocations.

    Args:
        value: jobs x columns; the last column is "not running", worth 0.
        column: column held by each job. Shared with the caller, who reports changes by :meth:`moved`.
        kinds: type of each column, -1 for "not running".
        devices: devices of each column.
        settled: jobs from which nothing may be taken.
    """

    def __init__(
        self, value: np.ndarray, column: np.ndarray, kinds: np.ndarray, devices: np.ndarray, settled: np.ndarray
    ) -> None:
        self._value, self._column, self._kinds, self._devices = value, column, kinds, devices
        same = kinds[:, None] == kinds[None, :]
        # From column to column: devices freed of the type left, and whether that type gets none back.
        self._freed = devices[:, None] - np.where(same, devices[None, :], 0)
        self._no_help = same & (self._freed <= 0)
        self._shares: dict[int, np.ndarray] = {}
        self._home = np.where(settled, _NOBODY, kinds[column])
        worth = value[np.arange(len(value)), column]
        self._loss = np.where(self._no_help[column], np.inf, worth[:, None] - value)
        self._found: dict[tuple[int, int, int, int], _Found] = {}

    def moved(self, job: int) -> None:
        """``job`` holds another column now."""
        column, row = self._column[job], self._value[job]
        if self._home[job] != _NOBODY:
            self._home[job] = self._kinds[column]
        self._loss[job] = np.where(self._no_help[column], np.inf, row[column] - row)
        self._found.clear()

    def give(self, asking: int, kind: int, short: int, gain: float, free: np.ndarray) -> list[tuple[int, int]] | None:
        """Who frees ``short`` devices of type ``kind`` for the job ``asking``, and the columns they go to.

        ``None`` unless they lose less in all than it gains. ``free`` are the devices of each type nobody holds.
        """
        own = self._column[asking]
        # Devices that the asking job would leave on another type are room to give way to.
        leaves = (int(self._kinds[own]), int(self._devices[own])) if self._kinds[own] not in (-1, kind) else (-1, 0)
        key = (kind, short, *leaves)
        found = self._found.get(key)
        if found is None:
            room = np.append(free, _ENDLESS)  # type -1 is "not running"
            if leaves[1]:
                room[leaves[0]] += leaves[1]
            found = self._found[key] = self._find(kind, short, room)
        # Devices cost at least this much each, however many give way.
        if found.least * short >= gain:
            return None
        return self._choose(found, asking, kind, short, gain)

    def _find(self, kind: int, short: int, room: np.ndarray) -> "_Found":
        jobs = np.flatnonzero(self._home == kind)
        options = np.flatnonzero((self._kinds == kind) | (self._devices <= room[self._kinds]))
        at = self._column[jobs][:, None], options
        loss = self._loss[jobs[:, None], options]
        return _Found(room, jobs, options, loss, loss / self._share(short)[at], self._freed[at])

    def _share(self, short: int) -> np.ndarray:
        """Devices that count of those freed from column to column, at most ``short``."""
        if short not in self._shares:
            self._shares[short] = np.minimum(np.maximum(self._freed, 1), short)
        return self._shares[short]

    def _choose(self, found: "_Found", asking: int, kind: int, short: int, gain: float) -> list[tuple[int, int]] | None:
        jobs, loss, each, freed = found.jobs, found.loss, found.per_device, found.freed
        if self._home[asking] == kind:
            others = jobs != asking
            jobs, loss, each, freed = jobs[others], loss[others], each[others], freed[others]
        if not len(jobs):
            return None
        rows = np.arange(len(jobs))
        # Whoever alone frees enough at the least loss is the answer to beat.
        enough = np.where(freed >= short, loss, np.inf)
        one, to = divmod(int(enough.argmin()), enough.shape[1])
        alone = float(enough[one, to])
        limit = min(gain, alone)
        best = each.argmin(axis=1)
        room = found.room.copy()
        chosen: list[tuple[int, int]] = []
        lost, got = 0.0, 0
        for i in np.argsort(each[rows, best], kind="stable"):
            option = int(found.options[best[i]])
            other = self._kinds[option]
            if other not in (-1, kind):
                if self._devices[option] > room[other]:
                    continue
                room[other] -= self._devices[option]
            lost += float(loss[i, best[i]])
            if lost >= limit - _EPS:
                break
            got += int(freed[i, best[i]])
            chosen.append((int(jobs[i]), option))
            if got >= short:
                return chosen
        if alone < gain - _EPS:
            return [(int(jobs[one]), int(found.options[to]))]
        return None


class _Found:
    """What the jobs on one type may do: jobs x options, for one number of missing devices."""

    def __init__(self, room: np.ndarray, jobs: np.ndarray, options: np.ndarray, loss: np.ndarray,
                 per_device: np.ndarray, freed: np.ndarray) -> None:  # fmt: skip
        self.room, self.jobs, self.options = room, jobs, options
        self.loss, self.per_device, self.freed = loss, per_device, freed
        self.least = float(per_device.min(initial=np.inf))
