"""``arena-jax cancel``: end jobs of the service."""

from pathlib import Path

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import ask, state_option


@click.command(short_help="End jobs of the service.")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@state_option
@console.json_option
def command(jobs: tuple[str, ...], state: Path | None, as_json: bool) -> None:
    """Cancel each JOB. A training that runs saves a checkpoint first."""
    rows = []
    for job in jobs:
        rows.append(ask(state, {"do": "cancel", "job": job})["job"])
        console.note(f"cancelling {rows[-1]['id']}")
    if as_json:
        console.emit_json({"jobs": rows})
