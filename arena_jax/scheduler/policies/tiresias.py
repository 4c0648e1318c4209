"""Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019).

Attained service is devices x time run. Queues are cut at service thresholds; lower service preempts
higher, first come first served within a queue. A job that has waited ``promote`` times as long as it
has run goes back to the top queue, its service counted anew. Rigid gangs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arena_jax.scheduler.policies._rigid import fit_in_order
from arena_jax.scheduler.policy import Decision, Jobs, View

THRESHOLDS = (3250.0, 7200.0, 18000.0)


class Tiresias:
    """Does not use remaining steps. Wakes when a running job crosses a threshold."""

    name = "tiresias"

    def __init__(self, *, thresholds: tuple[float, ...] = THRESHOLDS, promote: float = 8.0) -> None:
        self.thresholds, self.promote = np.array(thresholds), promote
        self.reset()

    def reset(self) -> None:
        self._forgiven: dict[int, float] = {}  # service at promotion, by job
        self._last: dict[int, tuple[float, float]] = {}  # (seconds run when it stopped, when that was)

    def get_state(self) -> Mapping[str, Any]:
        return {"forgiven": list(self._forgiven.items()), "last": [[k, *v] for k, v in self._last.items()]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._forgiven = {int(k): v for k, v in state["forgiven"]}
        self._last = {int(k): (run, at) for k, run, at in state["last"]}

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        service = jobs.device_s.copy()
        for i, key in enumerate(jobs.key.tolist()):
            if jobs.column[i] >= 0:
                self._last[key] = (0.0, now)
            elif jobs.started[i]:
                since = self._last.get(key, (0.0, now))[1]
                if self.promote and now - since >= self.promote * jobs.run_s[i]:
                    self._forgiven[key] = float(jobs.device_s[i])
            service[i] -= self._forgiven.get(key, 0.0)
        queue = np.searchsorted(self.thresholds, service + 1e-6, side="right")
        chosen = fit_in_order(np.lexsort((jobs.arrival_s, queue)), view, jobs)
        return Decision(chosen, self._wake(view, jobs, now, chosen, service, queue))

    def _wake(
        self, view: View, jobs: Jobs, now: float, chosen: np.ndarray, service: np.ndarray, queue: np.ndarray
    ) -> float | None:
        if (chosen >= 0).all():
            return None
        bounds = np.append(self.thresholds, np.inf)
        runs = np.flatnonzero(chosen >= 0)
        left = (bounds[queue[runs]] - service[runs]) / view.columns.num_devices[chosen[runs]]
        times = list(now + left[np.isfinite(left)])
        for i in np.flatnonzero((chosen < 0) & jobs.started):
            since = self._last.get(int(jobs.key[i]), (0.0, now))[1]
            due = since + self.promote * jobs.run_s[i]
            if self.promote and due > now and queue[i] > 0:
                times.append(due)
        return min(times) + 1e-3 if times else None
