"""Giving raw logs models and device types, from a seed.

For each logged job, uniformly: a device type (where the log names none that the cluster has) and a
(model, batch) among the profiles feasible there at the requested count. The count is the logged one,
capped at ``max_devices`` and rounded up to the next count that any profile knows; where no profile is
feasible at it, the next larger that one is. Steps = duration / step time at that request, so that a
job run as it was logged takes as long as it did.
"""

from collections.abc import Sequence

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.cluster import Cluster
from arena_jax.scheduler.jobs import JobSpec
from arena_jax.scheduler.profiles import ProfileSet
from arena_jax.scheduler.traces.raw import RawJob


def draw_models(
    raw: Sequence[RawJob], profiles: ProfileSet, cluster: Cluster, seed: int, *, max_devices: int = 16
) -> list[JobSpec]:
    """Jobs with models, batches, types and steps drawn from ``seed``."""
    rng = np.random.default_rng([seed, 5])
    offers: dict[tuple[str, int], list[tuple[str, int | None, float]]] = {}
    for model, batch in sorted(profiles.pairs(), key=str):
        profile = profiles.profile(model, batch)
        best: dict[tuple[str, int], float] = {}
        for allocation in profile.allocations():
            seconds = profile.step_time_s(allocation)
            shape = (allocation.device_type, allocation.num_devices)
            if allocation.device_type in cluster.types and seconds is not None:
                group = cluster.group(allocation.device_type)
                if allocation.num_nodes <= group.num_nodes and allocation.devices_per_node <= group.devices_per_node:
                    best[shape] = min(seconds, best.get(shape, np.inf))
        for shape, seconds in best.items():
            offers.setdefault(shape, []).append((model, batch, seconds))
    counts = sorted({count for _, count in offers if count <= max_devices})
    if not counts:
        raise UsageError(
            "no profile is feasible on this cluster", hint="check the device types of cluster and profiles"
        )
    jobs = []
    for job in raw:
        wanted = min(job.num_devices, max_devices, counts[-1])
        count = next(c for c in counts if c >= wanted)
        types = sorted({name for name, c in offers if c == count})
        named = _canonical(job.device_type, cluster)
        device_type = named if named in types else types[int(rng.integers(len(types)))]
        choices = offers[device_type, count]
        model, batch, seconds = choices[int(rng.integers(len(choices)))]
        jobs.append(
            JobSpec(
                id=job.id,
                arrival_s=job.arrival_s,
                num_steps=max(1, round(job.duration_s / seconds)),
                model=model,
                global_batch=batch,
                device_type=device_type,
                num_devices=count,
            )
        )
    return jobs


def _canonical(name: str | None, cluster: Cluster) -> str | None:
    if name is None:
        return None
    try:
        return cluster.catalogue.canonical(name.lower())
    except UsageError:
        return None
