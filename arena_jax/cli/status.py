"""``arena-jax status``: the service's jobs."""

import sys
from pathlib import Path
from typing import Any

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import ask, job_lines, repeat, state_option

_EVERY_S = 1.0


@click.command(short_help="Show the service's jobs.")
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Show again every second, until Ctrl-C.")
@click.option("--all", "all_jobs", is_flag=True, help="Also every job that has ended, not only the last ones.")
@state_option
@console.json_option
def command(job: str | None, watch: bool, all_jobs: bool, state: Path | None, as_json: bool) -> None:
    """Show the jobs of the service, or one of them: where it runs, how far it is, why it waits."""
    request: dict[str, Any] = {"do": "status", "ended": 10_000 if all_jobs else 20}
    if job is not None:
        request = {"do": "status", "job": job}

    def lines() -> list[str]:
        answer = ask(state, request)
        jobs = answer["jobs"]
        found = (
            job_lines(jobs, answer["now"], console.width()) if jobs else ["no jobs; arena-jax submit RECIPE adds one"]
        )
        if job is not None:
            found += [f"  | {line}" for line in jobs[0]["log_tail"]]
        elif answer.get("label"):
            found.append(answer["label"])
        return found

    if watch and sys.stdout.isatty() and not as_json:
        repeat(lines, _EVERY_S)
        return
    if as_json:
        console.emit_json(ask(state, request))
        return
    for line in lines():
        console.data(line)
