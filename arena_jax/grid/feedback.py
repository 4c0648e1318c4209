"""What training runs teach about estimates: one factor per part of an estimate.

An estimate is a sum of a few parts (compute, communication, boundaries between stages, updates). Of a
device type, the factors ``b`` on these parts minimise

    sum over runs of (1 - sum_k b_k part_k / measured)^2 + sum_k (b_k - 1)^2,

ridge regression that shrinks to 1: a part that one run consists of wholly gets half of that run's
error, ``n`` such runs teach ``n / (n + 1)`` of it, and a part that is a small share of every run stays
near 1. So few numbers are learnt from few runs, and one bad run does little.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Runs that took more than this times their estimate, or less than its inverse, measured something else.
_FAR = 2.0
# A factor is believed within these bounds.
_LEAST, _MOST = 0.5, 2.0
# Factors are kept in steps of this, so that a run that teaches nothing new leaves plans as they are.
_STEP = 0.02


class Run(NamedTuple):
    """Seconds of an estimate by cause, without what was learnt before, and the measured step."""

    parts: Mapping[str, float]
    measured_s: float


def learn(runs: Sequence[Run]) -> dict[str, float]:
    """Cause -> factor, those that are 1 left out."""
    import numpy as np  # who only lists and validates need not wait for it

    near = [run for run in runs if 1 / _FAR <= run.measured_s / max(sum(run.parts.values()), 1e-30) <= _FAR]
    causes = sorted({cause for run in near for cause in run.parts})
    if not causes:
        return {}
    shares = np.array([[run.parts.get(cause, 0.0) / run.measured_s for cause in causes] for run in near])
    missing = 1 - shares.sum(axis=1)
    change = np.linalg.solve(shares.T @ shares + np.eye(len(causes)), shares.T @ missing)
    factors = np.clip(1 + np.round(change / _STEP) * _STEP, _LEAST, _MOST)
    return {cause: round(float(b), 6) for cause, b in zip(causes, factors, strict=True) if abs(b - 1) > _STEP / 2}
