"""The service's page: what runs where, how it got there, and how good the estimates were."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from arena_jax.errors import counted
from arena_jax.grid import Allocation
from arena_jax.page import svg
from arena_jax.page.document import document, folded, table
from arena_jax.service.estimates import index_from_json
from arena_jax.service.job import Job
from arena_jax.service.store import Store

if TYPE_CHECKING:
    from arena_jax.service.service import Options

REFRESH_S = 5
_MOST_ENDED, _MOST_CURVES, _MOST_DECISIONS = 40, 12, 25
# Events that put a job on an allocation, and that take it off.
ON = frozenset({"start", "resume", "grow", "shrink", "move", "migrate"})
OFF = frozenset({"pause", "left", "finish", "fail", "cancelled", "crash"})


def render(store: Store, options: "Options", now: float | None = None) -> str:
    """The page as text, from the store alone."""
    now = time.time() if now is None else now
    jobs = store.jobs(ended=_MOST_ENDED)
    events = store.events(last=5000)
    cluster = options.cluster
    types = {name: svg.PALETTE[k % len(svg.PALETTE)] for k, name in enumerate(cluster.types)}
    intro = f"{counted(cluster.num_devices, 'device')} under the policy {escape(options.policy)}."
    if options.label:
        intro += f" <b>{escape(options.label)}</b>"
    parts = [
        f"<h1>Cluster service</h1><p>{intro}</p>",
        "<h2>Jobs</h2>",
        _jobs(jobs, now),
        "<h2>Allocations</h2>",
        _timeline(jobs, events, types, now),
        "<h2>Devices held</h2>",
        _held(events, jobs, types, now),
        "<h2>Loss and step time</h2>",
        *_curves(store, jobs),
        "<h2>Estimated and measured</h2>",
        _estimates(store, jobs),
        "<h2>Changes</h2>",
        _changes(events, now),
        "<h2>Decisions</h2>",
        _decisions(events, now),
    ]
    return document("arena-jax cluster service", parts, refresh_s=REFRESH_S)


def _jobs(jobs: Sequence[Job], now: float) -> str:
    if not jobs:
        return "<p>none yet</p>"
    head = ("job", "queue", "state", "on", "wanted", "step", "loss", "step time", "age", "why")
    rows = []
    for job in sorted(jobs, key=lambda job: (job.finished_at > 0, job.number)):
        row = job.row()
        age = (job.finished_at or now) - job.submitted_at
        rows.append(
            [
                escape(job.id),
                escape(job.spec.queue),
                escape(str(job.phase)),
                row["allocation"] or "-",
                row["wanted"] or "-",
                f"{job.step} / {job.spec.steps}",
                "-" if job.loss is None else f"{job.loss:.4g}",
                "-" if job.step_time_s is None else svg.duration(job.step_time_s),
                svg.duration(age),
                f'<td class="left">{escape(job.reason[:120])}</td>',
            ]
        )
    return table(head, rows)


def stretches(events: Sequence[Mapping[str, Any]], now: float) -> list[tuple[str, str, float, float, str]]:
    """(job, allocation, from, to, kind of the event that began it): who held what, when."""
    open_: dict[str, tuple[str, float, str]] = {}
    found = []
    for event in events:
        job, kind = event["job"], event["kind"]
        if kind not in ON | OFF:
            continue
        if job in open_:
            allocation, began, how = open_.pop(job)
            found.append((job, allocation, began, float(event["time"]), how))
        if kind in ON and event.get("to"):
            open_[job] = (event["to"], float(event["time"]), kind)
    found += [(job, allocation, began, now, how) for job, (allocation, began, how) in open_.items()]
    return found


def _timeline(jobs: Sequence[Job], events: Sequence[Mapping[str, Any]], types: Mapping[str, str], now: float) -> str:
    rows = {job.id: number for number, job in enumerate(jobs)}
    found = [part for part in stretches(events, now) if part[0] in rows]
    if not found:
        return "<p>nothing has run yet</p>"
    begin = min(part[2] for part in found)
    bars = []
    for job, text, start, end, kind in found:
        allocation = Allocation.parse(text, None)
        label = f"{job}: {text} from {svg.duration(start - begin)} to {svg.duration(end - begin)} ({kind})"
        color = types.get(allocation.device_type, "#7a7a7a") + f"{min(255, 110 + 24 * allocation.num_devices):02x}"
        bars.append(
            svg.Bar(row=rows[job], start=start - begin, end=end - begin, color=color, label=label, text=f"{job} {text}")
        )
    chart = svg.gantt(bars, len(rows), x_label="time since the first start", y_label="jobs", row_height=22.0)
    return chart + svg.legend(types)


def _held(events: Sequence[Mapping[str, Any]], jobs: Sequence[Job], types: Mapping[str, str], now: float) -> str:
    found = stretches(events, now)
    if not found:
        return "<p>nothing has run yet</p>"
    begin = min(part[2] for part in found)
    marks = sorted({time for part in found for time in (part[2], part[3])})
    x = np.array(marks)
    parts = {name: np.zeros(len(marks)) for name in types}
    for _, text, start, end, _ in found:
        allocation = Allocation.parse(text, None)
        if allocation.device_type in parts:
            parts[allocation.device_type][(x >= start) & (x < end)] += allocation.num_devices
    return svg.stacked(x - begin, parts, types, x_label="time since the first start", y_label="devices")


def _curves(store: Store, jobs: Sequence[Job]) -> list[str]:
    shown = [job for job in jobs if job.started and not job.spec.rigid][-_MOST_CURVES:]
    if not shown:
        return ["<p>no step yet</p>"]
    losses, times = [], []
    for number, job in enumerate(shown):
        points = [p for p in store.points(job.number) if p[2] is not None]
        color = svg.PALETTE[number % len(svg.PALETTE)]
        steps = np.array([p[0] for p in points], dtype=float)
        losses.append(svg.Series(name=job.id, x=steps, y=np.array([p[2] for p in points], dtype=float), color=color))
        seconds = np.array([p[3] or 0.0 for p in points], dtype=float)
        times.append(svg.Series(name=job.id, x=steps, y=seconds, color=color))
    return [
        svg.lines(_finite(losses), x_label="step", y_label="loss", step=False),
        svg.lines(_finite(times), x_label="step", y_label="seconds of a step", step=False),
    ]


def _finite(series: Sequence[svg.Series]) -> list[svg.Series]:
    return [svg.Series(name=s.name, x=s.x[np.isfinite(s.y)], y=s.y[np.isfinite(s.y)], color=s.color) for s in series]


def _estimates(store: Store, jobs: Sequence[Job]) -> str:
    rows = []
    for key in dict.fromkeys(job.plan_key for job in jobs if job.plan_key and not job.spec.rigid):
        kept, measured = store.index(key), store.measured(key)
        if kept is None:
            continue
        names = ", ".join(job.id for job in jobs if job.plan_key == key)
        for allocation, step in index_from_json(kept).items():
            seconds = measured.get(str(allocation))
            if seconds is not None:
                rows.append(
                    [
                        escape(names),
                        str(allocation),
                        svg.duration(step.step_time_s),
                        svg.duration(seconds),
                        f"{step.step_time_s / seconds:.2f}",
                    ]
                )
    if not rows:
        return "<p>nothing is measured yet</p>"
    return table(("jobs", "on", "estimated step", "measured", "estimated / measured"), rows)


def _changes(events: Sequence[Mapping[str, Any]], now: float) -> str:
    rows = [
        [
            f"{svg.duration(now - event['time'])} ago",
            escape(event["job"]),
            event["kind"],
            event.get("from") or "-",
            event.get("to") or "-",
            f'<td class="left">{escape(str(event.get("how") or event.get("why") or ""))[:150]}</td>',
        ]
        for event in reversed(events)
        if event["kind"] in (ON | OFF | {"hang", "kill", "refused"}) - {"left"}
    ][: 2 * _MOST_DECISIONS]
    return table(("when", "job", "what", "from", "to", "how"), rows) if rows else "<p>none yet</p>"


def _decisions(events: Sequence[Mapping[str, Any]], now: float) -> str:
    decisions = [event for event in events if event["kind"] == "decision"][-_MOST_DECISIONS:]
    if not decisions:
        return "<p>none yet</p>"
    parts = []
    for event in reversed(decisions):
        rows = []
        for change in event["changes"]:
            gain = change["gain_s"]
            considered = ", ".join(f"{name} {svg.duration(seconds)}" for name, seconds in change["considered"])
            rows.append(
                [
                    escape(change["job"]),
                    change["cause"],
                    change["from"] or "-",
                    change["to"] or "-",
                    "-" if gain is None else svg.duration(gain),
                    svg.duration(change["charge_s"]),
                    f'<td class="left">{escape(considered)}</td>',
                ]
            )
        title = f"{svg.duration(now - event['time'])} ago: {'; '.join(event['trigger'])}"
        title += f" ({counted(len(rows), 'change')}, {event['took_s'] * 1e3:.0f} ms)"
        head = ("job", "cause", "from", "to", "gain", "charge", "considered, with the time it would still take")
        parts.append(folded(title, table(head, rows), event is decisions[-1]))
    return "".join(parts)
