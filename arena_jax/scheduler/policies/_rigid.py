"""Gangs at their requested configuration, in an order of priority."""

import numpy as np

from arena_jax.scheduler.policy import Jobs, View


def fit_in_order(order: np.ndarray, view: View, jobs: Jobs) -> np.ndarray:
    """Columns when jobs take their request in ``order``, skipping those that do not fit any more."""
    types, devices = view.columns.type_of, view.columns.num_devices
    free = view.capacity.copy()
    chosen = np.full(len(jobs), -1, dtype=np.int64)
    for i in order:
        c = jobs.request[i]
        if devices[c] <= free[types[c]]:
            chosen[i] = c
            free[types[c]] -= devices[c]
    return chosen
