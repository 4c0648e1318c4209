"""What is reported of a simulation, defined once (``docs/scheduler.md`` repeats the definitions)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arena_jax.scheduler.simulator import FINISHED, REJECTED, RUNNING, WAITING, Result


def summary(result: Result) -> dict[str, Any]:
    """All metrics of one simulation, as JSON values; times in seconds, over finished jobs only."""
    workload = result.workload
    done = result.state == FINISHED
    jct = completion_times_s(result)[done]
    charge = result.start_charge_s
    isolated = workload.isolated_s + charge
    slowdown = jct / isolated[done]
    queue = jct - result.run_s[done]
    queue[np.abs(queue) < 1e-6] = 0.0  # what is left of adding up stretches
    rho = finish_time_fairness(result)[done]
    times, samples = throughput(result)
    began = float(workload.arrival_s.min()) if len(workload.jobs) else 0.0
    span = result.end_s - began
    decisions = 1.0 * result.decision_s
    return {
        "num_jobs": len(workload.jobs),
        "finished": int(done.sum()),
        "running": int((result.state == RUNNING).sum()),
        "waiting": int((result.state == WAITING).sum()),
        "rejected": int((result.state == REJECTED).sum()),
        "mean_jct_s": _of(np.mean, jct),
        "median_jct_s": _of(np.median, jct),
        "p99_jct_s": _of(lambda x: np.percentile(x, 99), jct),
        "max_jct_s": _of(np.max, jct),
        "mean_slowdown": _of(np.mean, slowdown),
        "worst_slowdown": _of(np.max, slowdown),
        "rho": _of(np.mean, rho),
        "worst_rho": _of(np.max, rho),
        "deadline_misses": deadline_misses(result),
        "makespan_s": span if done.all() else None,
        "mean_queue_s": _of(np.mean, queue),
        "device_hours": float(result.device_s.sum()) / 3600.0,
        "cost_dollars": cost_dollars(result),
        "restarts_per_job": _of(np.mean, result.num_restarts[result.state != 0]),
        "max_restarts": int(result.num_restarts.max(initial=0)),
        "samples_per_s": float(np.sum(np.diff(times) * samples[:-1]) / span) if span > 0 else 0.0,
        "peak_samples_per_s": float(samples.max(initial=0.0)),
        "num_decisions": len(decisions),
        "decision_s": {
            "mean": _of(np.mean, decisions),
            "p50": _of(np.median, decisions),
            "p99": _of(lambda x: np.percentile(x, 99), decisions),
            "max": _of(np.max, decisions),
        },
    }


def completion_times_s(result: Result) -> np.ndarray:
    """Completion time of each job; NaN where it did not finish."""
    return result.finish_s - result.counted_arrival_s


def deadline_misses(result: Result) -> int:
    """Jobs not finished by their deadline; an unfinished job misses once the deadline has passed."""
    misses = 0
    for j, job in enumerate(result.workload.jobs):
        if job.deadline_s is not None and result.state[j] != REJECTED:
            end = result.finish_s[j] if result.state[j] == FINISHED else math.inf
            misses += bool(end > job.deadline_s + 1e-6 and result.end_s >= job.deadline_s)
    return misses


def cost_dollars(result: Result) -> float | None:
    """Device-hours held times the catalogue's price; ``None`` where a type used has no price."""
    prices = result.workload.cluster.prices_per_hour()
    columns = result.workload.columns
    hours = np.zeros(len(prices))
    for segment in result.segments:
        held = columns.num_devices[segment.column]
        hours[columns.type_of[segment.column]] += held * (segment.end_s - segment.start_s) / 3600.0
    used = hours > 0
    return None if np.isnan(prices[used]).any() else float((hours[used] * prices[used]).sum())


def finish_time_fairness(result: Result) -> np.ndarray:
    """rho by job: completion time over the time on a 1/n share of the cluster.

    n is the job's time-averaged number of active jobs. Its share is 1/n of the devices of each type,
    and it runs on its fastest allocation within it. Where the share holds no allocation of the job, the
    allocation is had for the share's part of the time: its time grows by devices / share. One start
    charge on both sides. NaN where the job did not finish.
    """
    workload = result.workload
    columns = workload.columns
    if not len(workload.jobs):
        return np.empty(0)
    arrival, finish = workload.arrival_s, np.where(np.isnan(result.finish_s), result.end_s, result.finish_s)
    marks = np.unique(np.concatenate([arrival, finish]))
    active = np.searchsorted(np.sort(arrival), marks, side="right") - np.searchsorted(
        np.sort(finish), marks, side="right"
    )
    area = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(marks))])
    length = np.maximum(finish - arrival, 1e-9)
    n = np.maximum((np.interp(finish, marks, area) - np.interp(arrival, marks, area)) / length, 1.0)
    share = columns.capacity[columns.type_of][None, :] / n[:, None]
    stretch = np.maximum(1.0, columns.num_devices[None, :] / share)
    times = workload.num_steps[:, None] * workload.step_s
    within = np.where(stretch <= 1.0, times, np.inf).min(axis=1)
    alone = np.where(np.isfinite(within), within, (times * stretch).min(axis=1)) + result.start_charge_s
    return np.where(result.state == FINISHED, completion_times_s(result) / alone, np.nan)


def throughput(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Times and the cluster's samples/s from each on (productive time only; batch 1 where unknown)."""
    changes: list[tuple[float, float]] = []
    for s in result.segments:
        job = result.workload.jobs[s.job]
        rate = (job.global_batch or 1) / result.workload.step_s[s.job, s.column]
        begin = s.start_s + s.charge_s
        if s.end_s > begin:
            changes += [(begin, rate), (s.end_s, -rate)]
    if not changes:
        return np.zeros(1), np.zeros(1)
    changes.sort()
    times = np.array([at for at, _ in changes])
    return times, np.maximum(np.cumsum([change for _, change in changes]), 0.0)


def devices_in_use(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Times and devices held per type (times x types) from each on."""
    columns = result.workload.columns
    marks = np.unique([t for s in result.segments for t in (s.start_s, s.end_s)])
    change = np.zeros((len(marks), len(columns.types)))
    for s in result.segments:
        k, n = columns.type_of[s.column], columns.num_devices[s.column]
        change[np.searchsorted(marks, s.start_s), k] += n
        change[np.searchsorted(marks, s.end_s), k] -= n
    return marks, np.cumsum(change, axis=0)


def over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds; ``max_restarts``, ``worst_*`` and ``decision_s.max`` are the worst of any."""
    merged: dict[str, Any] = {}
    for key, first in summaries[0].items():
        values = [s[key] for s in summaries]
        if isinstance(first, Mapping):
            merged[key] = over_seeds(values)
        elif any(v is None for v in values):
            merged[key] = None
        elif key.startswith("worst_") or key in ("max_restarts", "max"):
            merged[key] = max(values)
        else:
            mean = float(np.mean(values))
            merged[key] = int(mean) if isinstance(first, int) and mean == int(mean) else mean
    return merged


def confidence(values: Sequence[float]) -> float:
    """Half-width of the 95 % t interval of the mean; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def _of(function: Any, values: np.ndarray) -> float | None:
    return float(function(values)) if len(values) else None
