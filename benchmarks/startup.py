"""How long the commands take that must feel instant: ``--help``, ``ls`` and ``validate``.

Each runs in a new process, from the start of Python to its end. None of them may import jax or mlflow,
which is checked here too.

    python -m benchmarks.startup [--repeats 7]
"""

import argparse
import subprocess
import sys
import time

import numpy as np

from benchmarks._report import table, write

LIMIT_S = 0.5
COMMANDS = (["--help"], ["ls"], ["validate", "gpt_tiny"])
FORBIDDEN = ("jax", "mlflow")


def run_s(command: list[str]) -> float:
    """Seconds of one process, from start to exit.

    Raises:
        CalledProcessError: it failed.
    """
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "arena_jax", *command], check=True, capture_output=True)
    return time.perf_counter() - began


def imported(command: list[str]) -> list[str]:
    """Those of :data:`FORBIDDEN` that a command imports."""
    call = [sys.executable, "-X", "importtime", "-m", "arena_jax", *command]
    lines = subprocess.run(call, check=True, capture_output=True, text=True).stderr.splitlines()
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    return [name for name in FORBIDDEN if name in modules]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    rows, data = [], {}
    bare = [time_python_s() for _ in range(args.repeats)]
    for command in COMMANDS:
        run_s(command)  # byte-compiles, and fills the file cache
        times = [run_s(command) for _ in range(args.repeats)]
        median, heavy = float(np.median(times)), imported(command)
        name = f"arena-jax {' '.join(command)}"
        data[name] = {"median_s": median, "times_s": times, "limit_s": LIMIT_S, "imports": heavy}
        verdict = "yes" if median < LIMIT_S and not heavy else "NO"
        rows.append(
            [
                f"`{name}`",
                f"{median:.2f}",
                f"{min(times):.2f}",
                f"{max(times):.2f}",
                ", ".join(heavy) or "none",
                verdict,
            ]
        )
    lines = [
        (
            f"Wall time of a whole process, median of {args.repeats}; the limit is {LIMIT_S} s. "
            f"Python alone (`-c pass`) took {np.median(bare):.3f} s."
        ),
        "",
        *table(["command", "median s", "min", "max", "imports of jax, mlflow", "within"], rows),
    ]
    if args.write:
        write("startup", title="Start-up", lines=lines, data={"python_s": float(np.median(bare)), "commands": data})
    else:
        print("\n".join(lines))


def time_python_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
