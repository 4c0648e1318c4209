"""``arena-jax drain``: take a node of the service out of use, or back."""

from pathlib import Path

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import ask, state_option


@click.command(short_help="Take a node of the service out of use, or back.")
@click.argument("node")
@click.option("--undo", is_flag=True, help="Use the node again.")
@state_option
@console.json_option
def command(node: str, undo: bool, state: Path | None, as_json: bool) -> None:
    """Take NODE (a100/3, as `arena-jax top` shows it) out of use.

    Its trainings save and go elsewhere; a command stays to its end.
    """
    answer = ask(state, {"do": "undrain" if undo else "drain", "node": node})
    console.note(f"{answer['node']} is {'used again' if undo else 'being drained'}")
    if as_json:
        console.emit_json(answer)
