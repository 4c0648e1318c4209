"""Elastic first come, first served.

Jobs are admitted in arrival order at their smallest allocation, on the requested type or on any.
Where the head of the queue does not fit, elastic jobs are shrunk, newest first. Then jobs grow,
oldest first, one feasible count at a time; a job that runs already grows only when the time saved
exceeds the restart charge times ``hysteresis``, one admitted in this very event grows at no cost.
"""

import numpy as np

from arena_jax.scheduler.policy import Decision, Jobs, Stateless, View


class FcfsElastic(Stateless):
    """Uses remaining steps, for the hysteresis only."""

    def __init__(self, *, any_type: bool = False, hysteresis: float = 2.0) -> None:
        self.any_type, self.hysteresis = any_type, hysteresis
        self.name = "fcfs-elastic-any" if any_type else "fcfs-elastic"

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        columns = view.columns
        types, devices = columns.type_of, columns.num_devices
        chosen = jobs.column.copy()
        free = view.capacity - columns.usage(chosen)
        open_ = np.isfinite(jobs.step_s)
        if not self.any_type:
            open_ &= types[None, :] == types[jobs.request][:, None]
        waiting = np.flatnonzero(chosen < 0)
        blocked = np.zeros(len(free), dtype=bool)
        for i in waiting:
            for c in self._smallest(jobs.step_s[i], open_[i], types, devices, free):
                k = types[c]
                if not blocked[k] and (
                    devices[c] <= free[k] or self._shrink(k, int(devices[c]), chosen, open_, view, free)
                ):
                    chosen[i] = c
                    free[k] -= devices[c]
                    break
            else:
                if self.any_type:
                    break
                blocked[types[jobs.request[i]]] = True
        self._grow(view, jobs, chosen, open_, free)
        return Decision(chosen)

    @staticmethod
    def _smallest(
        step_s: np.ndarray, open_: np.ndarray, types: np.ndarray, devices: np.ndarray, free: np.ndarray
    ) -> list[int]:
        """The smallest allocation of each type: those that fit first, fastest first."""
        least = [
            int(c[np.argmin(devices[c])]) for k in np.unique(types) if len(c := np.flatnonzero(open_ & (types == k)))
        ]
        return sorted(least, key=lambda c: (devices[c] > free[types[c]], step_s[c]))

    def _shrink(self, k: int, need: int, chosen: np.ndarray, open_: np.ndarray, view: View, free: np.ndarray) -> bool:
        """Shrink jobs of a type, newest first, until ``need`` devices are free; undo where that fails."""
        types, devices = view.columns.type_of, view.columns.num_devices
        before = chosen.copy()
        room = int(free[k])
        for j in range(len(chosen) - 1, -1, -1):
            while room < need and chosen[j] >= 0 and types[chosen[j]] == k:
                smaller = np.flatnonzero(open_[j] & (types == k) & (devices < devices[chosen[j]]))
                if not len(smaller):
                    break
                to = smaller[np.argmax(devices[smaller])]
                room += int(devices[chosen[j]] - devices[to])
                chosen[j] = to
        if room < need:
            chosen[:] = before
            return False
        free[k] = room
        return True

    def _grow(self, view: View, jobs: Jobs, chosen: np.ndarray, open_: np.ndarray, free: np.ndarray) -> None:
        types, devices = view.columns.type_of, view.columns.num_devices
        charge = float(jobs.restart_s.max()) * self.hysteresis
        changed = True
        while changed and (free > 0).any():
            changed = False
            for i in np.flatnonzero(chosen >= 0):
                c = chosen[i]
                room = free[types] + np.where(types == types[c], devices[c], 0)
                faster = open_[i] & (devices <= room) & (jobs.step_s[i] < jobs.step_s[i, c])
                options = np.flatnonzero(faster)
                if not len(options):
                    continue
                extra = np.maximum(devices[options] - devices[c], 0)
                speed_up = jobs.step_s[i, c] / jobs.step_s[i, options] - 1.0
                to = int(options[np.lexsort((-speed_up, extra))[0]])
                # Charged only when it runs where it ran before this event.
                saved = (jobs.step_s[i, c] - jobs.step_s[i, options].min()) * jobs.remaining_steps[i]
                if jobs.column[i] == c and saved <= charge:
                    continue
                free[types[c]] += devices[c]
                free[types[to]] -= devices[to]
                chosen[i] = to
                changed = True
