"""Small clusters and workloads for the scheduler's tests."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arena_jax.grid import Allocation
from arena_jax.scheduler import (
    Cluster,
    JobSpec,
    Policy,
    ProfileSet,
    RestartCosts,
    Result,
    Settings,
    Simulator,
    TableProfile,
    Workload,
)

DATA = Path(os.environ.get("ARENA_JAX_DATA", Path(__file__).resolve().parents[2] / "../shared/data")).resolve()
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"data measured by others is not at {DATA.name}")

# Seconds a step of the usual test job on one to four devices: concave, so that sharing pays.
A100 = {"a100:1": 2.0, "a100:2": 1.25, "a100:4": 1.0}


def cluster(**nodes: tuple[int, int]) -> Cluster:
    """``cluster(a100=(1, 4))``: nodes and devices per node by type."""
    return Cluster.from_tables({"nodes": [{"type": t, "count": c, "devices": d} for t, (c, d) in nodes.items()]})


def profiles(**times: Mapping[str, float]) -> ProfileSet:
    """Profiles by model name, for every batch; allocations as text."""
    return ProfileSet(
        {
            (model, None): TableProfile({Allocation.parse(text): seconds for text, seconds in table.items()})
            for model, table in times.items()
        }
    )


def job(
    name: str, arrival_s: float = 0.0, num_steps: float = 100, num_devices: int | None = 4, **other: Any
) -> JobSpec:
    """A job of model ``m`` that asks for a100 devices."""
    values = {"model": "m", "device_type": "a100", "global_batch": 1, **other}
    return JobSpec(id=name, arrival_s=arrival_s, num_steps=num_steps, num_devices=num_devices, **values)


def workload(jobs: Sequence[JobSpec], on: Cluster | None = None, times: ProfileSet | None = None) -> Workload:
    """Jobs on one node of four a100 with the usual profile, unless said otherwise."""
    return Workload.build(jobs, on or cluster(a100=(1, 4)), times or profiles(m=A100))


def run(built: Workload, policy: Policy, *, restart_s: float = 10.0, **settings: Any) -> Result:
    """Simulate with a uniform restart charge of 10 s."""
    return Simulator(built, policy, Settings(costs=RestartCosts.uniform(restart_s), **settings)).run()


def finishes(result: Result) -> dict[str, float]:
    """Finish time by job id, to the millisecond."""
    return {j.id: round(float(t), 3) for j, t in zip(result.workload.jobs, result.finish_s, strict=True)}
