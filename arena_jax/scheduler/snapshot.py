"""Snapshots of a simulation as JSON values, and replays of what a simulation did."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from arena_jax.errors import UsageError
from arena_jax.scheduler.jobs import Workload
from arena_jax.scheduler.placement import Placed
from arena_jax.scheduler.policy import Decision, Jobs, Policy, Stateless, View
from arena_jax.scheduler.simulator import Segment, Settings, Simulator

_FORMAT = 1
# Arrays by job that make up the state of a simulation.
_ARRAYS = (
    "state",
    "remaining",
    "column",
    "pace",
    "since",
    "charge_until",
    "updated",
    "started",
    "failed",
    "num_runs",
    "num_restarts",
    "run_s",
    "device_s",
    "finish",
    "first_start",
    "due",
    "cause",
)


def snapshot(simulator: Simulator) -> dict[str, Any]:
    """The simulation between two steps, as JSON values (with ``NaN`` and ``Infinity``)."""
    placer = simulator.placer
    return {
        "format": _FORMAT,
        "policy": simulator.policy.name,
        "policy_state": dict(simulator.policy.get_state()),
        "jobs": [job.id for job in simulator.workload.jobs],
        "arrays": {name: getattr(simulator, name).tolist() for name in _ARRAYS},
        "estimate": simulator.estimate.tolist(),
        "clock": simulator.clock(),
        "segments": [list(astuple(segment)) for segment in simulator.segments],
        "held": [[job, *astuple(placed)] for job, placed in placer.held.items()],
        "up": [up.tolist() for up in placer.up],
    }


def restore(workload: Workload, policy: Policy, settings: Settings, data: Mapping[str, Any]) -> Simulator:
    """Go on from a snapshot of the same workload and policy; the continuation is that of the original."""
    if data.get("format") != _FORMAT:
        raise UsageError(f"snapshot has format {data.get('format')!r}, this release reads {_FORMAT}")
    if data["policy"] != policy.name:
        raise UsageError(f"the snapshot is of policy {data['policy']!r}, not {policy.name!r}")
    if data["jobs"] != [job.id for job in workload.jobs]:
        raise UsageError("the snapshot is of another workload: the job ids differ")
    simulator = Simulator(workload, policy, settings)
    policy.set_state(data["policy_state"])
    for name in _ARRAYS:
        array = getattr(simulator, name)
        array[:] = np.array(data["arrays"][name], dtype=array.dtype)
    simulator.estimate[:] = np.array(data["estimate"]).reshape(simulator.estimate.shape)
    simulator.set_clock(data["clock"])
    simulator.segments[:] = [
        Segment(job, start, end, column, tuple(nodes), cause, charge)
        for job, start, end, column, nodes, cause, charge in data["segments"]
    ]
    for k, up in enumerate(data["up"]):
        simulator.placer.up[k][:] = up
    for job, k, nodes, per_node in data["held"]:
        simulator.placer.take(job, Placed(k, tuple(nodes), per_node))
    return simulator


class Replay(Stateless):
    """Does again what a simulation did, from its segments: to look at it, or to charge it differently."""

    name = "replay"

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._by_job: dict[int, list[Segment]] = {}
        for segment in sorted(segments, key=lambda s: s.start_s):
            self._by_job.setdefault(segment.job, []).append(segment)
        self._starts = np.unique([segment.start_s for segment in segments])

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        chosen = np.full(len(jobs), -1, dtype=np.int64)
        for i, key in enumerate(jobs.key.tolist()):
            for segment in self._by_job.get(key, ()):
                if segment.start_s <= now + 1e-6 and now < segment.end_s - 1e-6:
                    chosen[i] = segment.column
        after = self._starts[self._starts > now + 1e-6]
        return Decision(chosen, float(after[0]) if len(after) else None)
