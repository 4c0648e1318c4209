"""The table that ``arena-jax simulate`` prints of its policies."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from arena_jax.cli import console

_SHOWN = (
    ("mean_jct_s", "mean JCT s"),
    ("median_jct_s", "median s"),
    ("p99_jct_s", "p99 s"),
    ("mean_queue_s", "queue s"),
    ("mean_slowdown", "slowdown"),
    ("worst_slowdown", "worst"),
    ("restarts_per_job", "restarts"),
    ("samples_per_s", "samples/s"),
    ("device_hours", "device-h"),
    ("cost_dollars", "dollars"),
    ("deadline_misses", "misses"),
    ("finished", "finished"),
    ("running", "running"),
    ("waiting", "waiting"),
    ("rejected", "rejected"),
)
# Shown only where they say something: some policy's value is not the one given.
_QUIET: dict[str, Any] = {"cost_dollars": None, "deadline_misses": 0, "running": 0, "waiting": 0, "rejected": 0}


def lines(policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line a policy; on a terminal that is narrower, in blocks of columns one below the other."""
    shown = [(key, title) for key, title in _SHOWN if _says_something(key, policies)]
    columns = [[title, *(_cell(metrics[key]) for metrics in policies.values())] for key, title in shown]
    names = ["policy", *policies]
    name_width = max(map(len, names))
    room = console.width() - name_width if sys.stdout.isatty() else None
    for number, block in enumerate(_blocks([[cell.rjust(max(map(len, c))) for cell in c] for c in columns], room)):
        if number:
            yield ""
        for row, name in enumerate(names):
            yield "  ".join([name.ljust(name_width), *(column[row] for column in block)])


def _blocks(columns: list[list[str]], room: int | None) -> Iterator[list[list[str]]]:
    block: list[list[str]] = []
    used = 0
    for column in columns:
        need = 2 + len(column[0])
        if block and room is not None and used + need > room:
            yield block
            block, used = [], 0
        block.append(column)
        used += need
    yield block


def _says_something(key: str, policies: Mapping[str, Mapping[str, Any]]) -> bool:
    if key == "finished":
        return any(metrics["finished"] < metrics["num_jobs"] for metrics in policies.values())
    return key not in _QUIET or any(metrics[key] != _QUIET[key] for metrics in policies.values())


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.005 else "0"
