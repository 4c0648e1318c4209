"""Requests and reports of the scheduler hook as JSON, for the lines between processes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport


def request_to_json(request: Request) -> dict[str, Any]:
    """What :func:`arena_jax.control.read_request` reads; the id goes beside it."""
    target = request.target
    words = str(target) if isinstance(target, GridShape | Allocation) else _word(target)
    return {
        "target": words,
        "devices": None if request.devices is None else list(request.devices),
        "deadline_s": request.deadline_s,
        "reason": request.reason,
        "wait": request.wait,
    }


def _word(target: Any) -> str:
    return "pause" if isinstance(target, Pause) else "stop"


def report_to_json(report: StepReport) -> dict[str, Any]:
    """What :func:`report_from_json` reads."""
    return asdict(report) | {"grid": str(report.grid)}


def report_from_json(data: Mapping[str, Any]) -> StepReport:
    """Read what :func:`report_to_json` wrote."""
    fields = dict(data) | {"grid": GridShape.parse(data["grid"], None), "errors": tuple(data["errors"])}
    return StepReport(**fields)
