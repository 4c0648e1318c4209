"""The best plan of one grid at one number of microbatches, or why none fits."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from arena_jax.compiler.analysis import Analysis, Constraints
from arena_jax.compiler.cost import Hardware, transfer_s
from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.engines import engine
from arena_jax.compiler.flops import jaxpr_flops
from arena_jax.compiler.inter_op.cuts import Costs, StageChoice, best_stages, least_memory
from arena_jax.compiler.inter_op.shared_cores import WORK_IN_STAGES, SharedStage, pipeline_s
from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option
from arena_jax.compiler.inter_op.stage_facts import stage_facts
from arena_jax.compiler.inter_op.stage_plan import make_plan
from arena_jax.compiler.problem import PARAMS
from arena_jax.errors import PlanError, counted
from arena_jax.grid import Estimate, GridShape, IndexRow, Plan, StageEstimate, Submesh, logical_meshes, place, tilings

# Ends the reason of a grid with more stages than the model has layers.
FEWER = "fewer than stages"


def plan_grid(
    analysis: Analysis, grid: GridShape, hardware: Hardware, constraints: Constraints, num_microbatches: int
) -> IndexRow:
    layers = analysis.layers
    if grid.num_stages > layers.num_layers:
        return _row(grid, num_microbatches, f"the model has {counted(layers.num_layers, 'layer')} to cut, {FEWER}")
    search = GridSearch(analysis, grid, hardware, constraints, num_microbatches)
    if not search.meshes_exist:
        return _row(grid, num_microbatches, search.why_no_mesh())
    solver = search.solver
    # Where stages share cores none of them waits, and the slowest is nothing special.
    rounds = 1 if search.shares_cores else num_microbatches
    found = best_stages(grid, layers.num_layers, rounds, search.costs, search.boundary_s(), solver=solver)
    if found is None:
        return replace(search.nothing_fits(), engine=solver.name)
    stages = found.stages
    plan = make_plan(analysis, grid, num_microbatches, [(s, search.options[s.submesh][s.option]) for s in stages])
    estimate = search.estimate(stages)
    return IndexRow(
        grid=grid,
        num_microbatches=num_microbatches,
        plan=plan,
        estimate=estimate,
        engine=solver.name,
        objectives=found.objectives,
    )


def estimate_plan(analysis: Analysis, plan: Plan, hardware: Hardware) -> Estimate:
    """What the cost model says of a plan that was not searched just now; its specs are taken to be the search's.

    Raises:
        PlanError: the plan is of another number of layers.
    """
    if plan.stages[-1].layers[1] != analysis.layers.num_layers - 1:
        raise PlanError(f"the plan has other layers than the model, which has {analysis.layers.num_layers}")
    search = GridSearch(analysis, plan.grid, hardware, Constraints(), plan.num_microbatches)
    stages = []
    for stage in plan.stages:
        mesh = analysis.meshes(hardware, stage.submesh, stage.dp, stage.tp, search.solver)[0]
        options = search.options.setdefault(stage.submesh, [])
        options.append((mesh, Option(zero=stage.zero, remat=stage.remat)))
        first, last = stage.layers
        stages.append(StageChoice(first=first, last=last, submesh=stage.submesh, option=len(options) - 1))
    return search.estimate(stages)


def _row(grid: GridShape, num_microbatches: int, reason: str, least_memory_bytes: int | None = None) -> IndexRow:
    return IndexRow(
        grid=grid,
        num_microbatches=num_microbatches,
        plan=None,
        estimate=None,
        reason=reason,
        least_memory_bytes=least_memory_bytes,
    )


class GridSearch:
    """Cost tables of one grid at one number of microbatches."""

    def __init__(
        self, analysis: Analysis, grid: GridShape, hardware: Hardware, constraints: Constraints, num_microbatches: int
    ) -> None:
        self._analysis = analysis
        self._grid = grid
        self._hardware = hardware
        self._constraints = constraints
        self._m = num_microbatches
        self.solver = engine(constraints.engine)
        # A stage of fewer devices than there are cores leaves some idle while it runs alone.
        alone = grid.num_devices // grid.num_stages
        self.shares_cores = hardware.shares_cores and alone >= (os.cpu_count() or 1)
        self.options: dict[Submesh, list[tuple[MeshCost, Option]]] = {}
        self._needs: dict[tuple[int, Submesh], np.ndarray] = {}

    @property
    def _rows(self) -> int:
        return self._analysis.problem.global_batch // self._m

    def _meshes(self, submesh: Submesh, *, annotated: bool = True) -> list[tuple[int, int]]:
        pins = self._constraints
        return [
            (dp, tp)
            for dp, tp in logical_meshes(submesh.num_devices)
            if self._rows % dp == 0 and pins.dp in (None, dp) and pins.tp in (None, tp)
            if dp > 1 or any(option.zero == 0 for option in pins.options())
            if not annotated or not self._against_annotations(dp, tp)
        ]

    def _against_annotations(self, dp: int, tp: int) -> str:
        """Why the user's annotations exclude a mesh under these pins; empty where they do not."""
        trace = self._analysis.trace
        if all(option.zero == 3 for option in self._constraints.options()):
            for number, required in trace.annotations.leaves.items():
                if trace.leaves[number].kind == PARAMS and required.is_whole_over_dp:
                    return f"pinned zero 3 shards every parameter over dp, and {required.what} keeps it whole there"
        return trace.annotations.fault(dp, tp)

    @property
    def meshes_exist(self) -> bool:
        return any(all(self._meshes(s) for s in tiling) for tiling in tilings(self._grid))

    def why_no_mesh(self) -> str:
        pins = self._constraints
        against = self._why_annotations()
        if against:
            return against
        if all(option.zero for option in pins.options()):
            unpinned = GridSearch(self._analysis, self._grid, self._hardware, replace(pins, zero=0), self._m)
            if unpinned.meshes_exist:
                return f"pinned zero {pins.zero} shards over dp, and no stage here has a dp of 2 or more"
        if pins.dp is None and pins.tp is None:
            return f"no dp divides the {self._rows} rows of a microbatch here"
        pinned = " and ".join(f"{name} {size}" for name, size in (("dp", pins.dp), ("tp", pins.tp)) if size is not None)
        if pins.dp is not None and pins.tp is not None:
            sizes = {submesh.num_devices for tiling in tilings(self._grid) for submesh in tiling}
            if pins.dp * pins.tp not in sizes:
                here = " or ".join(map(str, sorted(sizes)))
                return f"pinned {pinned} make {pins.dp * pins.tp} devices a stage, a stage here has {here}"
        return f"pinned {pinned} forms no submesh here with {self._rows} rows a microbatch"

    def _why_annotations(self) -> str:
        """What the user's annotations say against every mesh of the tiling whose meshes they exclude."""
        faults: dict[str, None] = {}
        for submesh in dict.fromkeys(submesh for tiling in tilings(self._grid) for submesh in tiling):
            allowed = self._meshes(submesh, annotated=False)
            if self._meshes(submesh) or not allowed:
                continue
            faults.update(dict.fromkeys(self._against_annotations(dp, tp) for dp, tp in allowed))
        if not faults:
            return ""
        pins = self._constraints
        sizes = (("dp", pins.dp), ("tp", pins.tp))
        pinned = " and ".join(f"{name} {size}" for name, size in sizes if size is not None)
        return f"{f'pinned {pinned}: ' if pinned else ''}{next(iter(faults))}"

    def costs(self, stages_left: int, submesh: Submesh) -> Costs:
        """Best option per run of layers; a stage that is k from the end keeps k microbatches in flight."""
        count = self._analysis.layers.num_layers
        options = self._options(submesh)
        seconds = np.full((count, count), np.inf)
        option = np.zeros((count, count), int)
        below = np.tri(count, k=-1, dtype=bool)
        in_flight = min(stages_left, self._m)
        needs = np.full((count, count), np.inf)
        for i, (mesh, choice) in enumerate(options):
            compute, communication, once = mesh.step_parts(self._m, choice)
            memory = mesh.memory(self._m, in_flight, choice)
            needs = np.minimum(needs, np.where(below, np.inf, memory))
            # Once-a-step work is spread over the microbatches, so that one number ranks stages.
            total = (compute + communication + once / self._m) * self._weight(submesh)
            total = np.where((memory <= self._hardware.usable_bytes) & ~below, total, np.inf)
            better = total < seconds
            seconds[better], option[better] = total[better], i
        self._needs[stages_left, submesh] = needs
        return Costs(seconds=seconds, option=option)

    def _options(self, submesh: Submesh) -> list[tuple[MeshCost, Option]]:
        if submesh not in self.options:
            self.options[submesh] = [
                (mesh, option)
                for dp, tp in self._meshes(submesh)
                for mesh in self._analysis.meshes(self._hardware, submesh, dp, tp, self.solver)
                for option in self._constraints.options()
                if option.zero == 0 or dp > 1
            ]
        return self.options[submesh]

    def _weight(self, submesh: Submesh) -> float:
        """What a stage's microbatch counts in the sum over stages.

        Virtual CPU devices are shares of one pool of cores: while a stage waits, others run the faster,
        so that a step takes the work of all stages and microbatches at the rate of the node.
        """
        return self._m * submesh.num_devices / self._grid.num_devices if self.shares_cores else 1.0

    def boundary_s(self) -> np.ndarray:
        """Seconds to carry values into each layer and cotangents back: of one microbatch, or all where these add up."""
        return np.array([self._crossing_s(num_bytes) for num_bytes in self._analysis.layers.live_bytes])

    def _crossing_s(self, num_bytes: float, *, near: bool = False) -> float:
        """Seconds of one boundary, both ways, where so many bytes cross."""
        times = self._m if self.shares_cores else 1
        return 2 * (self._transfer_s(num_bytes, near=near) * times + self._dispatch_s) if num_bytes else 0.0

    def _transfer_s(self, num_bytes: float, *, near: bool = False) -> float:
        """Moving one microbatch's share of bytes to the next stage, which shares its node where ``near``."""
        return transfer_s(self._hardware, num_bytes / self._m, near or self._grid.allocation.num_nodes == 1)

    def _near(self, stages: Sequence[StageChoice]) -> list[bool]:
        """Per stage, whether it shares a node with the one before; a search prices cuts before it knows."""
        per_node = self._grid.allocation.devices_per_node
        placed = place(self._grid.allocation, tuple(s.submesh for s in stages)) or ()
        nodes = [{device // per_node for device in devices} for devices in placed]
        return [False, *(len(a | b) == 1 for a, b in itertools.pairwise(nodes))]

    @property
    def _dispatch_s(self) -> float:
        """Issuing the programs of one more stage; on virtual CPU devices nothing hides it."""
        return self._hardware.dispatch_s * (self._m if self._hardware.device.platform == "cpu" else 1)

    def nothing_fits(self) -> IndexRow:
        """The row of a grid on which nothing fits, with the bytes of the cut that needs fewest."""
        usable = self._hardware.usable_bytes
        least = least_memory(self._grid, self._analysis.layers.num_layers, lambda *at: self._needs[at])
        if not usable < least < np.inf:
            return _row(self._grid, self._m, "no cut of the layers fits the memory of every stage")
        reason = f"needs {_gib(least)} a device, {_gib(usable)} are usable: {_gib(least - usable)} too much"
        return _row(self._grid, self._m, reason, least_memory_bytes=int(least))

    def estimate(self, stages: Sequence[StageChoice]) -> Estimate:
        near = self._near(stages)
        facts = [self._stage_facts(i, s, len(stages), near=near[i]) for i, s in enumerate(stages)]
        times = [f.time_s for f in facts]
        weights = self._weights(stages, times)
        parts = {
            "compute_s": sum(w * f.compute_s for w, f in zip(weights, facts, strict=True)),
            "communication_s": sum(w * f.communication_s for w, f in zip(weights, facts, strict=True)),
            "boundary_s": self._boundaries_s(stages, near) * self._boundary_factor,
        }
        if len(stages) == 1 and self._m > 1:
            mesh, option = self.options[stages[0].submesh][stages[0].option]
            once = mesh.fresh_memory_s(self._m, option, (stages[0].first, stages[0].last))
            parts["compute_s"] -= (self._m - 1) * once
        if self._is_pool:
            # What stages wait for each other is shared out over what they do.
            waiting = self._pooled_s(stages, facts) / max(sum(parts.values()), 1e-30)
            parts = {cause: seconds * waiting for cause, seconds in parts.items()}
        breakdown = parts | {"gradients_and_update_s": self._update_s(stages, facts)}
        step_time_s = sum(breakdown.values())
        return Estimate(
            step_time_s=step_time_s,
            memory_bytes=max(f.memory_bytes for f in facts),
            device_memory_bytes=self._hardware.usable_bytes,
            stages=tuple(facts),
            flops=3 * jaxpr_flops(self._analysis.trace.jaxpr),
            imbalance=max(times) / (sum(times) / len(times)),
            measured_share=self._measured_share(stages, facts, breakdown),
            breakdown=breakdown,
        )

    @property
    def _is_pool(self) -> bool:
        """Whether stages are shares of one pool of cores, so that none of these is idle while one stage waits."""
        return self._hardware.shares_cores and self._grid.num_stages > 1

    def _weights(self, stages: Sequence[StageChoice], times: Sequence[float]) -> list[float]:
        """How often a microbatch of each stage counts in the step."""
        if self._is_pool:
            return [self._m * s.submesh.num_devices / self._grid.num_devices for s in stages]
        weights = [1.0] * len(stages)
        weights[int(np.argmax(times))] += self._m - 1
        return weights

    def _boundaries_s(self, stages: Sequence[StageChoice], near: Sequence[bool]) -> float:
        if self._is_pool:
            crossing = [self._transfer_s(self._analysis.layers.live_bytes[s.first]) for s in stages[1:]]
            issued = 2 * len(stages) - 1
            return self._m * (2 * sum(crossing) + issued * self._hardware.dispatch_s) * self._alone_share
        live_bytes = self._analysis.layers.live_bytes
        return sum(self._crossing_s(live_bytes[s.first], near=n) for s, n in zip(stages[1:], near[1:], strict=True))

    @property
    def _alone_share(self) -> float:
        """Part of the pool that one thread at work takes."""
        return share_of_cores(self._grid.num_devices)[1] / self._grid.num_devices

    @property
    def _boundary_factor(self) -> float:
        likes = self._hardware.pieces.likes
        measured = bool(likes) and any(like in likes for like in self._analysis.programs.likes())
        return self._hardware.learnt("boundary_s", measured=measured)

    def _pooled_s(self, stages: Sequence[StageChoice], facts: Sequence[StageEstimate]) -> float:
        """Seconds of the pipeline, updates left out."""
        n, hardware = self._grid.num_devices, self._hardware
        pooled = []
        for i, (stage, fact) in enumerate(zip(stages, facts, strict=True)):
            devices = stage.submesh.num_devices
            # Moving values and issuing programs takes one thread, the stage's programs all its devices.
            one_thread = self._alone_share * n / devices * self._boundary_factor
            before = fact.transfer_s if i else 0.0
            behind = facts[i + 1].transfer_s if i + 1 < len(facts) else 0.0
            pooled.append(
                SharedStage(
                    num_devices=devices,
                    forward_s=WORK_IN_STAGES * fact.forward_s + one_thread * (before + hardware.dispatch_s),
                    backward_s=WORK_IN_STAGES * (fact.time_s - fact.forward_s)
                    + one_thread * (behind + (hardware.dispatch_s if i + 1 < len(facts) else 0.0)),
                    limit=min(n / devices, hardware.speedup_alone),
                )
            )
        return pipeline_s(pooled, self._m)

    def _update_s(self, stages: Sequence[StageChoice], facts: Sequence[StageEstimate]) -> float:
        """Stages update at the same time, or in turn where they share cores."""
        if not self._is_pool:
            return max(f.update_s for f in facts)
        n = self._grid.num_devices
        return sum(f.update_s * s.submesh.num_devices / n for s, f in zip(stages, facts, strict=True))

    def _measured_share(
        self, stages: Sequence[StageChoice], facts: Sequence[StageEstimate], breakdown: Mapping[str, float]
    ) -> float:
        """The part of the step that was measured rather than computed: each cause by the stages' share of it."""
        measured = np.zeros(3)
        for stage in stages:
            mesh, option = self.options[stage.submesh][stage.option]
            parts = mesh.measured_parts(self._m, option)
            measured += [float(part[stage.first, stage.last]) for part in parts]
        whole = np.array([[f.compute_s, f.communication_s, f.update_s] for f in facts]).sum(axis=0)
        shares = np.minimum(measured / np.maximum(whole, 1e-30), 1.0)
        causes = ("compute_s", "communication_s", "gradients_and_update_s")
        found = sum(share * breakdown[cause] for share, cause in zip(shares, causes, strict=True))
        if self._hardware.pieces.transfers is not None:
            found += breakdown["boundary_s"]
        return float(found / max(sum(breakdown.values()), 1e-30))

    def _stage_facts(self, index: int, stage: StageChoice, num_stages: int, *, near: bool) -> StageEstimate:
        mesh, option = self.options[stage.submesh][stage.option]
        crossing = self._analysis.layers.live_bytes[stage.first] if index else 0
        return stage_facts(
            mesh,
            (stage.first, stage.last),
            self._m,
            min(num_stages - index, self._m),
            option,
            transfer_s=self._transfer_s(crossing, near=near) if crossing else 0.0,
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
