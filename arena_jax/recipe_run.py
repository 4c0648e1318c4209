"""What a run of a recipe is made of: planner, target, directory, tracker and hook. Imports jax when asked to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.errors import UsageError
from arena_jax.grid import Allocation, GridShape, SchedulerHook, parse_target

if TYPE_CHECKING:
    from arena_jax.job import Job
    from arena_jax.planner import Planner
    from arena_jax.recipe import Recipe
    from arena_jax.relaunch import Note
    from arena_jax.runtime.rundir import Resume, RunDirectory
    from arena_jax.tracking import MLflowTracker


def make_planner(job: "Job", devices: Sequence[Any] | None = None) -> "Planner":
    """The planner of a job on all devices, or on those given, with the recipe's pins."""
    from arena_jax.planner import Planner, constraints_of, plan_store

    problem = job.problem()
    recipe = job.recipe
    return Planner(
        problem,
        devices=devices,
        constraints=constraints_of(recipe.plan),
        num_microbatches=recipe.plan.num_microbatches,
        nonfinite=recipe.nonfinite,
        store=plan_store(),
        name=job.name,
    )


def target_of(recipe: "Recipe", planner: "Planner", devices: int | None) -> GridShape | Allocation:
    """The grid or allocation to run on: pinned, or as many devices as asked for, or all.

    Raises:
        UsageError: more devices than there are, or another number than the recipe's grid has.
    """
    from arena_jax.planner import allocation_of

    if recipe.plan.grid is not None:
        target = parse_target(recipe.plan.grid)
        if devices is not None and target.num_devices != devices:
            raise UsageError(
                f"--devices {devices} against plan.grid={recipe.plan.grid}, which has {target.num_devices}",
                hint="give one of the two",
            )
    else:
        have = allocation_of(planner.devices)
        wanted = devices or (recipe.cpu_devices if have.device_type == "cpu" else have.num_devices)
        if wanted > have.num_devices:
            raise UsageError(
                f"{wanted} devices were asked for; there are {have.num_devices} ({have})",
                hint=f"use --devices {have.num_devices}",
            )
        target = have if wanted == have.num_devices else Allocation(have.device_type, 1, wanted)
    if recipe.plan.stages is None or isinstance(target, GridShape):
        return target
    return GridShape(target, recipe.plan.stages)


def run_directory(recipe: "Recipe", resume: "Resume", num_steps: int) -> "RunDirectory":
    """The directory of a run, opened: a new one, or the one that goes on."""
    from arena_jax.runtime.rundir import find_run

    root = Path(recipe.checkpoint.dir or f"runs/{recipe.name}")
    return find_run(root, name=recipe.name, resume=resume, num_steps=num_steps)


def run_of(note: "Note", recipe: "Recipe") -> "RunDirectory":
    """The directory of the run that goes on; what is resumed is the note's state, not a checkpoint."""
    from arena_jax.runtime.rundir import open_run, take_over

    run = take_over(Path(note.run)) or open_run(Path(note.run), name=recipe.name, resume="auto")
    run.resume_step = None
    return run


def tracker_of(recipe: "Recipe") -> "MLflowTracker | None":
    """What the recipe's runs are shown in; ``None`` where it wants none."""
    if not recipe.tracking.enabled:
        return None
    from arena_jax.tracking import MLflowTracker

    return MLflowTracker(recipe.tracking.uri, experiment=recipe.tracking.experiment)


@contextmanager
def make_hook(
    recipe: "Recipe", run: "RunDirectory", note: "Note | None" = None, *, say: Callable[[str], Any]
) -> "Iterator[SchedulerHook | None]":
    """What may change the run's allocation; ``say`` takes a line for the person watching where nothing can."""
    from arena_jax.control import ControlSocket
    from arena_jax.runtime.hooks import FileHook, ScriptedHook

    section = recipe.hook
    hook: ControlSocket | FileHook
    if section.script:
        yield ScriptedHook(section.script, wait=section.script_waits)
        return
    if section.file:
        hook = FileHook(section.file)
    elif section.socket == "off":
        yield None
        return
    else:
        try:
            path = None if section.socket == "auto" else section.socket
            hook = ControlSocket(run.path, path, pending=None if note is None else note.request())
        except UsageError as error:
            if section.socket != "auto":
                raise
            say(f"this run cannot be resized: {error.message}")
            yield None
            return
    try:
        yield hook
    finally:
        hook.close()
