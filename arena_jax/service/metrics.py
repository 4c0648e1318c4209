"""Prometheus metrics as text."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from arena_jax.service.job import Phase
from arena_jax.service.store import Store

if TYPE_CHECKING:
    from arena_jax.service.service import Options

Sample = tuple[Mapping[str, str], float]


def metrics_text(store: Store, options: "Options") -> str:
    """Jobs by phase and queue, devices by type, and progress of every job that has not ended."""
    jobs = store.jobs(ended=0)
    counts = store.counts()
    held: dict[str, int] = {}
    by_queue: dict[tuple[str, str], int] = {}
    for job in jobs:
        key = (job.spec.queue, str(job.phase))
        by_queue[key] = by_queue.get(key, 0) + 1
        if job.held is not None:
            kind = job.held.allocation.device_type
            held[kind] = held.get(kind, 0) + sum(len(numbers) for _, numbers in job.held.devices)
    running = [(job, {"job": job.id, "queue": job.spec.queue}) for job in jobs if job.live]
    groups = options.cluster.groups
    parts = [
        _family("jobs", "gauge", "Jobs by state.", [({"state": str(p)}, counts.get(str(p), 0)) for p in Phase]),
        _family(
            "queue_jobs",
            "gauge",
            "Jobs that have not ended, by queue and state.",
            [({"queue": q, "state": p}, n) for (q, p), n in sorted(by_queue.items())],
        ),
        _family(
            "devices", "gauge", "Devices of the cluster.", [({"type": g.device_type}, g.num_devices) for g in groups]
        ),
        _family(
            "devices_held",
            "gauge",
            "Devices held by jobs.",
            [({"type": g.device_type}, held.get(g.device_type, 0)) for g in groups],
        ),
        _family("job_step", "gauge", "Completed steps.", [(labels, job.step) for job, labels in running]),
        _family("job_steps", "gauge", "Steps in all.", [(labels, job.spec.steps) for job, labels in running]),
        _family(
            "job_loss", "gauge", "Latest loss.", [(labels, job.loss) for job, labels in running if job.loss is not None]
        ),
        _family(
            "job_step_seconds",
            "gauge",
            "Seconds of a step.",
            [(labels, job.step_time_s) for job, labels in running if job.step_time_s is not None],
        ),
        _family(
            "job_changes", "gauge", "Changes of allocation.", [(labels, job.num_changes) for job, labels in running]
        ),
        _family(
            "events_total", "counter", "Events by kind.", [({"kind": k}, n) for k, n in store.event_counts().items()]
        ),
    ]
    return "".join(parts)


def _family(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP arena_jax_{name} {help_text}", f"# TYPE arena_jax_{name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"arena_jax_{name}{{{inside}}} {float(value):.10g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
