"""What the verbs of the service share: which service, and its jobs as a table."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_COLUMNS = ("job", "state", "on", "step", "loss", "step s", "since")


def state_option(function: F) -> F:
    """Add ``--state DIR``."""
    return click.option(
        "--state",
        type=click.Path(file_okay=False, path_type=Path),
        help="The service's state folder; $ARENA_JAX_SERVICE, or one in your home.",
    )(function)


def ask(state: Path | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """One request to the service."""
    from arena_jax.service.protocol import call, state_folder

    return call(state_folder(state), request)


def job_lines(jobs: Sequence[Mapping[str, Any]], now: float, width: int) -> list[str]:
    """A table of jobs, no wider than ``width``; what ended comes last."""
    rows = [_COLUMNS, *(_row(job, now) for job in jobs)]
    widths = [max(len(row[c]) for row in rows) for c in range(len(_COLUMNS))]
    room = width - sum(widths[1:]) - 2 * (len(_COLUMNS) - 1)
    widths[0] = max(8, min(widths[0], room))
    lines = []
    for number, row in enumerate(rows):
        name = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        cells = [name.ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2])]
        cells += [cell.rjust(size) for cell, size in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        reason = jobs[number - 1]["reason"] if number else ""
        if reason:
            lines.append(f"  {reason}"[:width])
    return lines


def node_lines(nodes: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """One line a node: its use as a bar, and who uses it."""
    if not nodes:
        return []
    longest = max(len(node["node"]) for node in nodes)
    lines = []
    for node in nodes:
        free = node["devices"] - node["used"]
        bar = "#" * node["used"] + "." * free if node["devices"] <= 16 else f"{node['used']} of {node['devices']}"
        state = "" if node["state"] == "up" else f" {node['state']}"
        lines.append(f"{node['node']:{longest}}  {bar}{state}  {', '.join(node['jobs'])}"[:width].rstrip())
    return lines


def _row(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    on = job["allocation"] or ""
    if job["wanted"] and job["wanted"] != on:
        on = f"{on}->{job['wanted']}"
    began = job["finished_at"] or job["started_at"] or job["submitted_at"]
    return (
        job["id"],
        job["state"],
        on or "-",
        f"{job['step']}/{job['num_steps']}" if job["kind"] != "command" else "-",
        "-" if job["loss"] is None else f"{job['loss']:.4g}",
        "-" if job["step_time_s"] is None else f"{job['step_time_s']:.3g}",
        ago(now - began),
    )


def ago(seconds: float) -> str:
    """``42 s``, ``12 min``, ``3.4 h``, ``2.1 d``."""
    for unit, size in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 0):.0f} s"


def repeat(draw: Callable[[], list[str]], every_s: float) -> None:
    """Draw again and again: in place on a terminal, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # Ctrl-C is how one stops looking, not an interruption of anything.
    with (
        suppress(KeyboardInterrupt),
        Live(Text("\n".join(draw())), console=Console(), auto_refresh=False, screen=False) as live,
    ):
        while True:
            time.sleep(every_s)
            live.update(Text("\n".join(draw())), refresh=True)
