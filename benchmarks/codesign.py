"""What choosing plans and allocations together is worth: the arena policy with parts of the knowledge taken away.

(a) static  - estimates of one fixed plan: the step time at the requested allocation, rescaled by devices and by the
              datasheet rate of the type; the clock charges the best plan all the same
(b) own     - each grid's best plan, on the job's own device type only
(c) rigid   - best plans of all types, no change after the start
(d) all     - everything

At 1x and 10x arrivals with 40 s a change, and at 10x with the charges that `benchmarks/hot_swap.py` measured.

    python -m benchmarks.codesign [--seeds 5]
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.scheduler import RestartCosts, Scenario, Simulator, Workload, load_trace, summary
from arena_jax.scheduler.policies import Arena
from arena_jax.scheduler.tables import artifact_cluster, load_artifact
from benchmarks._report import table, write
from benchmarks.policies import DATA, RESULTS, ROOT, once

VARIANTS = ("static", "own", "rigid", "all")
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


def measured_costs(path: Path = RESULTS / "hot_swap.json") -> tuple[RestartCosts, str]:
    """Charges as `benchmarks/hot_swap.py` measured them, and what they are in words.

    Shrinking is a swap inside the process: the stall and what the first step took beyond the others, median of
    all changes. Everything else ends a process and starts one: checkpoint and restart.
    """
    tasks = json.loads(path.read_text())["tasks"]
    swap = float(np.median([swap["stall_and_first_step_s"] for task in tasks.values() for swap in task["swaps"]]))
    relaunch = float(np.median([task["restart_s"] for task in tasks.values()]))
    costs = replace(RestartCosts.uniform(round(relaunch, 2)), shrink=round(swap, 2))
    return costs, f"{costs.shrink} s to shrink, {costs.start} s for all else, as measured ({', '.join(tasks)})"


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
    measured, in_words = measured_costs()
    cases = [(scale, RestartCosts(), "40 s a change") for scale in SCALES] + [(10, measured, in_words)]
    data: dict[str, Any] = {"cases": []}
    lines = [
        f"Made by `python -m benchmarks.codesign`: arena on `helios_venus`, {args.seeds} seeds, to completion.",
        "The clock charges each allocation's best plan; the variants differ in what the policy knows or may do",
        "(see the script). Ratios to *all*, means over seeds; samples/s over the whole run.",
    ]
    for scale, costs, words in cases:
        found: dict[str, list[dict[str, Any]]] = {}
        for variant in VARIANTS:
            for seed in range(args.seeds):
                scenario = Scenario(jobs=jobs, cluster=cluster, profiles=profiles, costs=costs,
                                    arrival_scale=float(scale), seed=seed)  # type: ignore[arg-type]  # fmt: skip
                charge = "" if costs == RestartCosts() else f".{costs.shrink}-{costs.start}"
                path = cache / f"{scale}x.{variant}.{seed}{charge}.json"
                once(path, lambda s=scenario, v=variant: run(s, v))
                found.setdefault(variant, []).append(json.loads(path.read_text()))
        data["cases"].append({"arrival_scale": scale, "charge_s": asdict(costs), "variants": found})
        lines += ["", f"## Arrivals at {scale}x, {words}", "", *variants(found)]
    write("codesign", title="What co-design is worth", lines=lines, data=data)


def variants(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table of one case."""
    head = ["variant", "mean JCT s", "ratio", "queue s", "samples/s", "ratio", "peak samples/s", "ratio", "p99 JCT s",
            "restarts"]  # fmt: skip
    keys = ("mean_jct_s", "mean_queue_s", "samples_per_s", "peak_samples_per_s", "p99_jct_s", "restarts_per_job")
    mean = {v: {k: float(np.mean([r[k] for r in runs])) for k in keys} for v, runs in found.items()}
    rows = []
    for variant, row in mean.items():
        cells = [variant]
        for key in keys:
            cells.append(f"{row[key]:,.1f}" if key == "restarts_per_job" else f"{row[key]:,.0f}")
            if key in ("mean_jct_s", "samples_per_s", "peak_samples_per_s"):
                cells.append(f"{row[key] / mean['all'][key]:.3f}")
        rows.append(cells)
    return table(head, rows)


if __name__ == "__main__":
    main()
