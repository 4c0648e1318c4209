"""``arena-jax train``: the main job."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arena_jax.cli import console
from arena_jax.cli.stopping import leave, noted
from arena_jax.cli.train_report import exit_code, report_of, say_end, say_where, show_plan
from arena_jax.errors import EXIT_RELAUNCH
from arena_jax.grid import Allocation, GridShape, Plan, SchedulerHook
from arena_jax.recipe_run import make_hook, make_planner, run_directory, run_of, target_of, tracker_of
from arena_jax.start import cpu_devices_needed, start_jax, take_type

if TYPE_CHECKING:
    from arena_jax.job import Job
    from arena_jax.planner import Planner
    from arena_jax.recipe import Recipe
    from arena_jax.relaunch import Note
    from arena_jax.runtime.contract import Elsewhere
    from arena_jax.runtime.journal import Callback
    from arena_jax.runtime.rundir import Resume, RunDirectory
    from arena_jax.runtime.signals import StopSignals
    from arena_jax.training import Supervised
    from arena_jax.warm import WarmProcess


@click.command(short_help="Train a recipe under a plan the compiler chose.")
@console.recipe_arguments
@click.option("--devices", type=click.IntRange(min=1), help="Devices to use; by default all, or cpu_devices of a CPU.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Train in N processes, one for each node of the grid, and start them anew when one dies.",
)
@click.option("--steps", type=click.IntRange(min=0), help="Train up to this step; the recipe's schedules stay.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Run this plan file instead of searching.")
@click.option(
    "--resume", default="auto", show_default=True, metavar="auto|never|must|STEP", help="Where to start from."
)
@click.option("--dry-run", is_flag=True, help="Show the candidates and the chosen plan, and stop.")
@console.json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    devices: int | None,
    processes: int | None,
    steps: int | None,
    plan_file: Path | None,
    resume: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train RECIPE under the fastest plan that fits the devices at hand.

    Runs are kept in directories of their own under checkpoint.dir (by default runs/NAME). Under
    `--resume auto` the newest one that holds a checkpoint goes on, unless it is finished. Exit code
    130 after SIGINT and 75 after SIGTERM or a scheduler's stop: the step was finished and saved.
    """
    from arena_jax import relaunch
    from arena_jax.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    note = relaunch.arriving()
    plan = None if plan_file is None else Plan.load(plan_file)
    from arena_jax.processes.launch import detect_launch
    from arena_jax.runtime.signals import StopSignals

    launch = detect_launch()
    if (processes is not None or launch is not None) and not dry_run:
        from arena_jax.cli import train_processes

        code, report = train_processes.train(
            loaded,
            launch,
            processes=processes,
            steps=steps,
            devices=devices,
            plan=plan,
            resume=_resume(resume),
            given=(recipe, overrides),
        )
        if as_json and (launch is None or launch.rank == 0):
            console.emit_json(report)
        ctx.exit(code)
    again = ["train", recipe, *overrides, *([] if steps is None else ["--steps", str(steps)]), *["--json"] * as_json]
    with StopSignals(leave, noted=noted) as signals:
        if note is None:
            take_type(loaded, plan)
            start_jax(cpu_devices_needed(loaded, devices, plan))
        else:
            start_jax(note.here.num_devices)
        try:
            code, report = train(
                loaded,
                signals,
                steps=steps,
                devices=devices,
                plan=plan,
                resume=_resume(resume),
                dry_run=dry_run,
                as_json=as_json,
                given=(recipe, overrides),
                note=note,
                may_leave=True,
            )
        except Exception as error:
            if note is None or note.failed or not (Path(note.run) / relaunch.FILE_NAME).exists():
                raise
            console.error(f"cannot go on on {note.here.plan.grid}, going back: {relaunch.why(error)}")
            note.turned_back(f"it failed there: {relaunch.why(error)}").write()
            code, report = EXIT_RELAUNCH, {"run_dir": note.run}
    if code == EXIT_RELAUNCH and not relaunch.is_supervised():
        relaunch.go_on(Path(report["run_dir"]), again)
    if as_json:
        console.emit_json(report)
    ctx.exit(code)


def train(
    recipe: "Recipe",
    signals: "StopSignals",
    *,
    steps: int | None,
    devices: int | None,
    plan: Plan | None,
    resume: "Resume",
    dry_run: bool,
    as_json: bool,
    given: tuple[str, Sequence[str]] | None = None,
    note: "Note | None" = None,
    may_leave: bool = False,
    callbacks: "Sequence[Callback]" = (),
) -> tuple[int, dict[str, Any]]:
    """Train, and return the exit code and what ``--json`` prints.

    Args:
        given: name and overrides from which another process can load the same recipe.
        note: what the process left that this one goes on from.
        may_leave: whether the caller starts another process where exit code 76 asks for it.
        callbacks: given every event, on the loop's thread.
    """
    from arena_jax.job import build
    from arena_jax.relaunch import is_supervised
    from arena_jax.warm import warm_process

    job = build(recipe)
    signals.check("building the model")
    planner = make_planner(job)
    signals.check("tracing the model")
    if note is not None:
        plan = None
    here = note.here.plan if note is not None else plan
    target = here.grid if here is not None else target_of(recipe, planner, devices)
    planner.check_fits(target.allocation)
    if dry_run:
        return 0, show_plan(job, planner, target, plan, as_json=as_json)
    # `steps=N` is another recipe, whose schedule ends earlier; `--steps N` is the beginning of this one.
    num_steps = job.steps if steps is None else steps
    run = run_directory(recipe, resume, num_steps) if note is None else run_of(note, recipe)
    if note is None and resume == "auto":
        from arena_jax.relaunch import rescue

        run.resume_step = rescue(run.path, run.checkpoints, run.resume_step) or run.resume_step
    try:
        with make_hook(recipe, run, note, say=console.note) as hook:
            warm = warm_process(planner.devices, given)
            code, report = train_job(
                job,
                planner,
                target,
                plan,
                run,
                num_steps,
                signals,
                hook,
                warm,
                note=note,
                callbacks=callbacks,
                may_leave=may_leave,
            )
        if code == EXIT_RELAUNCH and not is_supervised():
            run.keep_over_exec()
        return code, report
    finally:
        run.close()


def train_job(
    job: "Job",
    planner: "Planner",
    target: GridShape | Allocation,
    plan: Plan | None,
    run: "RunDirectory",
    num_steps: int,
    signals: "StopSignals",
    hook: SchedulerHook | None,
    warm: "WarmProcess | None",
    *,
    note: "Note | None" = None,
    supervised: "Supervised | None" = None,
    callbacks: "Sequence[Callback]" = (),
    may_leave: bool = True,
) -> tuple[int, dict[str, Any]]:
    """Train a job whose run directory is open.

    Args:
        note: what the process left that this one goes on from.
        supervised: where another process started this one; of several, only the first says anything.
        callbacks: take every event, besides what a person sees.

    Returns:
        Exit code, and what ``--json`` prints.
    """
    from arena_jax.cli.departure import Departure
    from arena_jax.cli.progress import Progress
    from arena_jax.fit import model_leaves
    from arena_jax.runtime.contract import LoopOptions
    from arena_jax.runtime.feed import Feed
    from arena_jax.training import Training, run_training

    recipe = job.recipe
    leads = supervised is None or supervised.leads
    tracker = tracker_of(recipe) if leads else None
    evals: list[dict[str, Any]] = []
    elsewhere: Elsewhere | None = None if supervised is None else supervised.elsewhere
    watchers: list[Callback] = [*callbacks]
    if supervised is None and warm is not None and may_leave:
        elsewhere = departure = Departure(
            run.path,
            warm,
            num_devices=len(planner.devices),
            device_type=target.allocation.device_type,
            before=note,
            first_step=run.resume_step or 0,
        )
        watchers.insert(0, departure.on_event)
    if note is None and supervised is None:
        say_where(run)
    with Progress(num_steps, name=job.name) if leads else nullcontext(lambda event: None) as progress:
        trained = run_training(
            Training(
                name=job.name,
                planner=planner,
                target=target,
                plan=plan,
                feed=Feed(job.make_data()),
                options=LoopOptions(
                    num_steps=num_steps,
                    items_per_step=job.items_per_batch[0],
                    item_unit=job.items_per_batch[1],
                    samples_per_step=job.global_batch,
                    eval_every=recipe.eval.every if job.make_eval_data is not None else 0,
                    checkpoint_every=recipe.checkpoint.every,
                    nonfinite=recipe.nonfinite,
                ),
                seed=job.seed,
                run=run,
                keep=recipe.checkpoint.keep,
                leaves=model_leaves(planner.problem),
                eval_data=None if job.make_eval_data is None else _Again(job.make_eval_data),
                tracker=tracker,
                hook=hook,
                warm=warm,
                elsewhere=elsewhere,
                note=note,
                callbacks=(
                    progress,
                    lambda event: evals.append(event) if event["kind"] == "eval" else None,
                    _keep_to_cores,
                    *watchers,
                ),
                record={"recipe": recipe.to_yaml(), "params": recipe.resolved()},
                signals=signals,
                supervised=supervised,
            )
        )
    reason, report = trained.outcome.stop_reason, report_of(job, trained, run, note)
    if reason == "relaunch":
        return EXIT_RELAUNCH, report
    if evals:
        report["eval"] = evals[-1]["metrics"]
    if supervised is None:
        say_end(report, tracker)
    return exit_code(reason), report


def _keep_to_cores(event: Mapping[str, Any]) -> None:
    """After a change of plan: a type whose devices have cores of their own uses those of the devices in use."""
    if event["kind"] == "plan":
        from arena_jax.device_type import take_cores

        take_cores(GridShape.parse(event["grid"]).num_devices)


def _resume(text: str) -> "Resume":
    return int(text) if text.isdecimal() else text


class _Again:
    """Validation batches from the first, each time they are iterated."""

    def __init__(self, make: Callable[[], Iterable[Any] | None]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make() or ())
