"""What stands beside the arrays of a checkpoint, as JSON: enough to refuse a wrong one by name."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from arena_jax.errors import CheckpointError

FORMAT_VERSION = 1

LeafType = tuple[str, tuple[int, ...]]
"""Dtype name and shape of one saved leaf."""

# The order in which differences are looked for: a parameter says more than the moments made from it.
_GROUPS = ("params", "frozen", "state", "opt")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Where a run stood when it saved.

    Attributes:
        step: number of steps done; training goes on with this step, counted from 0.
        run_id, name: the run and its recipe.
        seed: the run's seed.
        model_fingerprint: the plan's fingerprint of the traced loss.
        leaves: dtype and shape by leaf name (``params/...``, ``opt/...``), of every saved leaf.
        plan_id, grid, plan: the plan that ran, for the record; restoring needs none of it.
        data_position: what the loader's ``get_state`` returned, or ``None`` when it cannot resume.
        data_fingerprint: hash of the training data, or ``None`` when the loader gives none.
        versions: library versions at the time of saving.
        saved_at: unix seconds.
    """

    step: int
    run_id: str
    name: str
    seed: int
    model_fingerprint: str
    leaves: Mapping[str, LeafType]
    plan_id: str
    grid: str
    plan: Mapping[str, Any]
    data_position: Any = None
    data_fingerprint: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    saved_at: float = field(default_factory=time.time)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, *, where: str) -> "CheckpointInfo":
        """Read what :meth:`to_json` wrote; raise :class:`CheckpointError` naming ``where``."""
        version = data.get("format_version") if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise CheckpointError(f"{where} is not a checkpoint of arena_jax: it has no format version")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format version {version}; this release reads up to {FORMAT_VERSION}",
                hint="resume with the release that wrote it, or a newer one",
            )
        try:
            values = {f.name: data[f.name] for f in fields(cls)}
            values["leaves"] = {k: (dtype, tuple(shape)) for k, (dtype, shape) in values["leaves"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} has a damaged description: {type(error).__name__} at {error}") from error
        return cls(**values)


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, ascending; none where there is no directory."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {str(directory)!r}: {error.strerror}") from error
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def check_leaves(saved: Mapping[str, LeafType], wanted: Mapping[str, LeafType], *, where: str) -> None:
    """Raise :class:`CheckpointError` that names the first leaf in which a checkpoint differs."""
    difference = _first_difference(saved, wanted)
    if difference is None:
        return
    name, there, here = difference
    if name.startswith("opt/"):
        message, hint = f"{where} was made with another optimizer", "give the optimizer it was made with"
    else:
        message, hint = f"{where} was made by another model", "give the model it was made with"
    raise CheckpointError(
        f"{message}: first difference at {name!r}: {_write(there)} in the checkpoint, {_write(here)} now",
        hint=f"{hint}, or start anew with resume 'never' or another checkpoint directory",
    )


def _first_difference(
    saved: Mapping[str, LeafType], wanted: Mapping[str, LeafType]
) -> tuple[str, LeafType | None, LeafType | None] | None:
    def rank(name: str) -> tuple[int, str]:
        group = name.partition("/")[0]
        return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), name)

    for name in sorted({*saved, *wanted}, key=rank):
        there, here = saved.get(name), wanted.get(name)
        if there != here:
            return name, there, here
    return None


def _write(leaf: LeafType | None) -> str:
    return "absent" if leaf is None else f"{leaf[0]}[{','.join(map(str, leaf[1]))}]"
