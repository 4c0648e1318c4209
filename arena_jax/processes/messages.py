"""What is said on the lines between processes: requests and reports of the scheduler hook, why a group begins."""

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


def arrival_of_restart(left_s: float, why: str) -> dict[str, Any]:
    """Why a group begins after a death; ``left_s`` is when the one before it was lost, in unix seconds."""
    return {"swap": None, "left_s": left_s, "why": why}


def arrival_of_change(relaunch: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """Why a group begins under another plan: what the one before it, which left at ``left_s``, asked for."""
    return {
        "swap": {
            "from": relaunch["from"],
            "to": relaunch["plan"]["grid"],
            "reason": relaunch["reason"],
            "background_s": relaunch["background_s"],
            "prepared": relaunch["prepared"],
        },
        "id": relaunch["id"],
        "left_s": left_s,
        "why": relaunch["reason"],
    }
