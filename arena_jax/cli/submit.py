"""``arena-jax submit``: give the service a job."""

import os
from pathlib import Path
from typing import Any

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import ask, state_option
from arena_jax.errors import UsageError
from arena_jax.service.job import Submission


@click.command(short_help="Give the service a job.")
@click.argument("recipe", metavar="[RECIPE]", required=False, shell_complete=console.complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--cmd", help="Run this shell command instead of a recipe; needs --on.")
@click.option("--on", metavar="SPEC", default="", help="Of a command; of a recipe, for rigid policies.")
@click.option("--min", "least", type=click.IntRange(min=1), default=1, show_default=True, help="Fewest devices.")
@click.option("--max", "most", type=click.IntRange(min=1), help="Most devices.")
@click.option("--types", metavar="A,B", default="", help="Only these device types.")
@click.option("--priority", type=float, default=1.0, show_default=True, help="Weight of a second of its time.")
@click.option("--deadline", type=float, metavar="SECONDS", help="Should be done by then, from now.")
@click.option("--queue", default="default", show_default=True, help="Queue; its share is in the cluster file.")
@click.option("--expect", type=float, default=3600.0, show_default=True, metavar="SECONDS", help="Length of a command.")
@click.option("--name", help="What it is called; by default the recipe's name.")
@state_option
@console.json_option
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    cmd: str | None,
    on: str,
    least: int,
    most: int | None,
    types: str,
    priority: float,
    deadline: float | None,
    queue: str,
    expect: float,
    name: str | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Give the service RECIPE to train, or a command to run.

    A recipe is checked here and planned by the service, for every device type it may run on. A command
    (`--cmd "..." --on cpu:8`) is opaque: it gets just these devices, and is neither moved nor resumed.
    """
    common: dict[str, Any] = {
        "queue": queue,
        "on": on,
        "priority": priority,
        "deadline_s": deadline,
        "folder": os.getcwd(),
    }
    if (cmd is None) == (recipe is None):
        raise UsageError(
            "name a recipe or give a command with --cmd, one of the two",
            hint="arena-jax submit gpt_tiny steps=100",
        )
    if cmd is not None:
        default = (cmd.split() or ["command"])[0].rpartition("/")[2][:40] or "command"
        spec = Submission(kind="command", name=name or default, command=cmd, expected_s=expect, **common)
    else:
        from arena_jax.recipe import load_recipe

        loaded = load_recipe(str(recipe), overrides)
        if loaded.plan.grid is not None:
            raise UsageError(
                f"plan.grid={loaded.plan.grid}: the scheduler chooses the grid",
                hint=f"leave it out; bound it with --min, --max and --types, or ask with --on {loaded.plan.grid}",
            )
        spec = Submission(
            kind="recipe",
            name=name or loaded.name,
            recipe=loaded.to_yaml(),
            steps=loaded.steps,
            global_batch=loaded.global_batch,
            min_devices=least,
            max_devices=most,
            types=tuple(part.strip() for part in types.split(",") if part.strip()),
            **common,
        )
    answer = ask(state, {"do": "submit", "job": spec.to_json()})
    job = answer["job"]
    console.data(job["id"])
    console.note(f"follow it with: arena-jax status --watch, arena-jax logs -f {job['id']}")
    if as_json:
        console.emit_json({"jobs": [job]})
