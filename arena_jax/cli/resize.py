"""``arena-jax resize``: ask a running training to go on elsewhere."""

import time
from pathlib import Path
from typing import Any

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import state_option
from arena_jax.errors import EXIT_FAILED, UsageError

_POLL_S = 0.2


@click.command(short_help="Ask a running training to go on under another plan.")
@click.argument("target")
@click.argument("grid")
@click.option("--deadline", type=click.FloatRange(min=0), metavar="SECONDS", help="Free what GRID leaves out by then.")
@click.option("--reason", default="", help="Kept with the change in the run's log.")
@click.option("--prepare", is_flag=True, help="Only compile ahead, so that a later change to GRID is quick.")
@click.option("--wait", is_flag=True, help="Return when the change is made, with exit code 1 if it is refused.")
@state_option
@console.json_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    grid: str,
    deadline: float | None,
    reason: str,
    prepare: bool,
    wait: bool,
    state: Path | None,
    as_json: bool,
) -> None:
    """Ask the training in the run directory TARGET to go on on GRID.

    GRID is a grid (cpu:4/s2), an allocation (cpu:4, any number of stages), pause, or stop. The plan is
    compiled while training goes on; the change comes between two steps. Without --wait the command
    returns at once.

    TARGET may also be a job of the service. GRID is then an allocation that the job is held to, pause, or
    auto, which leaves it to the policy again.
    """
    if not Path(target).exists():
        _resize_job(target, grid, state, as_json, others=bool(deadline or prepare or wait or reason))
        return
    from arena_jax.control import ask, find_training

    folder = find_training(target)
    if prepare:
        answer = ask(folder, {"prepare": [grid]})
        console.note(f"compiling {', '.join(answer['prepare'])} ahead")
    else:
        answer = ask(folder, {"target": grid, "deadline_s": deadline, "reason": reason or "resize"})
        if wait:
            answer |= _outcome(folder, str(answer["id"]), stops=grid.strip() == "stop")
        else:
            console.note(f"asked for {grid}; {folder}/events.jsonl says when it is made or refused")
    if as_json:
        console.emit_json(answer)
    if wait and answer.get("outcome") not in (None, "done"):
        ctx.exit(EXIT_FAILED)


def _resize_job(job: str, grid: str, state: Path | None, as_json: bool, *, others: bool) -> None:
    """Hold a job of the service to an allocation."""
    from arena_jax.cli.service_options import ask
    from arena_jax.service.protocol import ServiceError

    try:
        answer = ask(state, {"do": "resize", "job": job, "grid": grid})
    except ServiceError as error:
        raise UsageError(
            f"{job!r} is no run directory, and no job: {error.message}", hint="name the directory that `train` printed"
        ) from error
    if others:
        console.warn("--deadline, --reason, --prepare and --wait are for run directories")
    console.note(f"{answer['job']['id']} is " + ("the policy's again" if grid == "auto" else f"asked to go to {grid}"))
    if as_json:
        console.emit_json({"jobs": [answer["job"]]})


def _outcome(folder: Path, name: str, *, stops: bool) -> dict[str, Any]:
    """Follow a request to its end, which may be that of the training."""
    from arena_jax import relaunch
    from arena_jax.control import ask

    said = {"outcome": "pending"}
    while said["outcome"] == "pending":
        time.sleep(_POLL_S)
        try:
            said = ask(folder, {"state": name})
        except UsageError:
            if (folder / relaunch.FILE_NAME).exists():  # between two processes of the run
                said = {"outcome": "pending"}
                continue
            said = {"outcome": "done", "state": "stopped"} if stops else {"outcome": "ended"}
    if said["outcome"] == "done" and said.get("state") in ("paused", "stopped"):
        at = f" at step {said['step']}" if "step" in said else ""
        console.note(f"{said['state']}{at}")
    elif said["outcome"] == "done":
        console.note(f"runs on {said.get('grid')} since about step {said.get('step')}")
    elif said["outcome"] == "refused":
        console.error("; ".join(said.get("errors") or ["it was refused"]))
    else:
        words = {"replaced": "another request came", "ended": "the training ended"}
        console.error(f"not made: {words.get(said['outcome'], said['outcome'])}")
    return said
