"""The process that compiles: it reads one task from stdin, and writes a line of JSON for each thing done.

Compilers print, take memory and may abort, none of which is to reach the command that asked.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    """Read ``{recipe, overrides, devices, versions, folder, plans}``; write ``{program}`` and ``{plan}`` lines.

    An ``{error, hint}`` line is the last one.
    """
    task = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    from arena_jax.errors import ArenaError

    try:
        compile_task(task, answer)
    except ArenaError as error:
        answer({"error": error.message, "hint": error.hint, "of": 0})


def compile_task(task: dict[str, Any], answer: Answer) -> None:
    """Compile a task's plans, and answer for each."""
    from arena_jax.compiler.trace import trace_loss
    from arena_jax.deviceless.programs import DevicelessCompiler, Done
    from arena_jax.deviceless.store import ProgramStore
    from arena_jax.grid import DeviceType, Plan
    from arena_jax.job import build
    from arena_jax.recipe import load_recipe

    problem = build(load_recipe(task["recipe"], task["overrides"])).problem()
    whole = trace_loss(problem, 1)
    for number, text in task["plans"]:
        plan = Plan.from_json(text)

        def progress(done: Done, number: int = number) -> None:
            program = {"name": done.name, "fingerprint": done.fingerprint, "known": done.known}
            answer({"program": program | {"compile_s": done.compiled.compile_s}, "of": number})

        compiler = DevicelessCompiler(
            problem=problem,
            whole=whole,
            device=DeviceType(**task["devices"][plan.grid.allocation.device_type]),
            versions=task["versions"],
            store=ProgramStore(Path(task["folder"])),
            progress=progress,
        )
        answer({"plan": [stage.to_json() for stage in compiler.compile(plan)], "of": number})


if __name__ == "__main__":
    main()
