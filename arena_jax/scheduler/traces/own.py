"""Our own trace: CSV or JSON whose columns are the fields of :class:`JobSpec`."""

import csv
import io
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from arena_jax.scheduler.jobs import JobSpec
from arena_jax.scheduler.traces.rows import Faults, Row, TraceError, csv_rows, parse_rows, require

FIELDS = tuple(f.name for f in fields(JobSpec))
REQUIRED = tuple(f.name for f in fields(JobSpec) if f.default is MISSING)
_COUNTS = ("global_batch", "num_devices", "min_devices", "max_devices")
_NUMBERS = ("arrival_s", "num_steps", "weight", "deadline_s")


def load_csv(text: str, source: str) -> list[JobSpec]:
    """Read a CSV; empty cells take the default. ``allowed_types`` are separated by spaces."""
    header = [name.strip() for name in next(csv.reader(io.StringIO(text.lstrip())), [])]
    require(header, FIELDS, source)
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise TraceError(f"{source}: missing columns {', '.join(missing)}")
    return parse_rows(csv_rows(text), _from_row, source)


def load_json(records: Sequence[Any], source: str) -> list[JobSpec]:
    """Read a list of objects with the same fields."""
    rows = []
    faults = Faults(source, "record", "record")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            faults.add(number, "not an object")
            continue
        unknown = [name for name in record if name not in FIELDS]
        if unknown:
            faults.add(number, f"unknown fields {', '.join(unknown)}")
            continue
        rows.append(Row({k: v for k, v in record.items() if v is not None}, number))
    return parse_rows(rows, _from_row, source, faults=faults)


def to_csv(jobs: Sequence[JobSpec]) -> str:
    """The CSV that :func:`load_csv` reads back to equal jobs."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    for job in jobs:
        row = {k: "" if v is None else v for k, v in asdict(job).items()}
        writer.writerow({**row, "allowed_types": " ".join(job.allowed_types)})
    return out.getvalue()


def _from_row(row: Row) -> JobSpec:
    values: dict[str, Any] = {"id": row.text("id"), "model": row.text("model")}
    for name in _NUMBERS:
        if name in REQUIRED or row.optional(name) is not None:
            values[name] = row.number(name)
    for name in _COUNTS:
        if row.optional(name) is not None:
            values[name] = row.count(name)
    if row.optional("device_type") is not None:
        values["device_type"] = row.text("device_type")
    types = row.values.get("allowed_types")
    if types:
        values["allowed_types"] = tuple(types.split() if isinstance(types, str) else types)
    elastic = row.values.get("elastic")
    if elastic not in (None, ""):
        text = str(elastic).lower()
        if text not in ("true", "false", "1", "0"):
            raise ValueError(f"elastic must be true or false, got {elastic!r}")
        values["elastic"] = text in ("true", "1")
    return JobSpec(**values)
