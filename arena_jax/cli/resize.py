"""``arena-jax resize``: ask a running training to go on elsewhere."""

import time
from pathlib import Path
from typing import Any

import click

from arena_jax.cli import console
from arena_jax.errors import EXIT_FAILED

_POLL_S = 0.2


@click.command(short_help="Ask a running training to go on under another plan.")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("grid")
@click.option("--deadline", type=click.FloatRange(min=0), metavar="SECONDS", help="Free what GRID leaves out by then.")
@click.option("--reason", default="", help="Kept with the change in the run's log.")
@click.option("--prepare", is_flag=True, help="Only compile ahead, so that a later change to GRID is quick.")
@click.option("--wait", is_flag=True, help="Return when the change is made, with exit code 1 if it is refused.")
@console.json_option
@click.pass_context
def command(
    ctx: click.Context,
    target: Path,
    grid: str,
    deadline: float | None,
    reason: str,
    prepare: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Ask the training in the run directory TARGET to go on on GRID.

    GRID is a grid (cpu:4/s2), an allocation (cpu:4, any number of stages), pause, or stop. The plan is
    compiled while training goes on; the change comes between two steps. Without --wait the command
    returns at once.
    """
    from arena_jax.control import ask, find_training

    folder = find_training(target)
    if prepare:
        answer = ask(folder, {"prepare": [grid]})
        console.note(f"compiling {', '.join(answer['prepare'])} ahead")
    else:
        answer = ask(folder, {"target": grid, "deadline_s": deadline, "reason": reason or "resize"})
        if wait:
            answer |= _outcome(folder, str(answer["id"]))
        else:
            console.note(f"asked for {grid}; {folder}/events.jsonl says when it is made or refused")
    if as_json:
        console.emit_json(answer)
    if wait and answer.get("outcome") not in (None, "done"):
        ctx.exit(EXIT_FAILED)


def _outcome(folder: Path, name: str) -> dict[str, Any]:
    """Follow a request to its end."""
    from arena_jax import relaunch
    from arena_jax.control import ask
    from arena_jax.errors import UsageError

    said = {"outcome": "pending"}
    while said["outcome"] == "pending":
        time.sleep(_POLL_S)
        try:
            said = ask(folder, {"state": name})
        except UsageError:
            if (folder / relaunch.FILE_NAME).exists():  # between two processes of the run
                said = {"outcome": "pending"}
                continue
            said = {"outcome": "ended"}
    if said["outcome"] == "done":
        console.note(f"runs on {said.get('grid')} since about step {said.get('step')}")
    elif said["outcome"] == "refused":
        console.error("; ".join(said.get("errors") or ["it was refused"]))
    else:
        words = {"replaced": "another request came", "ended": "the training ended"}
        console.error(f"not made: {words.get(said['outcome'], said['outcome'])}")
    return said
