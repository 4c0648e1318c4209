"""``arena-jax plan ls``: the plan index as device type x devices x stages. Imports no jax."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any

import click

from arena_jax import home
from arena_jax.cli import console
from arena_jax.cli.progress import seconds
from arena_jax.grid import FIT_PREFIX, IndexRow, JobKey, PlanStore

_CELL_WIDTH = 8


@click.command(short_help="Show the plans that are kept.")
@click.argument("recipe", required=False, metavar="[RECIPE]", shell_complete=console.complete_recipe)
@console.json_option
def command(recipe: str | None, as_json: bool) -> None:
    """Show the plans kept on this machine, of all models or of RECIPE.

    One table a job (model, global batch, pins): a line for every device type and number of devices, a
    column for every number of stages.
    """
    path = home.plan_index()
    rows = stored_rows(PlanStore(path), recipe) if path.exists() else []
    if as_json:
        console.emit_json({"rows": rows})
        return
    if not rows:
        what = f"no plan of {recipe} is kept" if recipe else "no plan is kept"
        console.note(f"{what} in {path}; `arena-jax plan RECIPE` makes one")
        return
    for line in _tables(rows):
        console.data(line)


def stored_rows(store: PlanStore, model: str | None) -> list[dict[str, Any]]:
    """The newest row of every job and grid, sorted; rows of superseded keys do not show."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key in store.jobs():  # oldest first
        if model is not None and model not in (key.fields.get("model"), _model(key)):
            continue
        times = store.stored_at(key)
        for row in store.index(key):
            facts = _facts(key, row) | {"stored_at": times.get((row.grid, row.num_microbatches))}
            newest[facts["model"], facts["global_batch"], facts["pins"], facts["grid"]] = facts
    return sorted(newest.values(), key=lambda r: (r["model"], r["global_batch"], r["pins"], r["type"], *_order(r)))


def _order(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["num_devices"], row["num_nodes"], row["num_stages"]


def _facts(key: JobKey, row: IndexRow) -> dict[str, Any]:
    allocation = row.grid.allocation
    return {
        "model": _model(key),
        "global_batch": key.fields.get("global_batch"),
        "pins": _pins(key),
        "type": allocation.device_type,
        "num_devices": allocation.num_devices,
        "num_nodes": allocation.num_nodes,
        "num_stages": row.grid.num_stages,
        "grid": str(row.grid),
        "feasible": row.feasible,
        "reason": row.reason,
        "num_microbatches": row.num_microbatches,
        "step_time_s": row.step_time_s,
        "measured_step_time_s": row.measured_step_time_s,
        "dp_tp": None if row.plan is None else [[stage.dp, stage.tp] for stage in row.plan.stages],
        "plan_id": None if row.plan is None else row.plan.plan_id,
        "engine": row.engine,
    }


def _model(key: JobKey) -> str:
    """The recipe's name. Models given to ``fit`` may share theirs, so that a fingerprint tells them apart."""
    name, fingerprint = str(key.fields.get("model")), str(key.fields.get("model_fingerprint", ""))
    return f"{name}@{fingerprint[:8]}" if name.startswith(FIT_PREFIX) else name


def _pins(key: JobKey) -> str:
    """What was pinned, as overrides; empty when nothing was."""
    open_values = {"zero": "search", "remat": "search", "space": "full", "engine": "highs"}
    pins = dict(key.fields.get("constraints") or {}) | {"num_microbatches": key.fields.get("num_microbatches")}
    return " ".join(f"plan.{k}={v}" for k, v in sorted(pins.items()) if v is not None and v != open_values.get(k))


def _tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    jobs = dict.fromkeys((row["model"], row["global_batch"], row["pins"]) for row in rows)
    for number, job in enumerate(jobs):
        mine = [row for row in rows if (row["model"], row["global_batch"], row["pins"]) == job]
        if number:
            yield ""
        model, batch, pins = job
        newest = max((row["stored_at"] for row in mine if row["stored_at"] is not None), default=None)
        when = "" if newest is None else f", planned {datetime.fromtimestamp(newest):%Y-%m-%d %H:%M}"
        title = f"{model}, global batch {batch}" + (f", {pins}" if pins else "") + when
        if len(title) <= console.width():
            yield title
        else:
            yield f"{model}, global batch {batch}{when}"
            yield from wrap(pins, console.width(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        yield from _table(mine)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Step times; ``-`` where nothing fits, blank where nothing was planned.

    Stage counts that do not fit the terminal's width come as further blocks below.
    """
    counts = sorted({row["num_stages"] for row in rows})
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        allocation = row["grid"].partition("/")[0]
        time = seconds(row["step_time_s"]) if row["feasible"] else "-"
        lines.setdefault(allocation, {})[row["num_stages"]] = time
    name_width = max(len(name) for name in lines)
    num_columns = max(1, (console.width() - name_width) // (_CELL_WIDTH + 2))
    for start in range(0, len(counts), num_columns):
        block = counts[start : start + num_columns]
        yield f"{'':{name_width}}" + "".join(f"  {f's{count}':>{_CELL_WIDTH}}" for count in block)
        for name, cells in lines.items():
            if any(count in cells for count in block):
                row_cells = "".join(f"  {cells.get(count, ''):>{_CELL_WIDTH}}" for count in block)
                yield f"{name:{name_width}}{row_cells}".rstrip()
