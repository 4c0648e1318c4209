"""Step times as a policy sees them: the plan index, corrected by what was measured while jobs ran."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arena_jax.errors import UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster


@dataclass(frozen=True, kw_only=True)
class IndexedStep:
    """The best plan of one allocation: predicted seconds of a step, and its stages."""

    step_time_s: float
    num_stages: int = 1


Index = Mapping[Allocation, IndexedStep]
"""What a plan index says of a job, by allocation; what is absent has no plan."""


def index_to_json(index: Index) -> dict[str, Any]:
    """As JSON values."""
    return {str(a): [step.step_time_s, step.num_stages] for a, step in index.items()}


def index_from_json(data: Mapping[str, Any]) -> dict[Allocation, IndexedStep]:
    """Read what :func:`index_to_json` wrote."""
    return {
        Allocation.parse(text, None): IndexedStep(step_time_s=step_time_s, num_stages=num_stages)
        for text, (step_time_s, num_stages) in data.items()
    }


def corrected(index: Index, measured: Mapping[Allocation, float]) -> dict[Allocation, float]:
    """Seconds of a step by allocation.

    A measured time stands for itself. Where a type was measured on some allocations only, its other
    estimates are scaled by the geometric mean of measured over estimated there.
    """
    ratios: dict[str, list[float]] = {}
    for allocation, seconds in measured.items():
        if allocation in index:
            ratios.setdefault(allocation.device_type, []).append(math.log(seconds / index[allocation].step_time_s))
    scale = {name: math.exp(math.fsum(logs) / len(logs)) for name, logs in ratios.items()}
    return {
        allocation: measured.get(allocation, step.step_time_s * scale.get(allocation.device_type, 1.0))
        for allocation, step in index.items()
    }


def candidate_allocations(
    cluster: Cluster, *, least: int = 1, most: int | None = None, types: tuple[str, ...] = ()
) -> list[Allocation]:
    """The allocations worth planning for a job: powers of two on as few nodes as possible, and whole nodes.

    Raises:
        UsageError: the cluster has none within these bounds.
    """
    names = {cluster.catalogue.canonical(name) for name in types} or set(cluster.types)
    for name in names - set(cluster.types):
        cluster.group(name)  # raises, naming what there is
    found: dict[Allocation, None] = {}
    for group in cluster.groups:
        if group.device_type not in names:
            continue
        counts = {1 << k for k in range(group.num_devices.bit_length())}
        counts |= {n * group.devices_per_node for n in range(1, group.num_nodes + 1)}
        for count in sorted(counts):
            if least <= count <= (most or count):
                allocation = cluster.packed(group.device_type, count)
                if allocation is not None:
                    found[allocation] = None
    if not found:
        bounds = f"{least} to {most}" if most is not None else f"at least {least}"
        raise UsageError(
            f"the cluster has no allocation of {bounds} devices of {', '.join(sorted(names))}",
            hint=", ".join(f"{g.device_type}: {g.num_devices} devices" for g in cluster.groups),
        )
    return list(found)
