"""Raw cluster logs: who asked for how many devices, when and for how long. They name no model.

Layouts: ITP, Helios, PAI (task table), Philly (JSON), Slurm ``sacct``. Jobs without devices or
without a duration are left out; malformed rows are faults.
"""

import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from arena_jax.scheduler.traces.rows import Faults, Row, TraceError, csv_rows, parse_rows

PAI_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)


@dataclass(frozen=True, kw_only=True)
class RawJob:
    """A logged job: seconds on the log's clock, whole devices, and the type where the log names one."""

    id: str
    arrival_s: float
    duration_s: float
    num_devices: int
    device_type: str | None = None


def load_itp(text: str, source: str) -> list[RawJob]:
    """``job_id,submission_time,duration,num_gpu``."""

    def parse(row: Row) -> RawJob | None:
        return _job(
            row.text("job_id"), row.number("submission_time"), row.number("duration"), row.count("num_gpu", least=0)
        )

    return parse_rows(csv_rows(text), parse, source)


def load_helios(text: str, source: str) -> list[RawJob]:
    """SenseTime's ``cluster_log.csv``: gpu_num, submit_time, duration (times as dates or seconds)."""

    def parse(row: Row) -> RawJob | None:
        count = row.count("gpu_num", least=0)
        return _job(row.text("job_id"), _seconds(row.text("submit_time")), row.number("duration"), count)

    return parse_rows(csv_rows(text), parse, source)


def load_pai(text: str, source: str) -> list[RawJob]:
    """Alibaba's ``pai_task_table``, with or without its header: ``plan_gpu`` in percent of a device, per instance.

    Tasks of one job become one job with all their devices. Fractions are rounded up; tasks that never
    ended are left out.
    """
    fieldnames = None if text.lstrip().startswith(PAI_COLUMNS[0]) else PAI_COLUMNS
    tasks: dict[str, list[RawJob]] = {}

    def parse(row: Row) -> None:
        if row.optional("plan_gpu") is None or row.optional("end_time") is None or row.optional("start_time") is None:
            return
        start, end = row.number("start_time"), row.number("end_time")
        if end < start:
            raise ValueError(f"end_time {end:g} lies before start_time {start:g}")
        percent = row.number("plan_gpu") * row.number("inst_num")
        kind = row.optional("gpu_type")
        job = _job(row.text("job_name"), start, end - start, math.ceil(percent / 100), None if kind == "MISC" else kind)
        if job is not None:
            tasks.setdefault(job.id, []).append(job)

    faults = Faults(source)
    for row in csv_rows(text, fieldnames=fieldnames):
        try:
            parse(row)
        except ValueError as error:
            faults.add(row.line, error)
    faults.raise_any()
    if not tasks:
        raise TraceError(f"{source} holds no jobs with devices")
    return [
        RawJob(
            id=name,
            arrival_s=(first := min(job.arrival_s for job in group)),
            duration_s=max(job.arrival_s + job.duration_s for job in group) - first,
            num_devices=sum(job.num_devices for job in group),
            device_type=group[0].device_type,
        )
        for name, group in tasks.items()
    ]


def load_philly(records: list[Any], source: str) -> list[RawJob]:
    """Microsoft's ``cluster_job_log`` (JSON): attempts with the GPUs of each node.

    The duration is that of all attempts together, the device count the largest of any.
    """
    faults = Faults(source, "record", "record")
    jobs: list[RawJob] = []
    seen: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        try:
            if not isinstance(record, dict):
                raise ValueError("not an object")
            name = str(record["jobid"])
            if name in seen:
                raise ValueError(f"id {name!r} was already used by record {seen[name]}")
            seen[name] = number
            duration, count = 0.0, 0
            for attempt in record["attempts"]:
                if attempt.get("start_time") and attempt.get("end_time"):
                    duration += _seconds(attempt["end_time"]) - _seconds(attempt["start_time"])
                count = max(count, sum(len(node["gpus"]) for node in attempt["detail"]))
            if duration < 0:
                raise ValueError("an attempt ends before it starts")
            job = _job(name, _seconds(record["submitted_time"]), duration, count)
            if job is not None:
                jobs.append(job)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            faults.add(number, what)
    faults.raise_any()
    if not jobs:
        raise TraceError(f"{source} holds no jobs with devices")
    return jobs


def load_sacct(text: str, source: str) -> list[RawJob]:
    """``sacct --parsable2 --format=JobID,Submit,Elapsed,AllocTRES`` or with ElapsedRaw, ReqTRES, Start and End.

    Job steps (``123.batch``) are left out; devices come from ``gres/gpu[:type]=N``.
    """

    def parse(row: Row) -> RawJob | None:
        name = row.text("JobID")
        if "." in name:
            return None
        tres = row.optional("AllocTRES") or row.optional("ReqTRES") or row.optional("AllocGRES") or ""
        typed = re.search(r"gres/gpu:([\w-]+)[=:](\d+)", tres)
        plain = re.search(r"(?:gres/)?gpu[=:](\d+)", tres)
        count = int(plain[1]) if plain else int(typed[2]) if typed else 0
        if row.optional("ElapsedRaw") is not None:
            duration = row.number("ElapsedRaw")
        elif row.optional("Elapsed") is not None:
            duration = _elapsed(row.text("Elapsed"))
        elif row.optional("Start") is None or row.optional("End") is None:
            raise ValueError("no duration: ElapsedRaw, Elapsed, or Start and End are needed")
        else:
            duration = _seconds(row.text("End")) - _seconds(row.text("Start"))
        return _job(name, _seconds(row.text("Submit")), duration, count, typed[1] if typed else None)

    return parse_rows(csv_rows(text, delimiter="|"), parse, source)


def _job(
    name: str, arrival_s: float, duration_s: float, num_devices: int, device_type: str | None = None
) -> RawJob | None:
    if num_devices < 1 or duration_s <= 0:
        return None
    return RawJob(id=name, arrival_s=arrival_s, duration_s=duration_s, num_devices=num_devices, device_type=device_type)


def _seconds(text: str) -> float:
    """Seconds since the epoch from a date (UTC where it names no zone) or a number."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        try:
            date = datetime.fromisoformat(str(text).strip())
        except ValueError:
            raise ValueError(f"not a time: {text!r}") from None
        value = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"not a time of at least 0: {text!r}")
    return value


def _elapsed(text: str) -> float:
    """Seconds from Slurm's ``[days-]hours:minutes:seconds``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text)
    if match is None:
        raise ValueError(f"Elapsed is no duration: {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_json(text: str, source: str) -> Any:
    """Parsed JSON; raise :class:`TraceError` with the line of the fault."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source} is not JSON: {error}") from error
