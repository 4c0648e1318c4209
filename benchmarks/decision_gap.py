"""How far the arena policy's single decisions are from an exact program of the same objective, at 64 devices.

Every decision of a simulation (60 jobs of six models on four types, as in ``tests/scheduler/test_arena.py``)
is solved again by HiGHS as an integer program over the same values.

    python -m benchmarks.decision_gap [--seeds 4]
"""

import argparse
import json

import numpy as np

from arena_jax.scheduler import Settings, Simulator, summary
from benchmarks._machine import describe
from benchmarks.policies import RESULTS
from tests.scheduler.test_arena import Compared, sixty_four


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    rows = []
    lines = [
        "# Single decisions against the exact program, 64 devices",
        "",
        f"{describe()}. Made by `python -m benchmarks.decision_gap`. Gap: 1 - summed value / optimum, in per cent.",
        "",
        "| seed | decisions | mean | p95 | max | over 2 % | mean JCT s | restarts a job |",
        "|" + " --- |" * 8,
    ]
    for seed in range(args.seeds):
        policy = Compared()
        metrics = summary(Simulator(sixty_four(seed), policy, Settings()).run())
        gaps = np.array(policy.gaps)
        row = {
            "seed": seed,
            "gaps": gaps.tolist(),
            "mean_jct_s": metrics["mean_jct_s"],
            "restarts_per_job": metrics["restarts_per_job"],
        }
        rows.append(row)
        cells = [f"{100 * v:.2f}" for v in (gaps.mean(), np.percentile(gaps, 95), gaps.max())]
        cells += [f"{int((gaps > 0.02).sum())}", f"{row['mean_jct_s']:,.0f}", f"{row['restarts_per_job']:.1f}"]
        lines.append("| " + " | ".join([str(seed), str(len(gaps)), *cells]) + " |")
        print(lines[-1], flush=True)
    (RESULTS / "decision_gap.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "decision_gap.json").write_text(json.dumps({"machine": describe(), "seeds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
