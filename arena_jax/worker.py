"""What the cluster service starts: a process that plans a job, or trains it.

A training is ``arena-jax train`` with its control socket, and three things more: it begins on the grid that it
is given, it keeps its runs in the job's folder, and on virtual device types its steps take at least as long as
the type's nominal speed says. It may be one of several processes that the environment describes.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.errors import ArenaError, InfeasibleError
from arena_jax.grid import Allocation, GridShape

if TYPE_CHECKING:
    from arena_jax.recipe import Recipe

# A job that does not save cannot be moved; one that says nothing of it saves so often.
_SAVES = 10


class Pace:
    """A callback that lets no step end sooner than a nominal time after the one before.

    Args:
        seconds: of a step, by number of devices; a number that is absent is not paced.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds = dict(seconds)
        self._step_s = 0.0
        self._last_s = time.perf_counter()

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "plan":
            self._step_s = self._seconds.get(GridShape.parse(event["grid"], None).num_devices, 0.0)
        now_s = time.perf_counter()
        if event["kind"] != "step":
            self._last_s = now_s  # other things than steps take the time they take
            return
        due_s = self._last_s + self._step_s
        if due_s > now_s:
            time.sleep(due_s - now_s)
        self._last_s = max(due_s, now_s)


def plan(task: Mapping[str, Any]) -> None:
    """Plan the job on every allocation, one device type after another, and write what was found."""
    from arena_jax.compiler.stored import StoredSearch
    from arena_jax.job import build
    from arena_jax.planner import constraints_of, plan_store
    from arena_jax.recipe import load_recipe
    from arena_jax.scheduler import Cluster
    from arena_jax.start import start_jax_to_plan
    from arena_jax.warm import end_with_parent

    end_with_parent(task["parent"])
    cluster = Cluster.from_tables(task["cluster"])
    allocations = [Allocation.parse(text, cluster.catalogue) for text in task["allocations"]]
    start_jax_to_plan()
    if task["kind"] == "closure":
        from arena_jax.closure import problem_of

        name, constraints = "fit", None
        problem, num_microbatches = problem_of(Path(task["recipe"]))
    else:
        recipe = load_recipe(task["recipe"])
        job = build(recipe)
        problem, name, constraints = job.problem(), job.name, constraints_of(recipe.plan)
        num_microbatches = recipe.plan.num_microbatches
    print(f"planning {name}: traced", flush=True)
    search = StoredSearch(problem, plan_store(), name=name, catalogue=cluster.catalogue)
    groups = [[a for a in allocations if a.device_type == kind] for kind in cluster.types]
    groups = [group for group in groups if group]
    if num_microbatches is None and search.coupled:
        groups = [allocations]  # one number of microbatches for all that the job may get
    found: dict[str, list[Any]] = {}
    reasons: list[str] = []
    for number, group in enumerate(groups):
        kinds = ", ".join(dict.fromkeys(a.device_type for a in group))
        print(f"planning {name} for {kinds}, {number + 1} of {len(groups)}", flush=True)
        try:
            index = search.plan(group, constraints=constraints, num_microbatches=num_microbatches)
        except InfeasibleError as error:
            reasons.append(error.message)
            continue
        for allocation in group:
            row = index.best(allocation)
            if row is not None:
                found[str(allocation)] = [row.step_time_s, row.grid.num_stages]
        reasons += [f"{row.grid}: {row.reason}" for row in index if row.reason]
    out = Path(task["out"])
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps({"index": found, "reasons": reasons}), encoding="utf-8")
    temporary.replace(out)


def train(task: Mapping[str, Any]) -> int:
    """Train the job until it ends or is stopped; returns the exit code of ``arena-jax train``."""
    from arena_jax.cli.train import train as run_training
    from arena_jax.recipe import load_recipe
    from arena_jax.runtime.rundir import has_finished
    from arena_jax.runtime.signals import StopSignals
    from arena_jax.start import start_jax

    pace = Pace({int(number): float(seconds) for number, seconds in task["pace_s"].items()})
    with StopSignals() as signals:
        if task["kind"] == "closure":
            from arena_jax.closure import run_closure

            start_jax(task["most_devices"])
            return run_closure(task, signals, pace)
        recipe = load_recipe(task["recipe"])
        if has_finished(Path(task["folder"]), recipe.steps):
            # Its process was lost between the last checkpoint and its exit; training anew is what `auto` would do.
            print(f"all {recipe.steps} steps are made already")
            return 0
        together = "ARENA_JAX_PROCESS_ID" in os.environ
        overrides = [
            f"plan.grid={task['grid']}",
            f"checkpoint.dir={json.dumps(task['folder'])}",
            f"hook.socket={'off' if together else 'auto'}",  # several processes change their grid with a new launch
        ]
        if not recipe.checkpoint.every:
            overrides.append(f"checkpoint.every={max(1, recipe.steps // _SAVES)}")
        if recipe.tracking.enabled:
            overrides.append(f"tracking.experiment={json.dumps(experiment_of(recipe.tracking.experiment, task))}")
        recipe = load_recipe(task["recipe"], overrides)
        if together:
            return _train_together(recipe, (task["recipe"], overrides), pace)
        start_jax(max(task["most_devices"], recipe.plan.stages or 1))
        code, _ = run_training(
            recipe,
            signals,
            steps=None,
            devices=None,
            plan=None,
            resume="auto",
            dry_run=False,
            as_json=False,
            given=(task["recipe"], overrides),
            callbacks=(pace,),
        )
        return code


def _train_together(recipe: "Recipe", given: tuple[str, list[str]], pace: Pace) -> int:
    from arena_jax.cli import train_processes
    from arena_jax.processes.launch import detect_launch

    launch = detect_launch()
    assert launch is not None
    code, _ = train_processes.train(
        recipe, launch, processes=None, steps=None, devices=None, plan=None, resume="auto", given=given, on_event=pace
    )
    return code


def experiment_of(own: str, task: Mapping[str, Any]) -> str:
    """MLflow's experiment: the recipe's own, or one per queue."""
    from arena_jax.events import EXPERIMENT

    return own if own != EXPERIMENT else f"{EXPERIMENT} {task['queue']}"


def main(path: str) -> None:
    """Do the task in a file, and exit as ``arena-jax`` would."""
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        code = 0
        if task["do"] == "plan":
            plan(task)
        else:
            code = train(task)
    except ArenaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    raise SystemExit(code)
