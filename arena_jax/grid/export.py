"""Plans for loops elsewhere: as Python that runs without this package."""

from importlib import resources
from pprint import pformat
from typing import TYPE_CHECKING

from arena_jax.errors import UsageError, nearest

if TYPE_CHECKING:
    from arena_jax.grid.plan import Plan

# Format -> the source file that holds everything but the plan.
_SOURCES = {"jax": "jax_step.py"}
_EMPTY = "PLAN: dict[str, Any] = {}\n"


def export(plan: "Plan", form: str) -> str:
    """The plan in another form; see :meth:`~arena_jax.grid.Plan.export`."""
    if form not in _SOURCES:
        raise UsageError(
            f"a plan cannot be exported as {form!r}{nearest(form, _SOURCES)}", hint=f"use {', '.join(_SOURCES)}"
        )
    source = (resources.files("arena_jax") / "exported" / _SOURCES[form]).read_text(encoding="utf-8")
    data = plan.to_json()
    for stage, numbers in zip(data["stages"], plan.device_numbers, strict=True):
        stage["devices"] = list(numbers)
    head, found, tail = source.partition(_EMPTY)
    assert found
    written = pformat(data, width=116, sort_dicts=False, compact=True)
    return f"{head}# Plan {plan.plan_id} for {plan.grid}.\nPLAN: dict[str, Any] = {written}\n{tail}"
