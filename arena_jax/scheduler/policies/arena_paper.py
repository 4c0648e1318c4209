"""The Arena paper's own scheduler, from its artifact (arXiv 2403.16125).

Objective: greedy gain in the plain sum of samples/s. After departures, waiting jobs restart in arrival
order, then running jobs are upgraded. An arriving job is placed at its requested type and count; where
that does not fit, a breadth-first search downgrades others, per type halving the job with the least
throughput loss among those that hold at least half of the largest allocation, or moves one job of the
wanted type to another type at the same count. The outcome of largest summed gain that leaves no job
infeasible is taken, else the job waits. A job started past a waiting one is opportunistic: its devices
may be reclaimed for the jobs before it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arena_jax.scheduler.policy import Decision, Jobs, View

_MOST_RESTARTS = 100
_MOST_UPGRADES = 10
_MOST_DEVICES = 16
_GAIN = 1e-9


class ArenaPaper:
    """Does not use remaining steps, only throughput in samples/s."""

    name = "arena-paper"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._seen: set[int] = set()
        self._opportunistic: set[int] = set()

    def get_state(self) -> Mapping[str, Any]:
        return {"seen": sorted(self._seen), "opportunistic": sorted(self._opportunistic)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._seen, self._opportunistic = set(state["seen"]), set(state["opportunistic"])

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        state = _State(view, jobs)
        keys = jobs.key.tolist()
        self._opportunistic &= set(keys)
        failed: set[tuple[int, bytes]] = set()
        waiting = np.flatnonzero(jobs.column < 0)[:_MOST_RESTARTS]
        skipped = False
        for i in waiting:
            wanted = int(jobs.request[i])
            model = (wanted, jobs.step_s[i].tobytes())
            new = keys[i] not in self._seen
            placed = model not in failed and (
                state.place(int(i), wanted)
                or self._reclaim(state, keys, int(i), wanted)
                or (new and state.search(int(i), wanted))
            )
            self._seen.add(keys[i])
            if placed:
                if skipped:
                    self._opportunistic.add(keys[i])
            else:
                failed.add(model)
                skipped = True
        state.upgrade()
        self._opportunistic -= {keys[i] for i in np.flatnonzero(state.column < 0)}
        return Decision(state.column)

    def _reclaim(self, state: "_State", keys: list[int], i: int, wanted: int) -> bool:
        """Pause opportunistic jobs that arrived later, newest first, where that makes room."""
        k = state.types[wanted]
        victims = [
            j
            for j in range(len(keys) - 1, i, -1)
            if keys[j] in self._opportunistic and state.column[j] >= 0 and state.types[state.column[j]] == k
        ]
        room, taken = int(state.free[k]), []
        for j in victims:
            if room >= state.devices[wanted]:
                break
            room += int(state.devices[state.column[j]])
            taken.append(j)
        if room < state.devices[wanted]:
            return False
        for j in taken:
            state.set(j, -1)
        return state.place(i, wanted)


class _State:
    """Columns chosen so far and devices left, with the artifact's moves."""

    def __init__(self, view: View, jobs: Jobs) -> None:
        columns = view.columns
        self.types, self.devices = columns.type_of, columns.num_devices
        self.num_types = len(columns.types)
        self.column = jobs.column.copy()
        self.free = view.capacity - columns.usage(self.column)
        batch = jobs.batch
        self.samples = np.where(np.isfinite(jobs.step_s), batch[:, None] / jobs.step_s, 0.0)
        # Fastest column of each (type, count) for each job would be the same shape here: one per pair.
        self._by_shape = {(int(k), int(n)): c for c, (k, n) in enumerate(zip(self.types, self.devices, strict=True))}

    def set(self, job: int, column: int) -> None:
        held = self.column[job]
        if held >= 0:
            self.free[self.types[held]] += self.devices[held]
        if column >= 0:
            self.free[self.types[column]] -= self.devices[column]
        self.column[job] = column

    def rate(self, job: int, column: int) -> float:
        return float(self.samples[job, column]) if column >= 0 else 0.0

    def shape(self, job: int, k: int, count: int) -> int:
        """The job's column at ``count`` devices of type ``k``, -1 where infeasible."""
        c = self._by_shape.get((k, count), -1)
        return c if c >= 0 and self.samples[job, c] > 0 else -1

    def place(self, job: int, column: int) -> bool:
        if self.devices[column] > self.free[self.types[column]]:
            return False
        self.set(job, column)
        return True

    def search(self, job: int, wanted: int) -> bool:
        """Breadth-first search over downgrades that make room for ``job`` at ``wanted``."""
        depth = 2 if int((self.column >= 0).sum()) > 150 else 3
        start = self.column.copy()
        frontier: list[tuple[tuple[int, int], ...]] = [()]
        best: tuple[float, tuple[tuple[int, int], ...]] | None = None
        for _ in range(depth):
            following = []
            for path in frontier:
                for j, c in path:
                    self.set(j, c)
                for j, c in self._downgrades(job, wanted):
                    before = int(self.column[j])
                    self.set(j, c)
                    longer = (*path, (j, c))
                    if self.devices[wanted] <= self.free[self.types[wanted]]:
                        touched = {q for q, _ in longer}
                        gain = self.rate(job, wanted) + sum(
                            self.rate(q, int(self.column[q])) - self.rate(q, int(start[q])) for q in touched
                        )
                        if gain > _GAIN and (best is None or gain > best[0]):
                            best = (gain, longer)
                    else:
                        following.append(longer)
                    self.set(j, before)
                for j in {j for j, _ in path}:
                    self.set(j, int(start[j]))
            frontier = following
        if best is None:
            return False
        for j, c in best[1]:
            self.set(j, c)
        return self.place(job, wanted)

    def _downgrades(self, job: int, wanted: int) -> list[tuple[int, int]]:
        """One halving per type, and one move of a job of the wanted type to each other type."""
        found: list[tuple[int, int]] = []
        running = np.flatnonzero(self.column >= 0)
        if not len(running):
            return found
        count = self.devices[self.column[running]]
        for k in range(self.num_types):
            on = running[self.types[self.column[running]] == k]
            if not len(on):
                continue
            large = on[2 * self.devices[self.column[on]] >= self.devices[self.column[on]].max()]
            halves = [(j, c) for j in large if (c := self.shape(j, k, int(self.devices[self.column[j]]) // 2)) >= 0]
            if halves:
                j, c = min(halves, key=lambda move: self.rate(move[0], int(self.column[move[0]])) - self.rate(*move))
                found.append((int(j), c))
        del count
        home = int(self.types[wanted])
        movable = running[self.types[self.column[running]] == home]
        for k in range(self.num_types):
            if k == home:
                continue
            moves = []
            for j in movable:
                held = int(self.column[j])
                c = self.shape(j, k, int(self.devices[held]))
                if j != job and c >= 0 and self.devices[c] <= self.free[k]:
                    moves.append((self.rate(j, held) - self.rate(j, c), int(j), c))
            if moves:
                found.append(min(moves)[1:])
        return found

    def upgrade(self) -> None:
        """At most ten steps, each the type change or doubling of largest gain."""
        rows = np.arange(len(self.column))
        for _ in range(_MOST_UPGRADES):
            held = np.maximum(self.column, 0)
            now = np.where(self.column >= 0, self.samples[rows, held], np.inf)
            own = np.where(self.types[held][:, None] == self.types[None, :], self.devices[held][:, None], 0)
            fits = self.devices[None, :] <= self.free[self.types][None, :] + own
            same_type = self.types[held][:, None] == self.types[None, :]
            same_count = self.devices[held][:, None] == self.devices[None, :]
            doubled = (2 * self.devices[held][:, None] == self.devices[None, :]) & (
                self.devices[None, :] <= _MOST_DEVICES
            )
            offered = fits & ((same_count & ~same_type) | (doubled & same_type)) & (self.samples > 0)
            gain = np.where(offered, self.samples - now[:, None], -np.inf)
            if not gain.size or gain.max() <= _GAIN:
                return
            job, column = divmod(int(gain.argmax()), gain.shape[1])
            self.set(job, column)
