"""Traces: which jobs arrive when. The layout is recognised by its header."""

import csv
import io
from pathlib import Path

from arena_jax.scheduler.jobs import JobSpec
from arena_jax.scheduler.traces import artifact, elasticflow, own, raw
from arena_jax.scheduler.traces.draw import draw_models as draw_models
from arena_jax.scheduler.traces.raw import RawJob as RawJob
from arena_jax.scheduler.traces.rows import TraceError as TraceError
from arena_jax.scheduler.traces.rows import read_text

# Columns that tell a layout; the first whose columns are all there is taken.
_LAYOUTS = (
    ("artifact", {"num_iteration", "model_name", "gpu_type"}),
    ("own", {"id", "arrival_s", "num_steps", "model"}),
    ("elasticflow", {"job_id", "submit_time", "iteration", "model_name"}),
    ("elasticflow", {"job_id", "submit_time", "iterations", "model_name"}),
    ("helios", {"job_id", "gpu_num", "submit_time", "duration"}),
    ("itp", {"job_id", "submission_time", "duration", "num_gpu"}),
    ("pai", {"job_name", "inst_num", "plan_gpu"}),
)


def load_trace(path: str | Path) -> list[JobSpec] | list[RawJob]:
    """Read a trace of any known layout.

    Returns jobs, or :class:`RawJob` where the layout names no models (give them to :func:`draw_models`).
    Raises :class:`TraceError` with the line numbers of all malformed rows.
    """
    text, source = read_text(path), str(path)
    layout = sniff(text, source)
    if layout == "json":
        data = raw.parse_json(text, source)
        records = data.get("jobs") if isinstance(data, dict) else data
        if not isinstance(records, list):
            raise TraceError(f"{source}: expected a list of jobs", hint='write [{"id": ...}] or {"jobs": [...]}')
        if records and isinstance(records[0], dict) and "jobid" in records[0]:
            return raw.load_philly(records, source)
        return own.load_json(records, source)
    if layout == "artifact":
        return artifact.load(path)
    if layout == "own":
        return own.load_csv(text, source)
    if layout == "elasticflow":
        return elasticflow.load(text, source)
    loaders = {"helios": raw.load_helios, "itp": raw.load_itp, "pai": raw.load_pai, "sacct": raw.load_sacct}
    return loaders[layout](text, source)


def sniff(text: str, source: str) -> str:
    """The layout's name; raise :class:`TraceError` where the header is none that is known."""
    if not text.strip():
        raise TraceError(f"{source} is empty")
    if text.lstrip()[0] in "[{":
        return "json"
    first = text.lstrip().splitlines()[0]
    if "JobID" in first and "|" in first:
        return "sacct"
    try:
        cells = next(csv.reader(io.StringIO(first)))
    except csv.Error as error:
        raise TraceError(f"{source}: line 1 is not CSV: {error}") from error
    header = {name.strip() for name in cells}
    for name, columns in _LAYOUTS:
        if columns <= header:
            return name
    if len(cells) == len(raw.PAI_COLUMNS):
        return "pai"
    raise TraceError(
        f"{source}: no known trace layout has the columns {', '.join(sorted(header))}",
        hint=f"our own needs {', '.join(own.REQUIRED)}",
    )
