"""``arena-jax train`` in several processes: started here (``--processes``), or by Slurm and its like."""

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from arena_jax.cli import console
from arena_jax.cli.stopping import leave, noted
from arena_jax.cli.train_report import say_end, say_where
from arena_jax.cli.worker import prepare
from arena_jax.errors import EXIT_FAILED, ArenaError, UsageError, counted
from arena_jax.events import FILE_NAME, read_from
from arena_jax.grid import Allocation, GridShape, Plan, parse_target
from arena_jax.processes.assign import check_assignable
from arena_jax.processes.coordination import Board, Service
from arena_jax.processes.group import Work, start_planning
from arena_jax.processes.launch import Launch
from arena_jax.processes.supervisor import Ended, Supervisor
from arena_jax.recipe import Recipe
from arena_jax.recipe_run import make_hook, run_directory
from arena_jax.runtime.journal import Callback
from arena_jax.runtime.rundir import Resume, RunDirectory
from arena_jax.runtime.signals import StopSignals
from arena_jax.start import cpu_devices_needed

_WAIT_S = 900.0


def train(
    recipe: Recipe,
    launch: Launch | None,
    *,
    processes: int | None,
    steps: int | None,
    devices: int | None,
    plan: Plan | None,
    resume: Resume,
    given: tuple[str, Sequence[str]],
    on_event: Callback | None = None,
) -> tuple[int, dict[str, Any]]:
    """Train, and return the exit code and what ``--json`` prints.

    Args:
        launch: this process among those that somebody else started; ``None`` starts ``processes`` here.
        given: name and overrides from which another process can load the same recipe.
        on_event: given every event of a launched process, on its loop's thread.
    """
    if launch is not None and processes not in (None, launch.num_processes):
        raise UsageError(
            f"--processes {processes} in a group of {launch.num_processes} processes ({launch.source})",
            hint="leave --processes out: the processes are there already",
        )
    count = launch.num_processes if launch is not None else processes
    assert count is not None
    target = _target(recipe, count, devices, plan)
    # A second signal leaves at once; the system ends the processes with their supervisor.
    with StopSignals(leave, noted=noted) as signals:
        if launch is not None:
            return _train_launched(recipe, launch, target, plan, steps, resume, given, signals, on_event)
        num_steps = recipe.steps if steps is None else steps
        run = run_directory(recipe, resume, num_steps)
        try:
            return _supervise(recipe, target, plan, steps, run, given, signals)
        finally:
            run.close()


def _target(recipe: Recipe, count: int, devices: int | None, plan: Plan | None) -> GridShape | Allocation:
    """Where to run: ``count`` nodes, each a process."""
    target: GridShape | Allocation
    if plan is not None:
        check_assignable(plan)
        target, said = plan.grid, f"the plan's grid {plan.grid}"
    elif recipe.plan.grid is not None:
        target = parse_target(recipe.plan.grid)
        said = f"plan.grid={recipe.plan.grid}"
    else:
        total = devices or recipe.cpu_devices
        if total % count:
            raise UsageError(
                f"{total} devices cannot be spread evenly over {count} processes",
                hint=f"use --devices {max(1, total // count) * count}",
            )
        target, said = Allocation("cpu", count, total // count), ""
    allocation = target.allocation
    if allocation.device_type != "cpu":
        raise UsageError(
            f"{allocation}: processes are started for cpu devices only", hint=f"use a grid like cpu:{count}x4"
        )
    if devices not in (None, allocation.num_devices):
        raise UsageError(f"--devices {devices} against {allocation}", hint="give one of the two")
    if allocation.num_nodes != count:
        per_process, rest = divmod(allocation.num_devices, count)
        fitting = f"cpu:{count}x{per_process}" if per_process and not rest else f"cpu:{count}x1"
        raise UsageError(
            f"{said} has {counted(allocation.num_nodes, 'node')}, and there are {count} processes, one for each node",
            hint=f"use a grid like {fitting}, or {allocation.num_nodes} processes",
        )
    if recipe.plan.stages is None or isinstance(target, GridShape):
        return target
    return GridShape(target, recipe.plan.stages)


def _supervise(
    recipe: Recipe,
    target: GridShape | Allocation,
    plan: Plan | None,
    steps: int | None,
    run: RunDirectory,
    given: tuple[str, Sequence[str]],
    signals: StopSignals,
) -> tuple[int, dict[str, Any]]:
    say_where(run)
    log = run.path / FILE_NAME
    offset = log.stat().st_size if log.exists() else 0
    work = Work(
        recipe=given[0],
        overrides=tuple(given[1]),
        num_steps=steps,
        run_path=run.path,
        run_id=run.run_id,
        num_devices=cpu_devices_needed(recipe, None, plan),
    )
    # A script is read by the leader, at its own steps; what comes from outside must find somebody at any time.
    with nullcontext() if recipe.hook.script else make_hook(recipe, run, say=console.note) as hook:
        supervisor = Supervisor(
            work,
            target=target,
            signals=signals,
            plan=plan,
            facts={"engine": "given"},
            hook=hook,
            resume_step=run.resume_step,
            say=console.note,
        )
        ended = supervisor.run()
    if ended.error:
        error = ArenaError(ended.error, hint=ended.hint)
        error.exit_code = ended.code or EXIT_FAILED
        raise error
    report = _report(ended, run, offset)
    say_end(report, None)
    return ended.code, report


def _report(ended: Ended, run: RunDirectory, offset: int) -> dict[str, Any]:
    """The last leader's report, with what the groups before it did; the event log knows."""
    losses: dict[int, float] = {}
    times: list[float] = []
    swaps, grid, plan_id = [], None, None
    while True:
        events, end = read_from(run.path, offset)
        for event in events:
            if event["kind"] == "step":
                losses[event["step"]] = float(event["loss"])
                times.append(event["step_time_s"])
            elif event["kind"] == "swap":
                swaps.append({k: v for k, v in event.items() if k not in ("time", "kind")})
            elif event["kind"] == "plan":
                grid, plan_id = event["grid"], event["plan_id"]
        if end == offset:
            break
        offset = end
    steps = sorted(losses)
    merged: dict[str, Any] = {
        "steps": steps[-1] if steps else run.resume_step or 0,
        "step_time_s": statistics.median(times) if times else None,
        "plan_id": plan_id,
        "grid": grid,
        "run_id": run.run_id,
        "run_dir": str(run.path),
        "checkpoint_dir": str(run.checkpoints),
        "stop_reason": "stopped",
    }
    merged |= ended.report
    return merged | {
        "first_step": run.resume_step or 0,
        "losses": [losses[step] for step in steps],
        "swaps": swaps,
        "num_restarts": ended.num_restarts,
    }


def _train_launched(
    recipe: Recipe,
    launch: Launch,
    target: GridShape | Allocation,
    plan: Plan | None,
    steps: int | None,
    resume: Resume,
    given: tuple[str, Sequence[str]],
    signals: StopSignals,
    on_event: Callback | None,
) -> tuple[int, dict[str, Any]]:
    """Train as one of the processes that somebody else started, and watches."""
    leads = launch.rank == 0
    service = Service(launch.num_processes, launch.coordinator, supervised=launch.watched) if leads else None
    board = Board(launch.coordinator, launch.rank, launch.num_processes, supervised=launch.watched)
    run = None
    try:
        if leads:
            try:
                num_steps = recipe.steps if steps is None else steps
                run = run_directory(recipe, resume, num_steps)
                say_where(run)
                found = {"plan": plan.to_json(), "engine": "given"} if plan is not None else _plan(run, target, given)
                said = {"run_path": str(run.path), "run_id": run.run_id, "resume_step": run.resume_step, **found}
            except ArenaError as error:
                board.set("start", json.dumps({"error": error.message, "hint": error.hint, "code": error.exit_code}))
                raise
            board.set("start", json.dumps(said))
        else:
            said = _hear_start(board)
            run = RunDirectory(path=Path(said["run_path"]), run_id=said["run_id"], resume_step=said["resume_step"])
        chosen = Plan.from_json(said["plan"])
        part = prepare(
            given[0],
            given[1],
            chosen,
            chosen.grid.allocation.devices_per_node,
            launch.rank,
            board,
            estimated_step_time_s=said.get("estimated_step_time_s"),
            engine=said.get("engine", ""),
        )
        with make_hook(recipe, run, say=console.note) if leads else nullcontext() as hook:
            code, report = part.train(run, signals, num_steps=steps, hook=hook, elsewhere=None, on_step=on_event)
        if leads:
            say_end(report, None)
        board.leave()
        return code, report
    finally:
        if run is not None:
            run.close()
        if service is not None:
            service.close()


def _hear_start(board: Board) -> dict[str, Any]:
    text = board.get("start", _WAIT_S)
    said: dict[str, Any] = {"error": "process 0 did not say where to begin"} if text is None else json.loads(text)
    if "error" in said:
        error = ArenaError(f"process 0: {said['error']}", hint=said.get("hint", ""))
        error.exit_code = said.get("code", EXIT_FAILED)
        raise error
    return said


def _plan(run: RunDirectory, target: GridShape | Allocation, given: tuple[str, Sequence[str]]) -> dict[str, Any]:
    """Plan in another process: jax here must not look for devices before the group has met."""
    work = Work(recipe=given[0], overrides=tuple(given[1]), num_steps=None, run_path=run.path, run_id=run.run_id)
    child = start_planning(work, str(target), target.num_devices, None)
    try:
        for message in child.line.messages():
            if message.get("say") == "planned":
                return {k: message[k] for k in ("plan", "estimated_step_time_s", "engine")}
            if message.get("say") == "end":
                error = ArenaError(message.get("error", "planning failed"), hint=message.get("hint", ""))
                error.exit_code = message["code"]
                raise error
        raise ArenaError(f"planning ended: {child.last_words() or os.strerror(0)}")
    finally:
        child.kill()
