"""The long matrix: every plan of the tiny recipes against one device (``make verify``).

Resumable: results are appended, one JSON object a line, to ``.verify/same_numbers.jsonl``; cases that
are there are not run again. ``python -m tests.verify --table`` writes the committed table.
Each precision runs in a process of its own, for jax fixes 64-bit mode at start.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cheap_xla import XLA_FLAGS

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".verify" / "same_numbers.jsonl"
TABLE = ROOT / "benchmarks" / "results" / "same_numbers"
PRECISIONS = ("float64", "float32", "bfloat16")


def limits(precision: str) -> dict[str, float]:
    """Largest relative differences allowed, by what is compared."""
    if precision == "float64":
        return {"losses": 1e-9, "parameters": 1e-9}
    if precision == "float32":
        return {"first_loss": 1e-5, "first_gradient": 1e-5, "losses": 1e-4}
    return {"losses": 1e-2}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, help="run this one in this process")
    parser.add_argument("--only", default="", help="run cases whose key contains this")
    parser.add_argument("--table", action="store_true", help="write the table of what has run so far")
    options = parser.parse_args(argv)
    if options.table:
        return write_table()
    if options.precision:
        return run_precision(options.precision, options.only)
    for precision in PRECISIONS:
        command = [sys.executable, "-m", "tests.verify", "--precision", precision, "--only", options.only]
        code = subprocess.run(command, env=environment(precision), cwd=ROOT, check=False).returncode
        if code:
            return code
    return write_table()


def environment(precision: str) -> dict[str, str]:
    return os.environ | {
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1" if precision == "float64" else "0",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS),
        "ARENA_JAX_HOME": os.environ.get("ARENA_JAX_HOME", str(ROOT / ".verify" / "home")),
    }


def run_precision(precision: str, only: str) -> int:
    """Run the cases of one precision that have no result yet; stop at nothing."""
    import jax

    from tests.same_numbers.cases import full_matrix, variation_cases
    from tests.same_numbers.run import run

    cases = full_matrix(precision)
    if precision == "float64":
        cases = [*variation_cases(), *cases]
    elif precision == "float32":
        # Batch statistics and ReLU amplify rounding, so only the first step is comparable there.
        cases = [case for case in cases if case.model != "wide_resnet"]
    done = {row["key"] for row in read_log()}
    todo = [case for case in cases if case.key not in done and only in case.key]
    # In an order that mixes models and grids, so that a run cut short has seen some of everything.
    todo.sort(key=lambda case: hashlib.blake2b(case.key.encode()).digest())
    LOG.parent.mkdir(exist_ok=True)
    for number, case in enumerate(todo, 1):
        start = time.perf_counter()
        row: dict[str, Any] = {"key": case.key, "precision": precision, "model": case.model, "jax": jax.__version__}
        try:
            difference = run(case)
            row |= {
                name: getattr(difference, name)
                for name in ("losses", "first_loss", "first_gradient", "parameters", "worst_parameter")
            }
            row["ok"] = all(row[name] <= limit for name, limit in limits(precision).items())
        except Exception as error:  # a plan that fails is a result
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        row["seconds"] = round(time.perf_counter() - start, 1)
        with LOG.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(todo)} {'ok  ' if row['ok'] else 'FAIL'} {case.key} {row['seconds']} s", flush=True)
        jax.clear_caches()
    return 0


def read_log() -> list[dict[str, Any]]:
    """Results so far; the last one of a case counts."""
    if not LOG.is_file():
        return []
    rows = {}
    for line in LOG.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        rows[row["key"]] = row
    return list(rows.values())


def write_table() -> int:
    rows = read_log()
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    failed = [row for row in rows if not row["ok"]]
    lines = [
        "# Same numbers under every plan",
        "",
        f"{len(rows)} plans, {len(failed)} failed. {machine}. `make verify` runs them;",
        "differences are relative to one device (10 steps; parameters by each leaf's norm, at least 1).",
        "",
        "| plan | losses | first loss | first gradient | parameters | ok |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: r["key"]):
        numbers = [
            f"{row[n]:.1e}" if n in row else "-" for n in ("losses", "first_loss", "first_gradient", "parameters")
        ]
        lines.append(f"| {row['key']} | {' | '.join(numbers)} | {'yes' if row['ok'] else row.get('error', 'no')} |")
    TABLE.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    TABLE.with_suffix(".json").write_text(
        json.dumps(sorted(rows, key=lambda r: r["key"]), indent=0) + "\n", encoding="utf-8"
    )
    print(f"{len(rows)} plans, {len(failed)} failed: {TABLE.with_suffix('.md').relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
