"""What an allocation is worth to a job: the objective of the ``arena`` policy.

The value of job i on column c, in units of (weighted) jobs progressing at full speed::

    v[i, c] = w_i x (fastest remaining time / remaining time on c) x h / (h + charge of going there)

The first ratio is the job's speed as a share of its best. ``h = min(remaining time on c, patience)``
is how long a change has to pay for itself, so that a charge is weighed against what it buys.
"""

from dataclasses import dataclass

import numpy as np

from arena_jax.scheduler.costs import FAILURE, GROW, MOVE, RESUME, SHRINK, START
from arena_jax.scheduler.policy import Jobs, View


@dataclass(frozen=True, kw_only=True)
class ValueRules:
    """Constants of the objective.

    Attributes:
        shortness: exponent a of the weight (remaining time)^-a: short jobs first, 0 for no preference.
        long_s, long_weight, long_power: a job whose projected completion time (age + fastest remaining
            time) reaches ``long_s`` weighs 1 + ``long_weight`` times as much, below it less as the
            power: it keeps fast the longest jobs, which make the 99th percentile.
        last_weight, last_power: that extra grows by up to 1 + ``last_weight``, as the power of the job's
            fastest remaining time over the longest of any job, or over the time the cluster needs for
            all its work where that is longer: who ends last then decides when all is done, and with it
            the cluster's samples per second.
        patience_s: seconds a change has to pay for itself.
        caution: growth of the charge as seen by the policy, per restart a job has had.
        most_restarts: a job that had as many is changed no more, except to its fastest allocation.
        min_run_s: a job is left alone for so long after a start or change.
        starve_s: waiting counts from this many seconds plus ``starve_factor`` times the job's fastest
            time on; from there the weight grows by 1 per such span: the starvation bound.
        urgent: factor on the weight of a job whose deadline leaves little slack.
    """

    shortness: float = 0.5
    long_s: float = 4e4
    long_weight: float = 2.0
    long_power: float = 6.0
    last_weight: float = 2.0
    last_power: float = 8.0
    patience_s: float = 400.0
    caution: float = 0.05
    most_restarts: int = 28
    min_run_s: float = 0.0
    starve_s: float = 600.0
    starve_factor: float = 1.5
    urgent: float = 20.0


def values(view: View, jobs: Jobs, now: float, rules: ValueRules, allowed: np.ndarray | None = None) -> np.ndarray:
    """The value matrix, jobs x columns; -inf where infeasible, not ``allowed``, or the job is to be left alone."""
    remaining = jobs.remaining_s
    if allowed is not None:
        remaining = np.where(allowed, remaining, np.inf)
    fastest = _least(remaining)
    charge = charges(view, jobs, now)
    charge *= 1.0 + rules.caution * jobs.num_restarts[:, None]
    running = np.flatnonzero(jobs.column >= 0)
    held = jobs.column[running]
    charge[running, held] = np.maximum(0.0, jobs.charge_until_s[running] - now)
    horizon = np.minimum(remaining, rules.patience_s)
    charge += horizon
    np.divide(horizon, charge, out=horizon)  # the part of the horizon that is not charge
    # Seconds until the cluster has done all work there is, at the least device-seconds of each job.
    work = _least(remaining * view.columns.num_devices)
    drain = float(work[np.isfinite(work)].sum()) / max(int(view.capacity.sum()), 1)
    weight = weights(jobs, now, fastest, drain, rules)
    with np.errstate(invalid="ignore"):
        value = (weight * fastest)[:, None] / remaining
        value *= horizon
    np.putmask(value, ~np.isfinite(remaining), -np.inf)
    hold = now - jobs.since_s[running] < rules.min_run_s
    tired = jobs.num_restarts[running] >= rules.most_restarts
    # What may still change is narrowed here; nothing is taken from these jobs either (see settled).
    for rows, columns, also_fastest in ((running[hold], held[hold], False), (running[tired], held[tired], True)):
        if len(rows):
            best = remaining[rows].argmin(axis=1)
            kept, top = value[rows, columns].copy(), value[rows, best].copy()
            value[rows] = -np.inf
            if also_fastest:
                value[rows, best] = top
            value[rows, columns] = kept
    # A job that loses its column to a rule (a failed node's type, a narrowed objective) may always stay.
    stranded = running[~np.isfinite(value[running, held])]
    value[stranded, jobs.column[stranded]] = 0.0
    return value


def _least(times: np.ndarray) -> np.ndarray:
    """Least of each row; for rows this short faster than ``min(axis=1)``."""
    return np.take_along_axis(times, times.argmin(axis=1)[:, None], axis=1)[:, 0]  # type: ignore[no-any-return]


def settled(jobs: Jobs, now: float, rules: ValueRules) -> np.ndarray:
    """Jobs from which nothing may be taken: in their minimum run, or changed too often already."""
    young = now - jobs.since_s < rules.min_run_s
    return (jobs.column >= 0) & (young | (jobs.num_restarts >= rules.most_restarts))


def charges(view: View, jobs: Jobs, now: float) -> np.ndarray:
    """Seconds charged if each job went to each column, by cause; the present column is not special here."""
    del now
    cost, types, devices = jobs.restart_s, view.columns.type_of, view.columns.num_devices
    idle = np.where(jobs.started, cost[RESUME], cost[START])
    if np.ptp(cost[[RESUME, START, GROW, SHRINK, MOVE, FAILURE]]) == 0:
        return np.full((len(jobs), len(devices)), cost[START])
    at = np.maximum(jobs.column, 0)
    same_type = types[at][:, None] == types[None, :]
    more = devices[None, :] > devices[at][:, None]
    change = np.where(same_type, np.where(more, cost[GROW], cost[SHRINK]), cost[MOVE])
    return np.where((jobs.column >= 0)[:, None], change, idle[:, None])


def weights(jobs: Jobs, now: float, fastest: np.ndarray, drain: float, rules: ValueRules) -> np.ndarray:
    """Weight of each job: user's weight, shortness, length, ending last, waiting and deadline."""
    seconds = np.minimum(np.where(np.isfinite(fastest), fastest, 1e9), 1e9) + jobs.restart_s[START]
    weight = jobs.weight * (seconds / 1000.0) ** -rules.shortness
    projected = now - jobs.arrival_s + seconds
    long = rules.long_weight * np.minimum(1.0, projected / rules.long_s) ** rules.long_power
    last = max(float(seconds[np.isfinite(fastest)].max(initial=1.0)), drain)
    long *= 1.0 + rules.last_weight * np.minimum(1.0, seconds / last) ** rules.last_power
    weight *= 1.0 + long
    waiting = np.where(jobs.column < 0, now - jobs.arrival_s - jobs.run_s, 0.0)
    span = rules.starve_s + rules.starve_factor * seconds
    weight *= 1.0 + np.maximum(0.0, waiting / span - 1.0)
    if np.isfinite(jobs.deadline_s).any():
        slack = jobs.deadline_s - now - seconds
        tight = (slack >= 0) & (slack < 0.5 * seconds + 300.0)
        weight = np.where(tight, weight * rules.urgent, weight)
    return weight
