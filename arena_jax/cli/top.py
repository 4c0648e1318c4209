"""``arena-jax top``: the service's nodes and what runs on them."""

import sys
from pathlib import Path

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import ask, job_lines, node_lines, repeat, state_option

_EVERY_S = 1.0


@click.command(short_help="Show the service's nodes and what runs on them.")
@state_option
@console.json_option
def command(state: Path | None, as_json: bool) -> None:
    """Show each node, which of its devices are held and by whom, and the jobs that hold them.

    On a terminal the picture is renewed every second until Ctrl-C.
    """

    def lines() -> list[str]:
        answer = ask(state, {"do": "status", "ended": 0})
        held = [job for job in answer["jobs"] if job["allocation"]]
        waiting = len(answer["jobs"]) - len(held)
        used = sum(node["used"] for node in answer["nodes"])
        total = sum(node["devices"] for node in answer["nodes"])
        head = f"{answer.get('policy', '')}: {used} of {total} devices held, {len(held)} jobs run, {waiting} wait"
        found = [head, *node_lines(answer["nodes"], console.width()), ""]
        found += job_lines(held, answer["now"], console.width()) if held else []
        return found + ([answer["label"]] if answer.get("label") else [])

    if as_json:
        console.emit_json(ask(state, {"do": "status", "ended": 0}))
    elif sys.stdout.isatty():
        repeat(lines, _EVERY_S)
    else:
        for line in lines():
            console.data(line)
