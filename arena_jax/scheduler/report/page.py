"""The report of a study: one HTML page that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.errors import counted
from arena_jax.page import svg
from arena_jax.page.document import document, folded, table, write_file
from arena_jax.scheduler.metrics import completion_times_s, confidence, devices_in_use, summary
from arena_jax.scheduler.simulator import FINISHED, Result

_TABLE = (
    ("mean_jct_s", "mean JCT s"),
    ("median_jct_s", "median s"),
    ("p99_jct_s", "p99 s"),
    ("max_jct_s", "max s"),
    ("mean_queue_s", "queue s"),
    ("makespan_s", "makespan s"),
    ("mean_slowdown", "slowdown"),
    ("worst_slowdown", "worst"),
    ("rho", "rho"),
    ("restarts_per_job", "restarts"),
    ("max_restarts", "most"),
    ("samples_per_s", "samples/s"),
    ("device_hours", "device-h"),
    ("cost_dollars", "dollars"),
    ("deadline_misses", "misses"),
    ("finished", "finished"),
    ("running", "running"),
    ("waiting", "waiting"),
    ("rejected", "rejected"),
)
# Columns that are left out where every value is the one given.
_QUIET = {"cost_dollars": None, "deadline_misses": 0, "running": 0, "waiting": 0, "rejected": 0}


def write_report(
    path: str | Path, results: Mapping[str, Sequence[Result]], *, title: str, bound_s: float | None
) -> None:
    """Write the page; ``results`` are by policy, one per seed. Charts show the first seed.

    The file appears whole or not at all. Raises :class:`UsageError` where it cannot be written.
    """
    text = render(results, title=title, bound_s=bound_s)
    write_file(path, text)


def render(results: Mapping[str, Sequence[Result]], *, title: str, bound_s: float | None) -> str:
    """The page as text."""
    colors = {name: svg.PALETTE[i % len(svg.PALETTE)] for i, name in enumerate(results)}
    first = {name: runs[0] for name, runs in results.items()}
    any_run = next(iter(first.values()))
    began = float(any_run.workload.arrival_s.min()) if len(any_run.workload.jobs) else 0.0
    num_seeds = max(len(runs) for runs in results.values())
    jobs = counted(len(any_run.workload.jobs), "job")
    intro = f"{jobs} on {counted(any_run.workload.cluster.num_devices, 'device')}."
    if bound_s is not None:
        intro += f" Lower bound on the mean completion time: {bound_s:,.0f} s."
    if num_seeds > 1:
        intro += f" Means over {num_seeds} seeds, ± the half-width of their 95 % interval; charts show the first seed."
    parts = [
        f"<h1>{escape(title)}</h1><p>{intro}</p>",
        "<h2>Metrics</h2>",
        _table({name: [summary(run) for run in runs] for name, runs in results.items()}),
        "<h2>Completion times</h2>",
        svg.lines(
            [_cdf(name, completion_times_s(run)[run.state == FINISHED], colors[name]) for name, run in first.items()],
            x_label="completion time",
            y_label="share of jobs",
            log_x=True,
        ),
        "<h2>Jobs waiting</h2>",
        svg.lines(
            [_queue(name, run, began, colors[name]) for name, run in first.items()],
            x_label="time since the first arrival",
            y_label="jobs without devices",
        ),
        "<h2>Utilisation</h2>",
        svg.lines(
            [_utilisation(name, run, began, colors[name]) for name, run in first.items()],
            x_label="time since the first arrival",
            y_label="share of devices held",
        ),
        "<h2>Decision time</h2>",
        svg.lines(
            [_cdf(name, run.decision_s, colors[name]) for name, run in first.items()],
            x_label="decision time, event in to placed allocation out",
            y_label="share of decisions",
            log_x=True,
        ),
        "<h2>Devices held, by type</h2>",
        *(folded(name, _allocation(run, began), i == 0) for i, (name, run) in enumerate(first.items())),
        "<h2>Jobs</h2><p>One line a job, by arrival; colour: type, paler: fewer devices, dark edges: restarts.</p>",
        *(folded(name, _jobs(run, began), i == 0) for i, (name, run) in enumerate(first.items())),
    ]
    return document(title, parts)


def _table(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    means: dict[str, dict[str, float | None]] = {}
    for name, runs in summaries.items():
        means[name] = {}
        for key, _ in _TABLE:
            values = [run[key] for run in runs]
            means[name][key] = None if any(v is None for v in values) else float(np.mean(values))
    everyone = [run for runs in summaries.values() for run in runs]
    quiet = {key for key, usual in _QUIET.items() if all(run[key] == usual for run in everyone)}
    if all(run["finished"] == run["num_jobs"] for run in everyone):
        quiet.add("finished")
    shown = [(key, title) for key, title in _TABLE if key not in quiet]
    best = {}
    for key in ("mean_jct_s", "p99_jct_s", "mean_slowdown", "worst_slowdown", "mean_queue_s", "makespan_s", "rho"):
        known = [v for row in means.values() if (v := row[key]) is not None]
        best[key] = min(known, default=None)
    rows = []
    for name, runs in summaries.items():
        cells = []
        for key, _ in shown:
            value = means[name][key]
            if value is None:
                cells.append("<td>-</td>")
                continue
            text = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
            half = confidence([run[key] for run in runs]) if len(runs) > 1 else 0.0
            spread = (
                f" <small>±{half:.2g}</small>" if 0 < half < 100 else f" <small>±{half:,.0f}</small>" if half else ""
            )
            mark = ' class="best"' if len(means) > 1 and value == best.get(key) else ""
            cells.append(f"<td{mark}>{text}{spread}</td>")
        rows.append([escape(name), *cells])
    return table(["policy", *(title for _, title in shown)], rows)


def _cdf(name: str, values: np.ndarray, color: str) -> svg.Series:
    ordered = np.sort(values)
    return svg.Series(name=name, x=ordered, y=np.arange(1, len(ordered) + 1) / max(len(ordered), 1), color=color)


def _queue(name: str, run: Result, began: float, color: str) -> svg.Series:
    """Jobs that have arrived, have not finished and hold no devices."""
    arrival = run.workload.arrival_s
    finish = np.where(np.isnan(run.finish_s), np.inf, run.finish_s)
    starts = np.sort([s.start_s for s in run.segments])
    ends = np.sort([s.end_s for s in run.segments])
    marks = np.unique(np.concatenate([arrival, starts, ends]))

    def at(times: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.sort(times), marks, side="right")

    waiting = at(arrival) - at(finish) - (at(starts) - at(ends))
    return svg.Series(name=name, x=marks - began, y=np.maximum(waiting, 0).astype(float), color=color)


def _utilisation(name: str, run: Result, began: float, color: str) -> svg.Series:
    marks, held = devices_in_use(run)
    share = held.sum(axis=1) / run.workload.columns.capacity.sum()
    return svg.Series(name=name, x=np.asarray(marks) - began, y=share, color=color)


def _allocation(run: Result, began: float) -> str:
    marks, held = devices_in_use(run)
    types = run.workload.columns.types
    return svg.stacked(
        np.asarray(marks) - began,
        {name: held[:, k] for k, name in enumerate(types)},
        _type_colors(types),
        x_label="time since the first arrival",
        y_label="devices",
    )


def _jobs(run: Result, began: float) -> str:
    columns = run.workload.columns
    colors = _type_colors(columns.types)
    largest = max(int(columns.num_devices.max(initial=1)), 2)
    bars = []
    for s in run.segments:
        allocation = columns.allocations[s.column]
        name = run.workload.jobs[s.job].id
        opacity = 0.35 + 0.65 * np.log2(allocation.num_devices + 1) / np.log2(largest + 1)
        span = f"from {svg.duration(s.start_s - began)} to {svg.duration(s.end_s - began)}"
        label = f"{name}: {allocation} {span} ({s.cause})"
        color = f"{colors[allocation.device_type]}{int(255 * min(opacity, 1.0)):02x}"
        bars.append(svg.Bar(row=s.job, start=s.start_s - began, end=s.end_s - began, color=color, label=label))
        if s.charge_s > 0 and s.cause != "start":
            end = s.start_s - began + s.charge_s
            bars.append(
                svg.Bar(row=s.job, start=s.start_s - began, end=end, color="#000000aa", label=f"{name}: {s.cause}")
            )
    chart = svg.gantt(bars, len(run.workload.jobs), x_label="time since the first arrival", y_label="jobs")
    return chart + svg.legend({name: colors[name] for name in columns.types})


def _type_colors(types: Sequence[str]) -> dict[str, str]:
    return {name: svg.PALETTE[k % len(svg.PALETTE)] for k, name in enumerate(types)}
