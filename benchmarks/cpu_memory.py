"""Steps on CPU devices that keep the memory they free, against steps that hand it back.

Processes of both kinds take turns, for memory is kept or not from a process's start on. Each runs data
parallelism of a tiny recipe on two devices with one microbatch and with eight.

    python -m benchmarks.cpu_memory [--recipe gpt_tiny]... [--turns 3]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np

from benchmarks._report import table, write

NAME = "cpu_memory"
RECIPES = ("gpt_tiny", "moe_tiny")
MICROBATCHES = (1, 8)
STEPS = 8


def one(recipe: str) -> dict[str, Any]:
    """Median step, processor time and page faults a step by number of microbatches; for a process of its own."""
    os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    warnings.simplefilter("ignore")
    from arena_jax.start import start_jax

    start_jax(2)
    import jax

    from arena_jax.compiler import analyse
    from arena_jax.compiler.analysis import Constraints
    from arena_jax.compiler.search import plan_problem
    from arena_jax.grid import Allocation, GridShape
    from arena_jax.runtime import compile_program
    from benchmarks._plan_space import problem_of

    problem, batch = problem_of(recipe)
    analysis = analyse(problem)
    pins = Constraints(stages=1, dp=2, tp=1, zero=0, remat="off")
    found = {}
    for number in MICROBATCHES:
        grid = GridShape(Allocation("cpu", 1, 2), 1)
        (row,) = plan_problem(problem, [grid], constraints=pins, num_microbatches=number, analysis=analysis)
        assert row.plan is not None
        program = compile_program(problem, row.plan)
        state = program.init()

        def step(state: Any, program: Any = program) -> Any:
            state, _ = program.step(state, batch)
            return jax.block_until_ready(state.stages) and state

        for _ in range(2):
            state = step(state)
        times, before = [], resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(STEPS):
            began = time.perf_counter()
            state = step(state)
            times.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found[str(number)] = {
            "step_s": float(np.median(times)),
            "cpu_s": used_s / STEPS,
            "page_faults": (after.ru_minflt - before.ru_minflt) / STEPS,
            "most_resident_bytes": after.ru_maxrss * 1024,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    results = []
    for recipe in args.recipe or RECIPES:
        runs: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
        for turn in range(args.turns + 1):
            for keep in ("0", "1") if turn % 2 else ("1", "0"):
                command = [sys.executable, "-m", "benchmarks.cpu_memory", "--one", recipe]
                environment = os.environ | {"ARENA_JAX_KEEP_MEMORY": keep}
                done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
                if turn:  # the first turn compiles
                    runs[keep].append(json.loads(done.stdout.splitlines()[-1]))
        for number in map(str, MICROBATCHES):
            row: dict[str, Any] = {"recipe": recipe, "microbatches": int(number)}
            for name, keep in (("handed_back", "0"), ("kept", "1")):
                row[name] = {k: float(np.median([r[number][k] for r in runs[keep]])) for k in runs[keep][0][number]}
            row["ratio"] = float(
                np.median(
                    [a[number]["step_s"] / b[number]["step_s"] for a, b in zip(runs["1"], runs["0"], strict=True)]
                )
            )
            results.append(row)
    head = ["recipe", "microbatches", "memory", "step ms", "cpu ms", "page faults", "most resident MB", "step ratio"]
    lines = table(
        head,
        [
            [
                *(row["recipe"], row["microbatches"], name.replace("_", " ")),
                *(f"{1e3 * row[name][k]:.0f}" for k in ("step_s", "cpu_s")),
                *(f"{row[name]['page_faults']:.0f}", f"{row[name]['most_resident_bytes'] / 1e6:.0f}"),
                f"{row['ratio']:.2f}" if name == "kept" else "",
            ]
            for row in results
            for name in ("handed_back", "kept")
        ],
    )
    write(NAME, title="Memory kept between the steps of CPU devices", lines=lines, data={"results": results})


if __name__ == "__main__":
    main()
