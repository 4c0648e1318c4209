"""Where a plan puts things: a mesh per stage, and the sharding of every array on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from arena_jax.errors import UsageError
from arena_jax.grid import AXES, Plan, Spec, StagePlan, zero_spec


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """One stage's mesh and the shardings its plan implies."""

    plan: StagePlan
    mesh: Mesh

    def named(self, spec: Spec = ()) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def replicated(self) -> NamedSharding:
        return self.named()

    def parameter(self, name: str, shape: Sequence[int]) -> NamedSharding:
        return self.named(fit_spec(self.plan.parameters.get(name, ()), shape, self.mesh))

    def gradient(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Gradients lie like parameters; from ZeRO-2 on they are also sharded over dp."""
        spec = self.parameter(name, shape).spec
        return (
            self.named(zero_spec(tuple(spec), shape, self.plan.dp)) if self.plan.zero >= 2 else self.named(tuple(spec))
        )

    def optimizer(self, name: str, parameter_shape: Sequence[int], shape: Sequence[int]) -> NamedSharding:
        """Optimizer state of a parameter: like it where the shapes agree, sharded over dp from ZeRO-1 on."""
        if tuple(shape) != tuple(parameter_shape):
            return self.replicated
        spec = tuple(self.parameter(name, parameter_shape).spec)
        return self.named(zero_spec(spec, shape, self.plan.dp) if self.plan.zero >= 1 else spec)

    def rows(self, ndim: int, num_rows: int, *, lead: int = 0) -> NamedSharding:
        """Rows over dp behind ``lead`` unsharded dims; replicated when dp does not divide them."""
        if ndim <= lead or num_rows % self.plan.dp:
            return self.replicated
        return self.named((*(None,) * lead, "dp"))


def place_stages(plan: Plan, devices: Sequence[jax.Device] | None = None) -> tuple[StagePlacement, ...]:
    """Build the stage meshes of a plan on ``devices`` (default: the first ones jax has)."""
    needed = plan.grid.num_devices
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < needed:
        platform = devices[0].platform if devices else "any"
        hint = f"use a grid of at most {len(devices)} devices"
        if platform == "cpu":
            hint += f", or set jax_num_cpu_devices={needed} (or JAX_NUM_CPU_DEVICES={needed}) before jax starts"
        raise UsageError(
            f"the plan for {plan.grid} needs {needed} devices, jax has {len(devices)} ({platform})", hint=hint
        )
    placements = []
    for stage, numbers in zip(plan.stages, plan.device_numbers, strict=True):
        grid = np.array([devices[i] for i in numbers]).reshape(stage.dp, stage.tp)
        mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        placements.append(StagePlacement(plan=stage, mesh=mesh))
    return tuple(placements)


def fit_spec(spec: Spec, shape: Sequence[int], mesh: Mesh) -> Spec:
    """The spec as far as the shape allows: a stacked piece may not divide where the whole does."""
    out: list[Any] = []
    for dim, axes in zip(shape, (*spec, *(None,) * len(shape)), strict=False):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        size = int(np.prod([mesh.shape[name] for name in names])) if names else 1
        out.append(axes if size > 1 and dim % size == 0 else None)
    while out and out[-1] is None:
        out.pop()
    return tuple(out)
