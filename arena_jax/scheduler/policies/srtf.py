"""Shortest remaining time first, preemptive, at the requested configuration."""

import numpy as np

from arena_jax.scheduler.policies._rigid import fit_in_order
from arena_jax.scheduler.policy import Decision, Jobs, Stateless, View


class Srtf(Stateless):
    """Least remaining time at the request first; what does not fit is skipped. Uses remaining steps."""

    name = "srtf"

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        remaining = jobs.remaining_steps * jobs.step_s[np.arange(len(jobs)), jobs.request]
        return Decision(fit_in_order(np.argsort(remaining, kind="stable"), view, jobs))
