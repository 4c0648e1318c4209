"""Decision latency of the arena policy: event in to placed allocation out, one thread.

A steady state of N active jobs on a cluster is built up, then jobs arrive and end one by one at that level.
Job models, batches and sizes are drawn from the artifact's Helios trace. Wall time and the process's CPU time of
every decision are recorded: on a shared machine the CPU time is the policy's own.

    python -m benchmarks.scheduler_latency [--write]
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from arena_jax.scheduler import Cluster, JobSpec, Settings, Simulator, Workload, load_trace
from arena_jax.scheduler.policies import Arena
from arena_jax.scheduler.tables import artifact_cluster, load_artifact
from benchmarks._machine import describe
from benchmarks.policies import DATA, RESULTS

# Devices, active jobs, arrivals, and the seconds between them that keep the number of active jobs level.
SIZES = ((1_280, 1_000, 1000, 12.0), (10_240, 10_000, 150, 1.5))


class Timed(Simulator):
    """A simulator that also keeps the CPU time of each decision."""

    cpu_s: list[float]

    def _decide(self) -> None:
        began = time.process_time()
        super()._decide()
        self.cpu_s.append(time.process_time() - began)


def steady(cluster: Cluster, num_active: int, num_events: int, every_s: float, seed: int = 0) -> Workload:
    """``num_active`` jobs at once, then one arrival every ``every_s``."""
    profiles = load_artifact(DATA / "arena_artifact/measured_iteration_seconds.csv", cluster)
    trace = [job for job in load_trace(DATA / "arena_artifact/traces/helios_venus.csv") if isinstance(job, JobSpec)]
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(trace), size=num_active + num_events)
    arrival = np.concatenate([np.zeros(num_active), every_s * (1.0 + np.arange(num_events))])
    jobs = [replace(trace[d], id=f"J{i}", arrival_s=float(arrival[i])) for i, d in enumerate(drawn)]
    return Workload.build(jobs, cluster, profiles)


def measure(num_devices: int, num_active: int, num_events: int, every_s: float) -> dict[str, Any]:
    cluster = artifact_cluster(scale=num_devices / 1280)
    workload = steady(cluster, num_active, num_events, every_s)
    simulator = Timed(workload, Arena(), Settings())
    simulator.cpu_s = []
    active: list[int] = []
    while simulator.now < num_events * every_s and simulator.step():
        active.append(int(np.isin(simulator.state, (1, 2)).sum()))
    # The first decision places all jobs at once and is reported apart.
    wall, cpu = simulator.result().decision_s, np.array(simulator.cpu_s)

    def spread(values: np.ndarray) -> dict[str, float]:
        names = ("mean", "p50", "p99", "p99.9", "max")
        return dict(
            zip(names, 1e3 * np.array([values.mean(), *np.percentile(values, [50, 99, 99.9, 100])]), strict=True)
        )

    return {
        "num_devices": cluster.num_devices,
        "mean_active_jobs": float(np.mean(active)),
        "num_decisions": len(wall) - 1,
        "first_ms": {"wall": 1e3 * float(wall[0]), "cpu": 1e3 * float(cpu[0])},
        "wall_ms": spread(wall[1:]),
        "cpu_ms": spread(cpu[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/scheduler_latency.{md,json}")
    parser.add_argument("--size", type=int, choices=range(len(SIZES)), help="only one of the sizes")
    args = parser.parse_args()
    chosen = SIZES if args.size is None else SIZES[args.size : args.size + 1]
    rows = [measure(*size) for size in chosen]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.write:
        lines = [
            "# Decision latency of the arena policy",
            "",
            f"{describe()}, one thread; other work ran on the machine, so CPU time is given beside wall time.",
            "Made by `python -m benchmarks.scheduler_latency --write`. Milliseconds, event in to placed allocation.",
            "",
            "| devices | active jobs | decisions | time | mean | p50 | p99 | p99.9 | max | first (all jobs at once) |",
            "|" + " --- |" * 10,
        ]
        for row in rows:
            for kind in ("cpu", "wall"):
                cells = [f"{value:.1f}" for value in row[f"{kind}_ms"].values()]
                lines.append(
                    f"| {row['num_devices']:,} | {row['mean_active_jobs']:,.0f} | {row['num_decisions']} | {kind} | "
                    f"{' | '.join(cells)} | {row['first_ms'][kind]:.0f} |"
                )
        (RESULTS / "scheduler_latency.md").write_text("\n".join(lines) + "\n")
        (RESULTS / "scheduler_latency.json").write_text(
            json.dumps({"machine": describe(), "sizes": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
