"""First come, first served: rigid, and elastic.

Rigid: arrival order, requested type and count. A job that does not fit blocks later jobs, of the
same type only (``blocking="type"``), of every type (``"all"``), or none (``"none"``: backfill).
Source: common practice; ``"type"`` is what the Arena artifact's simulator does.
"""

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.policy import Decision, Jobs, Stateless, View


class Fcfs(Stateless):
    """Rigid first come, first served; running jobs are never touched."""

    def __init__(self, *, blocking: str = "type") -> None:
        if blocking not in ("type", "all", "none"):
            raise UsageError(f"fcfs: blocking must be type, all or none, got {blocking!r}")
        self.blocking = blocking
        self.name = "fcfs" if blocking == "type" else f"fcfs-{blocking}"

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        columns = view.columns
        chosen = jobs.column.copy()
        free = view.capacity - columns.usage(chosen)
        blocked = np.zeros(len(free), dtype=bool)
        for i in np.flatnonzero(chosen < 0):
            c = jobs.request[i]
            k = columns.type_of[c]
            if not blocked[k] and columns.num_devices[c] <= free[k]:
                chosen[i] = c
                free[k] -= columns.num_devices[c]
            elif self.blocking == "type":
                blocked[k] = True
            elif self.blocking == "all":
                break
        return Decision(chosen)
