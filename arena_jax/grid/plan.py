"""The plan: one way to run one model at one global batch on one grid.

A plan holds only what is *executed*. Its estimate, the engine that found it and the profiles used
stand beside it (:mod:`arena_jax.grid.index`), so a new profile renames nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from arena_jax.errors import PlanError
from arena_jax.grid.alpa_terms import stages_from_alpa, to_alpa
from arena_jax.grid.export import export
from arena_jax.grid.shapes import Allocation, GridShape, Submesh, place, submesh_choices

FORMAT_VERSION = 1
_T = TypeVar("_T")

# Mesh axes of every stage, in mesh order. Devices of one tensor-parallel group are neighbours.
AXES = ("dp", "tp")

DimSpec = str | tuple[str, ...] | None
Spec = tuple[DimSpec, ...]
"""Partition spec of one array: per dim ``None``, an axis name, or several (major first)."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtype names of a run; ``None`` leaves the model's own choice.

    Attributes:
        parameter: dtype parameters are stored and updated in.
        compute: dtype parameters and floating batch leaves are cast to before the loss.
        accumulation: dtype gradients are accumulated in over microbatches.
        output: dtype the loss is reported in.
    """

    parameter: str | None = None
    compute: str | None = None
    accumulation: str = "float32"
    output: str = "float32"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        layers: first and last layer of the stage, inclusive.
        submesh: the devices it runs on.
        dp, tp: sizes of its mesh axes; ``dp * tp == submesh.num_devices``.
        zero: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters sharded over dp.
        remat: recompute the stage's forward pass in its backward pass.
        parameters: partition spec by parameter path; what is absent is replicated.
        activations: partition spec by value key (see ``compiler.trace``); the rest is XLA's choice.
    """

    layers: tuple[int, int]
    submesh: Submesh
    dp: int
    tp: int
    zero: int = 0
    remat: bool = False
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    activations: Mapping[str, Spec] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run one model (``model_fingerprint``) at one global batch on one grid."""

    model_fingerprint: str
    global_batch: int
    grid: GridShape
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    schedule: str = "1f1b"
    precision: Precision = field(default_factory=Precision)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def plan_id(self) -> str:
        """16 hex digits of blake2b over the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def device_numbers(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the device numbers inside the allocation (node-major)."""
        placed = place(self.grid.allocation, tuple(s.submesh for s in self.stages))
        assert placed is not None  # checked at construction
        return placed

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON object; equal plans give equal text."""
        return {
            "format_version": self.format_version,
            "model_fingerprint": self.model_fingerprint,
            "global_batch": self.global_batch,
            "grid": str(self.grid),
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "precision": {f.name: getattr(self.precision, f.name) for f in fields(Precision)},
            "stages": [
                {
                    "layers": list(stage.layers),
                    "submesh": str(stage.submesh),
                    "dp": stage.dp,
                    "tp": stage.tp,
                    "zero": stage.zero,
                    "remat": stage.remat,
                    "parameters": _specs_to_json(stage.parameters),
                    "activations": _specs_to_json(stage.activations),
                }
                for stage in self.stages
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Read what :meth:`to_json` wrote; raise :class:`PlanError` naming what is off."""
        try:
            version = data["format_version"]
            if version != FORMAT_VERSION:
                raise PlanError(
                    f"plan has format version {version!r}, this release reads {FORMAT_VERSION}",
                    hint="make the plan again with `arena-jax plan --save`",
                )
            return cls(
                model_fingerprint=_of(str, data["model_fingerprint"]),
                global_batch=_of(int, data["global_batch"]),
                grid=GridShape.parse(_of(str, data["grid"]), catalogue=None),
                num_microbatches=_of(int, data["num_microbatches"]),
                schedule=_of(str, data["schedule"]),
                precision=_precision_from_json(data["precision"]),
                stages=tuple(_stage_from_json(stage) for stage in data["stages"]),
            )
        except PlanError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"not a plan: {type(error).__name__} at {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file; raise :class:`PlanError` when it is missing or no plan."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read plan {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{str(path)!r} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise PlanError(f"{str(path)!r} does not hold a plan object")
        return cls.from_json(data)

    def dumps(self) -> str:
        """Return the plan as indented JSON text with a final newline."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    def export(self, form: str) -> str:
        """The plan for a loop of one's own elsewhere, as text.

        Args:
            form: ``"jax"``: a Python module with the mesh, the partition specs of parameters, gradients,
                optimizer state and activations, rematerialisation, and a training step for plans of one
                stage. It imports jax and nothing of this package.

        Raises:
            UsageError: another form.
        """
        return export(self, form)

    def to_alpa(self) -> dict[str, Any]:
        """The plan in Alpa's terms, as plain lists.

        ``forward_stage_layer_ids``, ``submesh_physical_shapes``, ``submesh_logical_shapes`` (dp, tp) and
        ``submesh_autosharding_option_dicts`` are what ``alpa.ManualStageOption`` takes; beside them
        ``num_micro_batches``, ``pipeline_schedule`` and, per stage, ``remat_layers``. Alpa has no words for
        specs, which its own integer program finds, and none for ZeRO-1, which is said as ZeRO-2.
        """
        return to_alpa(self)

    @classmethod
    def from_alpa(
        cls,
        terms: Mapping[str, Any],
        *,
        allocation: Allocation,
        model_fingerprint: str,
        global_batch: int,
        precision: Precision | None = None,
    ) -> "Plan":
        """Read what :meth:`to_alpa` wrote, or the fields of an ``alpa.ManualStageOption``.

        Such a plan says no specs: :func:`arena_jax.compiler.intra_op.specs.with_specs` finds them.

        Args:
            allocation, model_fingerprint, global_batch, precision: what Alpa's terms leave open.

        Raises:
            PlanError: the terms are incomplete, or do not tile the allocation.
        """
        stages = stages_from_alpa(terms)
        return cls(
            model_fingerprint=model_fingerprint,
            global_batch=global_batch,
            grid=GridShape(allocation, len(stages)),
            num_microbatches=terms.get("num_micro_batches", 1),
            precision=precision or Precision(),
            stages=tuple(
                StagePlan(
                    layers=stage["layers"],
                    submesh=Submesh(*stage["physical"]),
                    dp=stage["dp"],
                    tp=stage["tp"],
                    zero=stage["zero"],
                    remat=stage["remat"],
                )
                for stage in stages
            ),
        )

    def with_microbatches(self, num_microbatches: int) -> "Plan":
        return replace(self, num_microbatches=num_microbatches)


def zero_spec(spec: Spec, shape: Sequence[int], dp: int) -> Spec:
    """Shard over dp as well: the largest dim that is whole and that dp divides; else as it was."""
    used = {axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())}
    if dp == 1 or "dp" in used:
        return spec
    full = [*spec, *(None,) * (len(shape) - len(spec))]
    free = [i for i, dim in enumerate(full) if dim is None and shape[i] % dp == 0 and shape[i] >= dp]
    if not free:
        return spec
    full[max(free, key=lambda i: shape[i])] = "dp"
    while full and full[-1] is None:
        full.pop()
    return tuple(full)


def check(plan: Plan) -> None:
    """Raise :class:`PlanError` when a plan contradicts itself."""
    grid, stages = plan.grid, plan.stages
    if len(stages) != grid.num_stages:
        raise PlanError(f"plan for {grid} has {len(stages)} stages")
    if plan.schedule != "1f1b":
        raise PlanError(f"unknown schedule {plan.schedule!r}", hint="this release runs 1f1b")
    if plan.num_microbatches < 1 or plan.global_batch % plan.num_microbatches:
        raise PlanError(f"a batch of {plan.global_batch} does not split into {plan.num_microbatches} microbatches")
    submeshes = tuple(stage.submesh for stage in stages)
    total = sum(s.num_devices for s in submeshes)
    allowed = set(submeshes) <= set(submesh_choices(grid.allocation))
    if not allowed or total != grid.num_devices or place(grid.allocation, submeshes) is None:
        raise PlanError(f"submeshes {', '.join(map(str, submeshes))} do not tile {grid.allocation}")
    next_layer = 0
    for i, stage in enumerate(stages):
        first, last = stage.layers
        if first != next_layer or last < first:
            raise PlanError(f"stage {i} holds layers {first} to {last}, expected to start at {next_layer}")
        next_layer = last + 1
        if stage.dp * stage.tp != stage.submesh.num_devices:
            raise PlanError(f"stage {i}: dp {stage.dp} x tp {stage.tp} is not submesh {stage.submesh}")
        if stage.zero not in (0, 1, 2, 3):
            raise PlanError(f"stage {i}: zero must be 0, 1, 2 or 3, got {stage.zero!r}")
        for name, spec in (*stage.parameters.items(), *stage.activations.items()):
            used = [axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())]
            if len(set(used)) != len(used) or not set(used) <= set(AXES):
                raise PlanError(f"stage {i}: spec {spec} of {name!r} names an axis twice or an unknown one")


def _specs_to_json(specs: Mapping[str, Spec]) -> dict[str, list[Any]]:
    return {name: [list(dim) if isinstance(dim, tuple) else dim for dim in specs[name]] for name in sorted(specs)}


def _specs_from_json(data: Mapping[str, Any]) -> dict[str, Spec]:
    return {
        name: tuple(tuple(dim) if isinstance(dim, list) else dim for dim in _of(list, spec))
        for name, spec in data.items()
    }


def _precision_from_json(data: Mapping[str, Any]) -> Precision:
    names: dict[str, Any] = {key: None if name is None else _of(str, name) for key, name in data.items()}
    return Precision(**names)


def _of(kind: type[_T], value: Any) -> _T:
    """A JSON value of exactly this type: a plan that says something else is not guessed at."""
    if type(value) is not kind:
        raise TypeError(f"{value!r}, which is no {kind.__name__}")
    return value


def _stage_from_json(data: Mapping[str, Any]) -> StagePlan:
    nodes, devices = _of(str, data["submesh"]).split("x")
    first, last = data["layers"]
    return StagePlan(
        layers=(_of(int, first), _of(int, last)),
        submesh=Submesh(int(nodes), int(devices)),
        dp=_of(int, data["dp"]),
        tp=_of(int, data["tp"]),
        zero=_of(int, data["zero"]),
        remat=_of(bool, data["remat"]),
        parameters=_specs_from_json(data["parameters"]),
        activations=_specs_from_json(data["activations"]),
    )
