"""``arena-jax logs``: what a job of the service has printed."""

import time
from pathlib import Path

import click

from arena_jax.cli.service_options import ask, state_option

_EVERY_S = 0.5


@click.command(short_help="Print what a job of the service has printed.")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends or Ctrl-C.")
@state_option
def command(job: str, follow: bool, state: Path | None) -> None:
    """Print the output of JOB, over all the processes it has had."""
    offset = 0
    while True:
        answer = ask(state, {"do": "logs", "job": job, "offset": offset})
        click.echo(answer["text"], nl=False)
        if answer["offset"] > offset:
            offset = answer["offset"]
            continue
        if not follow or answer["ended"]:
            return
        time.sleep(_EVERY_S)
