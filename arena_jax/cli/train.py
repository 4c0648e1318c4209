"""``arena-jax train``: the main job."""

import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arena_jax.cli import console
from arena_jax.errors import EXIT_INTERRUPTED, EXIT_RELAUNCH, EXIT_RESUMABLE, UsageError
from arena_jax.grid import Allocation, GridShape, Plan, SchedulerHook, parse_target

if TYPE_CHECKING:
    from arena_jax.job import Job
    from arena_jax.planner import Planner
    from arena_jax.recipe import Recipe
    from arena_jax.relaunch import Note
    from arena_jax.runtime.contract import Elsewhere
    from arena_jax.runtime.journal import Callback
    from arena_jax.runtime.rundir import Resume, RunDirectory
    from arena_jax.runtime.signals import StopSignals
    from arena_jax.tracking import MLflowTracker
    from arena_jax.training import Supervised, Trained
    from arena_jax.warm import WarmProcess

_EXIT_CODES = {
    "interrupted": EXIT_INTERRUPTED,
    "terminated": EXIT_RESUMABLE,
    "stopped": EXIT_RESUMABLE,
    "paused": EXIT_RESUMABLE,
    "relaunch": EXIT_RELAUNCH,
}


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


def take_type(recipe: "Recipe", plan: Plan | None) -> None:
    """Let this process stand for the virtual CPU type that the run begins on, unless the environment says one."""
    from arena_jax.device_type import ENV_TYPE
    from arena_jax.grid import CATALOGUE

    target = plan.grid if plan is not None else recipe.plan.grid and parse_target(recipe.plan.grid)
    if not target or os.environ.get(ENV_TYPE):
        return
    row = CATALOGUE[_type_of(target)]
    if row.platform == "cpu" and row.name != "cpu":
        os.environ[ENV_TYPE] = row.name


def cpu_devices_needed(recipe: "Recipe", devices: int | None, plan: Plan | None) -> int:
    """How many virtual devices a CPU must be split into: as many as anything in the run will ask for.

    A type whose devices have cores of their own gets no more than it starts with: growing takes another process.
    """
    from arena_jax.device_type import cpu_type

    if cpu_type().threads is not None:
        if plan is not None:
            return plan.grid.num_devices
        return devices or (1 if recipe.plan.grid is None else parse_target(recipe.plan.grid).num_devices)
    wanted = [devices or recipe.cpu_devices]
    if recipe.hook.file or recipe.hook.socket not in ("auto", "off"):  # so that the run can grow
        wanted.append(recipe.cpu_devices)
    if plan is not None:
        wanted.append(plan.grid.num_devices)
    if recipe.plan.grid is not None:
        wanted.append(parse_target(recipe.plan.grid).num_devices)
    if recipe.hook.script:
        from arena_jax.runtime.hooks import read_script

        targets = [request.target for _, request in read_script(recipe.hook.script)]
        wanted += [t.num_devices for t in targets if isinstance(t, GridShape | Allocation) and _type_of(t) == "cpu"]
    return max(wanted)


def start_jax(num_cpu_devices: int) -> None:
    """Set what has to be set before jax first looks for devices.

    A device count that the environment gives stays. Harmless where there is an accelerator.
    """
    import jax

    from arena_jax import home
    from arena_jax.cpu_memory import keep_freed_memory
    from arena_jax.device_type import cpu_type, take_cores

    keep_freed_memory()
    take_cores(num_cpu_devices)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Refused where jax is running already, as in a notebook; then there are as many as there are.
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        device_type = cpu_type()
        own = "" if device_type.threads is None else device_type.name
        jax.config.update("jax_compilation_cache_dir", str(home.compile_cache(own)))
        # By default jax stores only what took long to compile; a pipeline is many small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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

    job = build(recipe)
    signals.check("building the model")
    planner = make_planner(job)
    signals.check("tracing the model")
    if note is not None:
        plan = None
    here = note.here.plan if note is not None else plan
    target = here.grid if here is not None else _target(recipe, planner, devices)
    planner.check_fits(target.allocation)
    if dry_run:
        return 0, _dry_run(job, planner, target, plan, as_json=as_json)
    # `steps=N` is another recipe, whose schedule ends earlier; `--steps N` is the beginning of this one.
    num_steps = job.steps if steps is None else steps
    run = run_directory(recipe, resume, num_steps) if note is None else _run_of(note, recipe)
    if note is None and resume == "auto":
        from arena_jax.relaunch import rescue

        run.resume_step = rescue(run.path, run.checkpoints, run.resume_step) or run.resume_step
    try:
        with make_hook(recipe, run, note) as hook:
            warm = warm_process(planner, given)
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
    tracker = _tracker(recipe) if leads else None
    evals: list[dict[str, Any]] = []
    elsewhere: Elsewhere | None = None if supervised is None else supervised.elsewhere
    watchers: list[Callback] = [*callbacks]
    if supervised is None and warm is not None and may_leave:
        elsewhere = departure = Departure(
            run.path,
            warm,
            num_devices=len(planner.devices),
            device_type=_type_of(target),
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
    if trained.outcome.stop_reason == "relaunch":
        return EXIT_RELAUNCH, _report(job, trained, run, note)
    report = _report(job, trained, run, note)
    if evals:
        report["eval"] = evals[-1]["metrics"]
    if supervised is None:
        say_end(report, tracker)
    return _EXIT_CODES.get(trained.outcome.stop_reason, 0), report


def say_where(run: "RunDirectory") -> None:
    console.note(f"run {run.path}" + (f", resuming at step {run.resume_step}" if run.resume_step is not None else ""))


def _dry_run(
    job: "Job", planner: "Planner", target: GridShape | Allocation, plan: Plan | None, *, as_json: bool
) -> dict[str, Any]:
    from arena_jax.cli.progress import plan_summary, render_candidates
    from arena_jax.planner import candidate_rows, choose

    rows: list[dict[str, Any]] = []
    estimate = None
    if plan is None:
        index = planner.search(target)
        row = index.row(target) if isinstance(target, GridShape) else index.best(target)
        rows = candidate_rows(index, None if row is None else row.plan)
        render_candidates(rows)
        candidate = choose(index, target)
        estimate = row.estimate if row is not None else None
    else:
        candidate = planner.given(plan)
    if sys.stdout.isatty() and not as_json:
        for line in plan_summary(candidate.plan, estimate):
            console.data(line)
    else:
        console.data(candidate.plan.dumps().rstrip())
    return {
        "steps": 0,
        "losses": [],
        "estimated_step_time_s": candidate.estimated_step_time_s,
        "plan_id": candidate.plan.plan_id,
        "grid": str(candidate.plan.grid),
        "plan": candidate.plan.to_json(),
        "candidates": rows,
        "stop_reason": "dry_run",
    }


def _report(job: "Job", trained: "Trained", run: "RunDirectory", note: "Note | None") -> dict[str, Any]:
    """The object of ``--json``; ``losses`` has one entry per step of this invocation, in whatever processes."""
    outcome = trained.outcome
    plan = outcome.program.plan
    before = () if note is None else note.history
    times = [record.step_time_s for record in outcome.history]
    step_time_s = statistics.median(times) if times else None
    return {
        "steps": outcome.step,
        "first_step": trained.first_step if note is None else note.first_step,
        "losses": [*(loss for loss, _ in before), *(record.loss for record in outcome.history)],
        "step_time_s": step_time_s,
        "tokens_or_samples_per_s": job.items_per_batch[0] / step_time_s if step_time_s else None,
        "estimated_step_time_s": outcome.estimated_step_time_s,
        "plan_id": plan.plan_id,
        "grid": str(plan.grid),
        "swaps": [*(() if note is None else note.swaps), *(swap.to_json() for swap in outcome.swaps)],
        "run_id": trained.run_id,
        "run_dir": str(run.path),
        "checkpoint_dir": str(run.checkpoints),
        "stop_reason": outcome.stop_reason,
    }


def say_end(report: Mapping[str, Any], tracker: "MLflowTracker | None") -> None:
    """How it ended and where to look, on stderr."""
    losses = report["losses"]
    loss = f", loss {losses[0]:.4g} -> {losses[-1]:.4g}" if losses else ""
    console.note(f"{report['stop_reason']} after step {report['steps']}{loss}; kept in {report['run_dir']}")
    if report["stop_reason"] in _EXIT_CODES and Path(report["checkpoint_dir"]).is_dir():
        console.note("the same command goes on from here")
    if tracker is not None:
        console.note(f"to look at the curves: {tracker.how_to_open()}")


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


def _target(recipe: "Recipe", planner: "Planner", devices: int | None) -> GridShape | Allocation:
    """The grid or allocation to run on: pinned, or as many devices as asked for, or all."""
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
    from arena_jax.runtime.rundir import find_run

    root = Path(recipe.checkpoint.dir or f"runs/{recipe.name}")
    return find_run(root, name=recipe.name, resume=resume, num_steps=num_steps)


def _tracker(recipe: "Recipe") -> "MLflowTracker | None":
    if not recipe.tracking.enabled:
        return None
    from arena_jax.tracking import MLflowTracker

    return MLflowTracker(recipe.tracking.uri, experiment=recipe.tracking.experiment)


def _run_of(note: "Note", recipe: "Recipe") -> "RunDirectory":
    """The directory of the run that goes on; what is resumed is the note's state, not a checkpoint."""
    from arena_jax.runtime.rundir import open_run, take_over

    run = take_over(Path(note.run)) or open_run(Path(note.run), name=recipe.name, resume="auto")
    run.resume_step = None
    return run


def _keep_to_cores(event: Mapping[str, Any]) -> None:
    """After a change of plan: a type whose devices have cores of their own uses those of the devices in use."""
    if event["kind"] == "plan":
        from arena_jax.device_type import take_cores

        take_cores(GridShape.parse(event["grid"]).num_devices)


def _type_of(target: GridShape | Allocation) -> str:
    return target.allocation.device_type


@contextmanager
def make_hook(recipe: "Recipe", run: "RunDirectory", note: "Note | None" = None) -> "Iterator[SchedulerHook | None]":
    """What may change the run's allocation."""
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
            console.note(f"this run cannot be resized: {error.message}")
            yield None
            return
    try:
        yield hook
    finally:
        hook.close()


def warm_process(planner: "Planner", given: tuple[str, Sequence[str]] | None) -> "WarmProcess | None":
    """A process that compiles ahead; on accelerators, which it could not open, and without a recipe none."""
    from arena_jax.warm import WarmProcess

    if given is None or planner.devices[0].platform != "cpu":
        return None
    return WarmProcess(*given, len(planner.devices))


def _resume(text: str) -> "Resume":
    return int(text) if text.isdecimal() else text


def noted(number: signal.Signals) -> None:
    """Written past Python's buffers, for a handler may interrupt a write."""
    os.write(2, f"\n{number.name}: stopping after this step or phase; a second one leaves at once\n".encode())


def leave(number: int) -> None:
    """A second signal: without waiting for threads or exit handlers. What is being saved stays unfinished.

    Events are in the log as soon as they are emitted, so there is nothing to flush.
    """
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor that the progress hid
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE)


class _Again:
    """Validation batches from the first, each time they are iterated."""

    def __init__(self, make: Callable[[], Iterable[Any] | None]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make() or ())
