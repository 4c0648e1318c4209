"""From a problem and a wish for devices to a compiled program: where compiler and runtime meet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from arena_jax import home
from arena_jax.compiler import Constraints, Problem
from arena_jax.compiler.engines import available_engine
from arena_jax.compiler.inter_op.grid_search import FEWER
from arena_jax.compiler.search import PINNED
from arena_jax.compiler.stored import StoredSearch
from arena_jax.device_type import ENV_TYPE, cpu_type
from arena_jax.errors import ArenaError, InfeasibleError, UsageError
from arena_jax.grid import CATALOGUE, Allocation, Estimate, GridShape, IndexRow, Plan, PlanIndex, PlanStore
from arena_jax.recipe.schema import PlanSection
from arena_jax.runtime.contract import Compiled
from arena_jax.runtime.links import Links
from arena_jax.runtime.lower import compile_program

# What is inside jax's `device_kind`, most specific first, and the catalogue's name for it.
_KINDS = {
    "B200": "b200",
    "H200": "h200",
    "H100 PCIE": "h100-pcie",
    "H100": "h100-sxm",
    "A100-SXM4-40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "A100": "a100-80",
    "V100-SXM2-16GB": "v100-16",
    "V100": "v100-32",
    "P100": "p100",
    "L40S": "l40s",
    "L20": "l20",
    "A40": "a40",
    "A10": "a10",
    "T4": "t4",
    "TPU V6 LITE": "tpu-v6e",
    "TPU V5 LITE": "tpu-v5e",
    "TPU V5": "tpu-v5p",
}


# What jax and the catalogue call the same platform.
_PLATFORMS = {"gpu": "cuda"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with what is known of it beside it."""

    plan: Plan
    estimated_step_time_s: float | None = None
    engine: str = ""
    estimate: Estimate | None = None


class Planner:
    """Plans and compiles one problem on the devices at hand.

    Args:
        problem: what is trained.
        devices: the devices that plans may use, in the order of their numbers.
        constraints: pins and search switches.
        num_microbatches: pinned number, ``None`` for automatic.
        nonfinite: see ``compile_program``.
        store: where plans are kept; ``None`` searches every time.
        name: what people call the model, for who reads the store.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        devices: Sequence[jax.Device] | None = None,
        constraints: Constraints | None = None,
        num_microbatches: int | None = None,
        nonfinite: str = "stop",
        store: PlanStore | None = None,
        name: str = "",
    ) -> None:
        self.problem = problem
        self.devices = tuple(jax.devices() if devices is None else devices)
        self._constraints = constraints or Constraints()
        self._num_microbatches = num_microbatches
        self._nonfinite = nonfinite
        self._store = store
        self._name = name

    @cached_property
    def _search(self) -> StoredSearch:
        return StoredSearch(self.problem, self._store, name=self._name)

    def search(self, target: GridShape | Allocation) -> PlanIndex:
        """Every grid of the allocation, or the one grid."""
        allocation = target.allocation
        self.check_fits(allocation)
        constraints = self._constraints
        if isinstance(target, GridShape):  # which says its own number of stages
            constraints = replace(constraints, stages=None)
        return self._search.plan([target], constraints=constraints, num_microbatches=self._num_microbatches)

    def settle(self, num_microbatches: int) -> None:
        """Stay with the number of microbatches that a run has begun with, where it changes the result.

        Where the trace couples samples, the automatic choice must not follow the devices: a plan for
        other devices would compute something else.
        """
        if self._num_microbatches is None and self._search.coupled:
            self._num_microbatches = num_microbatches

    def compile(
        self, candidate: Candidate, device_numbers: Sequence[int] | None = None, *, links: Links | None = None
    ) -> Compiled:
        """Compile a plan for the first devices, or for those with the given numbers; ``links`` as it takes them."""
        self.check_fits(candidate.plan.grid.allocation)
        devices = self.devices if device_numbers is None else self._numbered(device_numbers)
        program = compile_program(
            self.problem,
            candidate.plan,
            devices,
            nonfinite=self._nonfinite,
            whole=self._search.trace,
            coupling=self._search.coupling,
            links=links,
        )
        return Compiled(
            program=program,
            estimated_step_time_s=candidate.estimated_step_time_s,
            engine=candidate.engine,
        )

    def _numbered(self, numbers: Sequence[int]) -> tuple[jax.Device, ...]:
        unknown = [i for i in numbers if not 0 <= i < len(self.devices)]
        if unknown:
            raise UsageError(f"there is no device {unknown[0]}", hint=f"devices are 0 to {len(self.devices) - 1}")
        return tuple(self.devices[i] for i in numbers)

    def given(self, plan: Plan) -> Candidate:
        """A plan that was not searched here."""
        return Candidate(plan=plan, engine="given")

    def recompile(self, target: GridShape | Allocation, device_numbers: Sequence[int] | None = None) -> Compiled:
        """Plan and compile for another target; what a swap needs."""
        return self.compile(choose(self.search(target), target), device_numbers)

    def check_fits(self, allocation: Allocation) -> None:
        """Raise :class:`UsageError` when the allocation is not part of the devices at hand."""
        first = self.devices[0]
        known = _known_type(first)
        wanted = CATALOGUE[allocation.device_type].platform
        if wanted == first.platform == "cpu" and allocation.device_type != known:
            raise UsageError(
                f"{allocation} asks for {allocation.device_type} devices; this process has {known} devices",
                hint=f"start it with {ENV_TYPE}={allocation.device_type}",
            )
        # Hardware that the catalogue lacks runs what is named for its nearest type.
        have = f"{len(self.devices)} x {first.device_kind}" if known is None else str(allocation_of(self.devices))
        if wanted != _PLATFORMS.get(first.platform, first.platform):
            raise UsageError(
                f"{allocation} asks for {allocation.device_type} devices; jax runs on {have} here",
                hint=f"use a grid of {known or first.platform}, or `arena-jax plan` for hardware that is elsewhere",
            )
        if allocation.num_devices > len(self.devices):
            raise UsageError(
                f"{allocation} needs {allocation.num_devices} devices, jax has {len(self.devices)}",
                hint=_how_to_get(allocation, first, len(self.devices), have),
            )


def plan_store() -> PlanStore | None:
    """The machine's store of plans; ``None`` where it cannot be written, which costs only time."""
    try:
        return PlanStore(home.plan_index())
    except ArenaError:
        return None


def choose(index: PlanIndex, target: GridShape | Allocation) -> Candidate:
    """The fastest feasible plan of an index.

    Raises:
        InfeasibleError: there is none; says why, grid by grid.
    """
    row = index.row(target) if isinstance(target, GridShape) else index.best(target)
    if row is None or row.plan is None:
        reasons = list(dict.fromkeys(f"{r.grid}: {r.reason}" for r in index if r.reason))
        why = "; ".join(reasons[:4]) or "no grid of it can be tiled"
        raise InfeasibleError(f"no plan fits {target}: {why}", hint=remedy(index))
    return candidate_of(row)


def remedy(index: PlanIndex) -> str:
    """What to change where no row of an index is feasible, by what excludes the rows."""
    if len(index) and all(row.reason.endswith(PINNED) for row in index):
        return "use another device type; the precision stays what the run began with"
    if any(row.least_memory_bytes is not None for row in index):
        return "use more devices, a smaller batch or fewer pins"
    if len(index) and all(row.reason.endswith(FEWER) for row in index):
        return "use fewer stages, at most as many as the model has layers to cut"
    return "use another batch, other numbers of devices or fewer pins"


def candidate_of(row: IndexRow) -> Candidate:
    """A feasible row as a candidate."""
    assert row.plan is not None
    step_time_s = None if row.estimate is None else row.estimate.step_time_s
    return Candidate(plan=row.plan, estimated_step_time_s=step_time_s, engine=row.engine, estimate=row.estimate)


def candidate_rows(index: PlanIndex, chosen: Plan | None) -> list[dict[str, Any]]:
    """The rows of a ``candidates`` event."""
    rows = []
    for row in index:
        plan, estimate = row.plan, row.estimate
        rows.append(
            {
                "grid": str(row.grid),
                "stages": row.grid.num_stages,
                "dp_tp": None if plan is None else [[stage.dp, stage.tp] for stage in plan.stages],
                "num_microbatches": row.num_microbatches,
                "step_time_s": None if estimate is None else estimate.step_time_s,
                "memory_bytes": None if estimate is None else estimate.memory_bytes,
                "feasible": row.feasible,
                "reason": row.reason,
                "engine": row.engine,
                "objectives": dict(row.objectives),
                "plan_id": None if plan is None else plan.plan_id,
                "chosen": plan is not None and chosen is not None and plan.plan_id == chosen.plan_id,
            }
        )
    return rows


def constraints_of(section: PlanSection) -> Constraints:
    """The pins of a recipe's ``plan`` section as the compiler takes them; ``both`` engines where both are there."""
    return Constraints(
        stages=section.stages,
        dp=_one(section.dp, "dp"),
        tp=_one(section.tp, "tp"),
        zero=section.zero,
        remat=section.remat,
        space=section.space,
        engine=available_engine(section.engine),
    )


def _one(sizes: int | list[int] | None, key: str) -> int | None:
    if not isinstance(sizes, list):
        return sizes
    if len(set(sizes)) != 1:
        raise UsageError(
            f"plan.{key}={sizes}: the search takes one size for all stages",
            hint=f"write plan.{key}={sizes[0] if sizes else 1}, or give a plan of your own with --plan",
        )
    return sizes[0]


def allocation_of(devices: Sequence[jax.Device]) -> Allocation:
    """The devices as an allocation of the catalogue: all of one kind, on equal nodes."""
    if not devices:
        raise UsageError("no devices were given")
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise UsageError(f"devices of unlike kinds: {', '.join(kinds)}", hint="use devices of one kind")
    hosts: Mapping[int, int] = {
        process: sum(d.process_index == process for d in devices) for process in {d.process_index for d in devices}
    }
    per_node = set(hosts.values())
    if len(per_node) > 1:
        raise UsageError(f"unlike numbers of devices per process: {sorted(per_node)}", hint="use equal nodes")
    return Allocation(_device_type(devices[0]), len(hosts), per_node.pop())


def _known_type(device: jax.Device) -> str | None:
    """The catalogue's name for a device, ``None`` when it has none."""
    if device.platform == "cpu":
        return cpu_type().name
    kind = device.device_kind.upper()
    return next((name for part, name in _KINDS.items() if part in kind), None)


def _device_type(device: jax.Device) -> str:
    known = _known_type(device)
    if known is not None:
        return known
    raise UsageError(
        f"{device.device_kind!r} is not in the hardware catalogue",
        hint="name a grid of the catalogue's nearest type, or give a plan",
    )


def _how_to_get(allocation: Allocation, device: jax.Device, num_devices: int, have: str) -> str:
    if device.platform == "cpu":
        n = allocation.num_devices
        return (
            f"set JAX_NUM_CPU_DEVICES={n} in the environment, or call jax.config.update('jax_num_cpu_devices', {n}) "
            f"before jax is first used; or use a grid of at most {num_devices} devices"
        )
    return f"use a grid of at most {have}"
