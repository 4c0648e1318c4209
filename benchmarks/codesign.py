"""What choosing plans and allocations together is worth: the arena policy with parts of the knowledge taken away.

(a) static  - estimates of one fixed plan: the step time at the requested allocation, rescaled by devices and by the
              datasheet rate of the type; the clock charges the best plan all the same
(b) own     - each grid's best plan, on the job's own device type only
(c) rigid   - best plans of all types, no change after the start
(d) all     - everything

    python -m benchmarks.codesign [--seeds 5]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.scheduler import Scenario, Simulator, Workload, load_trace, summary
from arena_jax.scheduler.policies import Arena
from arena_jax.scheduler.tables import artifact_cluster, load_artifact
from benchmarks._machine import describe
from benchmarks.policies import DATA, RESULTS, ROOT, once

VARIANTS = ("static", "own", "rigid", "all")
METRICS = ("mean_jct_s", "mean_queue_s", "samples_per_s", "peak_samples_per_s")
SCALES = (1, 10)


def static_estimates(workload: Workload) -> np.ndarray:
    """Believed over true step time when one plan's time is rescaled by devices and datasheet rate."""
    columns = workload.columns
    # float16 where the type has it, as most of the models train in it; the ratio between types is what counts.
    rate = np.array([workload.cluster.catalogue[name].peak("float16") for name in columns.types])[columns.type_of]
    power = rate * columns.num_devices
    rows = np.arange(len(workload.jobs))
    believed = workload.step_s[rows, workload.request][:, None] * power[workload.request][:, None] / power[None, :]
    return np.where(np.isfinite(workload.step_s), believed / workload.step_s, 1.0)


def run(scenario: Scenario, variant: str) -> dict[str, Any]:
    workload = scenario.workload()
    if variant == "own":
        jobs = [replace(job, allowed_types=(job.device_type,)) for job in workload.jobs if job.device_type]
        workload = Workload.build(jobs, scenario.cluster, scenario.profiles)
    settings = scenario.settings(workload, 0.0)
    if variant == "static":
        settings = replace(settings, estimates=static_estimates(workload))
    return summary(Simulator(workload, Arena(resize=variant != "rigid"), settings).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cache", default=str(ROOT / "build/benchmarks/codesign"))
    args = parser.parse_args()
    cache = Path(args.cache)
    cache.mkdir(parents=True, exist_ok=True)
    cluster = artifact_cluster()
    profiles = load_artifact(DATA / "arena_artifact/measured_iteration_seconds.csv", cluster)
    jobs = tuple(load_trace(DATA / "arena_artifact/traces/helios_venus.csv"))
    data: dict[str, Any] = {"machine": describe(), "restart_s": 40, "scales": {}}
    lines = [
        "# What co-design is worth",
        "",
        f"{describe()}. Made by `python -m benchmarks.codesign`: arena on `helios_venus`, {args.seeds} seeds,",
        "to completion, 40 s a change. The clock charges each allocation's best plan; the variants differ in what",
        "the policy knows or may do (see the script). Ratios to *all*, means over seeds; samples/s over the whole run.",
    ]
    for scale in SCALES:
        found: dict[str, list[dict[str, Any]]] = {}
        for variant in VARIANTS:
            for seed in range(args.seeds):
                scenario = Scenario(
                    jobs=jobs, cluster=cluster, profiles=profiles, arrival_scale=float(scale), seed=seed
                )  # type: ignore[arg-type]
                path = cache / f"{scale}x.{variant}.{seed}.json"
                once(path, lambda s=scenario, v=variant: run(s, v))
                found.setdefault(variant, []).append(json.loads(path.read_text()))
        data["scales"][scale] = found
        lines += ["", f"## Arrivals at {scale}x", ""]
        head = [
            "variant",
            "mean JCT s",
            "ratio",
            "queue s",
            "samples/s",
            "ratio",
            "peak samples/s",
            "ratio",
            "p99 JCT s",
            "restarts",
        ]
        lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        mean = {
            v: {k: float(np.mean([r[k] for r in runs])) for k in (*METRICS, "p99_jct_s", "restarts_per_job")}
            for v, runs in found.items()
        }
        whole = mean["all"]
        for variant, row in mean.items():
            cells = [
                variant,
                f"{row['mean_jct_s']:,.0f}",
                f"{row['mean_jct_s'] / whole['mean_jct_s']:.2f}",
                f"{row['mean_queue_s']:,.0f}",
                f"{row['samples_per_s']:,.0f}",
                f"{row['samples_per_s'] / whole['samples_per_s']:.2f}",
                f"{row['peak_samples_per_s']:,.0f}",
                f"{row['peak_samples_per_s'] / whole['peak_samples_per_s']:.2f}",
                f"{row['p99_jct_s']:,.0f}",
                f"{row['restarts_per_job']:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "codesign.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "codesign.json").write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
