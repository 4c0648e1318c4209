"""The long checks of changes of plan (``make verify``): numbers of the tiny recipes, and 500 sequences.

Each check is a process of its own, for jax fixes 64-bit mode at start. Results are written when all have
run; ``--only PATTERN`` runs some and keeps the rest.

    python -m tests.swap_verify [--only gpt]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.verify import ROOT, environment

RESULTS = ROOT / "benchmarks" / "results" / "swap_numbers"
NUM_SEQUENCES = 500
LIMITS = {"float64": ("losses", 1e-9), "float32": ("restored", 1e-4)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.swap_verify", description=__doc__)
    parser.add_argument("--only", default="", help="run checks whose name contains this")
    parser.add_argument("--one", help="run this one in this process")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(run_one(options.one)))
        return 0
    rows = {row["name"]: row for row in read_rows()}
    models = ("gpt", "bert", "moe", "wide_resnet")
    for name in [*(f"{model} {precision}" for precision in LIMITS for model in models), "fuzz"]:
        if options.only not in name:
            continue
        began_s = time.perf_counter()
        precision = "float64" if "float64" in name else "float32"
        done = subprocess.run(
            [sys.executable, "-m", "tests.swap_verify", "--one", name],
            env=environment(precision),
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        try:
            row = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            print(done.stderr, file=sys.stderr)
            row = {"ok": False, "error": (lines or ["it died"])[-1]}
        rows[name] = {"name": name, **row, "seconds": round(time.perf_counter() - began_s, 1)}
        print(json.dumps(rows[name]), flush=True)
        write(list(rows.values()))
    return 0 if rows and all(row["ok"] for row in rows.values()) else 1


def run_one(name: str) -> dict[str, Any]:
    if name == "fuzz":
        from hypothesis import settings
        from hypothesis.stateful import run_state_machine_as_test

        from tests.swap_machine import SwapMachine

        run_state_machine_as_test(
            SwapMachine, settings=settings(max_examples=NUM_SEQUENCES, stateful_step_count=25, deadline=None)
        )
        return {"ok": True, "sequences": NUM_SEQUENCES}
    from tests.swap_numbers import check

    model, _, precision = name.rpartition(" ")
    found = check(model, precision, seed=0)
    what, limit = LIMITS[precision]
    return {
        "ok": found.exact and getattr(found, what) <= limit,
        "losses": found.losses,
        "restored": found.restored,
        "exact": found.exact,
        "swaps": found.swaps,
    }


def read_rows() -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(RESULTS.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError):
        return []
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        "# Changes of plan change no numbers",
        "",
        f"{machine}. `python -m tests.swap_verify`: 24 steps, 10 changes of plan at random steps to random grids, each",
        "on another grid; dropout in gpt, bert and moe, running statistics in wide_resnet. `losses` is the largest",
        "relative difference from a run without changes; `restored` that of the three losses after each change from",
        "a run restored from the same state; `exact`: gathered before and after each move, every leaf bit for bit.",
        "",
        "| run | losses | restored | exact | ok | through |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["name"] == "fuzz":
            continue
        numbers = [f"{row[key]:.1e}" if key in row else "-" for key in ("losses", "restored")]
        through = " ".join(row.get("swaps", ())) or row.get("error", "")
        exact = "yes" if row.get("exact") else "no"
        lines.append(
            f"| {row['name']} | {' | '.join(numbers)} | {exact} | {'yes' if row['ok'] else 'no'} | {through} |"
        )
    for row in rows:
        if row["name"] == "fuzz":
            said = "every invariant held" if row["ok"] else row.get("error", "failed")
            lines += ["", f"{row.get('sequences', 0)} random sequences of requests, pauses and failures: {said}."]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    raise SystemExit(main())
