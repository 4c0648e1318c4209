"""Seconds and bytes of runs of layers, for every logical mesh, ZeRO level and rematerialisation.

Per layer and mesh the search keeps what scales with the rows of a microbatch and what does not, so
that any number of microbatches and any run of layers is a sum over prefixes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from arena_jax.compiler.cost import Hardware, Link, links_of
from arena_jax.compiler.inter_op.layer_work import LayerWork
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.products import product_seconds
from arena_jax.compiler.layers import Layers
from arena_jax.compiler.problem import PARAMS, Problem
from arena_jax.compiler.profiling.layer_programs import LayerProgram, LayerPrograms
from arena_jax.grid import Submesh

DP, TP = w.AXES
# A backward pass computes two products for every one of the forward pass.
_BACKWARD = 2.0
Floats = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a stage may be run, besides its mesh."""

    zero: int
    remat: bool


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """Costs of all runs of layers on one submesh and mesh shape.

    Attributes:
        optimizer_ratio: bytes of optimizer state per byte of trainable parameters.
        accumulator_ratio: bytes of gradient accumulator per byte of trainable parameters.
        row_shards: whether dp shards sum the gradients of their own rows.
        programs: of the layers, by which measurements are found; ``None`` uses none.
    """

    work: LayerWork
    hardware: Hardware
    submesh: Submesh
    optimizer_ratio: float
    accumulator_ratio: float
    live_bytes: Floats
    row_shards: bool
    programs: LayerPrograms | None = None

    @property
    def dp(self) -> int:
        return self.work.sharding.dp

    @property
    def tp(self) -> int:
        return self.work.sharding.tp

    @cached_property
    def _links(self) -> dict[str, Link]:
        dp, tp = links_of(self.hardware, self.submesh, self.dp, self.tp)
        return {DP: dp, TP: tp}

    def link(self, axis: str) -> Link:
        """The groups of devices along an axis."""
        return self._links[axis]

    @property
    def plain_update_s(self) -> Floats:
        """Per layer, seconds of the optimizer's update without ZeRO by the compile-time model alone."""
        held = self.work.parameter_bytes + self.work.spread_bytes
        moved = held * (2 + 2 * self.optimizer_ratio + self.accumulator_ratio)
        seconds: Floats = self.hardware.memory_s(moved)
        return seconds

    def _compute(self, num_microbatches: int) -> tuple[Floats, Floats]:
        """Per layer, seconds of one microbatch's forward and of its backward pass."""
        if num_microbatches not in self._known:
            self._known[num_microbatches] = self._computed(num_microbatches)
        passes: tuple[Floats, Floats] = self._known[num_microbatches][:2]
        return passes

    def measured_parts(self, num_microbatches: int, option: Option) -> tuple[Floats, Floats, Floats]:
        """What of :meth:`step_parts` was measured rather than computed."""
        self._compute(num_microbatches)
        forward, backward = self._known[num_microbatches][2:]
        passes = 2.0 if option.remat else 1.0
        compute = self._prefix(passes * forward + backward) * self._learnt("compute_s")
        if self.looks_known:
            crossing = self.hardware.pieces.crossing_s(self._kept(num_microbatches, option))
            compute = compute + crossing * self._learnt("compute_s")
        _, communication, once = self.step_parts(num_microbatches, option)
        # Axes of one group size have a curve of their own.
        known = [bool(link.measured) for link in self._links.values() if link.size > 1]
        share = sum(known) / len(known) if known else 0.0
        measured = ~np.isnan(self._update_measured_s)
        return compute, communication * share, once * float(measured.mean())

    def plain_s(self, num_microbatches: int) -> tuple[Floats, Floats]:
        """Per layer, seconds of a microbatch's forward and backward pass by the compile-time model alone."""
        forward, backward, _, _ = self._computed(num_microbatches, self.hardware.without_measurements)
        return forward, backward

    def layer_programs(self, num_microbatches: int) -> tuple[LayerProgram | None, ...]:
        """The layers' programs on one device; ``None`` for a layer that cannot be run alone."""
        if self.programs is None:
            return (None,) * len(self.work.works)
        return self.programs.of(self.work.sharding, num_microbatches)

    def _computed(
        self, num_microbatches: int, hardware: Hardware | None = None
    ) -> tuple[Floats, Floats, Floats, Floats]:
        hardware = hardware or self.hardware
        works, times = self.work.works, self.work.times
        moved = hardware.fused_s(works[:, w.MOVED]) / num_microbatches
        # A count is of forward and backward passes together, of three parts.
        moved = moved + works[:, w.NUM_OPS] / 3 * hardware.launch_s
        of_products = product_seconds(hardware, self.work.products, num_microbatches)
        counted = sum((p.flops * t for p, t in zip(self.work.products, times.T, strict=True)), np.zeros(len(works)))
        # What is no product of known shape (opaque kernels) runs at the rate of large ones.
        rest = np.zeros(len(works))
        for dtype in w.DTYPES:
            rest = rest + hardware.compute_s(works[:, w.flops_at(dtype)], dtype)
        all_flops = np.maximum(w.flops(works), 1.0)
        rest *= np.maximum(1 - counted / all_flops, 0.0) / num_microbatches
        forward = moved + rest + times @ of_products.forward
        backward = _BACKWARD * (moved + rest) + times @ of_products.backward
        measured = times @ of_products.measured_forward, times @ of_products.measured_backward
        if hardware.pieces.layers and self.looks_known:
            assert self.programs is not None
            likes = self.programs.likes()
            for i, program in enumerate(self.layer_programs(num_microbatches)):
                known = None if program is None else hardware.pieces.layer_s(program.key, likes[i])
                if known is not None:
                    forward[i], backward[i] = measured[0][i], measured[1][i] = known
        return forward, backward, *measured

    @cached_property
    def looks_known(self) -> bool:
        """Whether anything like one of the layers was measured: only then is it worth while to trace them."""
        likes = self.hardware.pieces.likes
        return bool(likes) and self.programs is not None and any(like in likes for like in self.programs.likes())

    def _learnt(self, part: str) -> float:
        return self.hardware.learnt(part, measured=self.looks_known)

    @cached_property
    def _update_measured_s(self) -> Floats:
        """Per layer, measured seconds of the optimizer's update without ZeRO; NaN where there is none."""
        found = np.full(len(self.work.works), np.nan)
        if self.hardware.pieces.updates and self.looks_known:
            for i, key in enumerate(self.update_keys()):
                found[i] = self.hardware.pieces.updates.get(key, np.nan)
        return found

    def update_keys(self) -> tuple[str, ...]:
        """Per layer, the key of the update of what it owns; empty where there is nothing to time."""
        assert self.programs is not None
        return tuple(self.programs.update_key(program) for program in self.layer_programs(1))

    def _communication(self, phase: str, axes: Sequence[str] = w.AXES) -> tuple[Floats, Floats]:
        """Per layer, seconds of a phase's collectives that scale with bytes and that do not."""
        scaling, fixed = np.zeros(len(self.work.works)), np.zeros(len(self.work.works))
        for axis, link in self._links.items():
            if axis not in axes:
                continue
            for kind in w.KINDS:
                at = w.collective_at(axis, kind, phase)
                num_bytes, counts = self.work.works[:, at], self.work.works[:, at + 1]
                seconds = getattr(link, f"{self.built_kind(kind, phase)}_s")
                start_s = seconds(0.0)
                scaling += seconds(num_bytes) - start_s
                fixed += counts * start_s
        return scaling, fixed

    @cached_property
    def _passes(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        return self._communication(w.FORWARD), self._communication(w.BACKWARD)

    @cached_property
    def _parameters_s(self) -> Floats:
        """Per layer, seconds of a microbatch to bring parameters to where its passes read them."""
        return sum(self._communication(w.PARAMETER), np.zeros(len(self.work.works)))

    @cached_property
    def _gradients_s(self) -> tuple[Floats, Floats]:
        """Per layer, seconds to reduce the gradients of its parameters once, over dp and over tp; each together."""
        return self._communication(w.GRADIENT, [DP])[0], self._communication(w.GRADIENT, [TP])[0]

    @cached_property
    def _largest_saved(self) -> Floats:
        """``[first, last]`` most bytes that one layer of the run keeps for its backward pass."""
        saved = self.work.works[:, w.SAVED]
        largest = np.zeros((len(saved), len(saved)))
        for first in range(len(saved)):
            largest[first, first:] = np.maximum.accumulate(saved[first:])
        return largest

    def _prefix(self, per_layer: Floats) -> Floats:
        """``[first, last]`` sums over runs of layers; meaningless below the diagonal."""
        total = np.concatenate([[0.0], np.cumsum(per_layer)])
        return total[None, 1:] - total[:-1, None]

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    def step_parts(self, num_microbatches: int, option: Option) -> tuple[Floats, Floats, Floats]:
        """Compute and communication seconds of one microbatch, and seconds once a step, per run of layers."""
        key = num_microbatches, option
        if key not in self._known:
            self._known[key] = self._step_parts(num_microbatches, option)
        parts: tuple[Floats, Floats, Floats] = self._known[key]
        return parts

    def memory(self, num_microbatches: int, in_flight: int, option: Option) -> Floats:
        """Peak bytes of one device per run of layers."""
        key = num_microbatches, in_flight, option
        if key not in self._known:
            self._known[key] = self._memory(num_microbatches, in_flight, option)
        peak: Floats = self._known[key]
        return peak

    def _step_parts(self, num_microbatches: int, option: Option) -> tuple[Floats, Floats, Floats]:
        (once_forward, once_backward), (forward, backward) = self._compute(num_microbatches), self._passes
        passes = 2.0 if option.remat else 1.0
        m = num_microbatches
        compute = passes * once_forward + once_backward
        crossing = self.hardware.pieces.crossing_s(self._kept(num_microbatches, option)) if self.looks_known else 0.0
        communication = passes * (forward[0] / m + forward[1]) + backward[0] / m + backward[1] + self._parameters_s
        over_dp, over_tp = self._gradients_s
        if option.zero >= 2 and self.scatters(option):
            over_dp = over_dp / 2  # a ring scatters in half the steps that it reduces to all in
        communication = communication + over_tp + (0.0 if self.reduces_late(option) else over_dp)
        held = self.work.parameter_bytes
        if option.zero == 3:
            gather_s = np.asarray(self._links[DP].all_gather_s(self.gathered_bytes))
            communication = communication + self.num_gathers(option) * gather_s
        share = self.dp if option.zero else 1
        updated = held / share + self.work.spread_bytes
        update = self.hardware.memory_s(updated * (2 + 2 * self.optimizer_ratio + self.accumulator_ratio))
        known = self._update_measured_s * updated / np.maximum(held + self.work.spread_bytes, 1.0)
        update = np.where(np.isnan(known), update, known)
        return (
            (self._prefix(compute) + crossing) * self._learnt("compute_s"),
            self._prefix(communication) * self._learnt("communication_s"),
            (self.sync_s(option) + self._prefix(update)) * self._learnt("gradients_and_update_s"),
        )

    def passes_s(self, num_microbatches: int, option: Option) -> Floats:
        """Seconds of the collectives inside one microbatch's passes, gradients left out, per run of layers."""
        (once_forward, ever_forward), (once_backward, ever_backward) = self._passes
        passes = 2.0 if option.remat else 1.0
        return self._prefix(
            (passes * once_forward + once_backward) / num_microbatches
            + (passes * ever_forward + ever_backward + self._parameters_s)
        )

    def reduces_late(self, option: Option) -> bool:
        """Whether gradients are reduced over dp once a step, since shards of rows sum their own (``row_shards.py``)."""
        return self.row_shards and option.zero < 2 and not self.work.spread_bytes.any()

    @cached_property
    def summed_bytes(self) -> Floats:
        """Bytes of the sums of gradients per run of layers: each parameter's once, in the dtype that they add up in."""
        held: Floats = self._prefix(self.work.parameter_bytes) + self._tied["held_bytes"]
        return held * self.accumulator_ratio

    def built_kind(self, kind: str, phase: str) -> str:
        """The collective that XLA makes of one that was counted: for a CPU it scatters no gradient."""
        whole = phase == w.GRADIENT and kind == "reduce_scatter" and self.hardware.device.platform == "cpu"
        return "all_reduce" if whole else kind

    def scatters(self, option: Option) -> bool:
        """Whether XLA scatters gradients where only shards of their sums are used; for a CPU it reduces them whole.

        A pipeline's sums are whole until ZeRO-2, for a program of their own reduces them before the update.
        """
        alone = self.submesh.num_devices == self.hardware.allocation.num_devices
        return option.zero >= (1 if alone else 2) and self.hardware.device.platform != "cpu"

    def _sums_s(self, option: Option) -> Floats:
        """Seconds to reduce the sums of gradients over dp per run of layers; they are reduced together."""
        link = self._links[DP]
        seconds = link.reduce_scatter_s if self.scatters(option) else link.all_reduce_s
        own, tied = self.work.parameter_bytes, self._tied["held_bytes"]
        return self._prefix(_scaling(seconds, own * self.accumulator_ratio)) + _scaling(
            seconds, tied * self.accumulator_ratio
        )

    @staticmethod
    def num_gathers(option: Option) -> int:
        """How often a microbatch gathers a parameter that ZeRO-3 shards: for each pass that reads it."""
        return 3 if option.remat else 2

    @cached_property
    def gathered_bytes(self) -> Floats:
        """Per layer, bytes of the parameters that ZeRO-3 gathers for a pass, in the dtype that is computed in."""
        work = self.work
        narrower = 1 - work.copied_bytes / np.maximum(work.parameter_bytes, 1.0)
        gathered: Floats = (work.parameter_bytes - work.kept_bytes) * narrower
        return gathered

    def sync_s(self, option: Option) -> Floats:
        """Seconds of the collectives at the end of a step, per run of layers."""
        held, kept = self.work.parameter_bytes, self.work.kept_bytes
        gather_s = self._links[DP].all_gather_s
        seconds = self._sums_s(option) if self.reduces_late(option) else np.zeros((len(held), len(held)))
        if option.zero in (1, 2):  # updated shards are gathered again
            return seconds + self._prefix(np.asarray(gather_s(held)))
        if option.zero == 3:
            return self._prefix(np.where(kept, np.asarray(gather_s(kept)), 0.0))
        return seconds

    def _kept(self, num_microbatches: int, option: Option) -> Floats:
        """Bytes that one microbatch keeps for its backward pass, per run of layers."""
        if not option.remat:
            return self._prefix(self.work.works[:, w.SAVED] / num_microbatches)
        inputs = self._prefix(self.live_bytes / (self.dp * num_microbatches))
        kept: Floats = inputs + self._largest_saved / num_microbatches
        return kept

    def forward_parts(self, num_microbatches: int) -> tuple[Floats, Floats]:
        """Compute and communication seconds of one microbatch's forward pass, per run of layers."""
        forward, _ = self._compute(num_microbatches)
        communication = self._passes[0]
        return (
            self._prefix(forward) * self._learnt("compute_s"),
            self._prefix(communication[0] / num_microbatches + communication[1] + self._parameters_s / 2)
            * self._learnt("communication_s"),
        )

    def fresh_memory_s(self, num_microbatches: int, option: Option, layers: tuple[int, int]) -> float:
        """Seconds of one microbatch that a loop over microbatches pays only once."""
        if not self.looks_known:
            return 0.0
        kept = float(self._kept(num_microbatches, option)[layers])
        return self.hardware.pieces.fresh_memory_s(kept) * self._learnt("compute_s")

    def _memory(self, num_microbatches: int, in_flight: int, option: Option) -> Floats:
        static = sum(self.static_bytes(option).values())
        saved = self.work.works[:, w.SAVED] / num_microbatches
        if not option.remat:
            return static + self._prefix(saved * in_flight)
        inputs = self.live_bytes / (self.dp * num_microbatches)
        return static + self._prefix(inputs * in_flight) + self._largest_saved / num_microbatches

    def static_bytes(self, option: Option) -> dict[str, Floats]:
        """Bytes of one device per run of layers that do not depend on rows, by what they hold.

        The copies in which a program computes lie beside the parameters, the gradients of one microbatch beside
        their sums. A program casts all parameters before its first microbatch: the copies are whole until ZeRO-3.
        """
        work, dp = self.work, self.dp
        tied = self._tied
        # Of a leaf that is tied to an earlier stage's, the copy has no optimizer state.
        held = self._prefix(work.parameter_bytes) + tied["held_bytes"]
        parameters = held + self._prefix(work.copied_bytes) + tied["copied_bytes"]
        if option.zero == 3:
            whole = self._prefix(work.kept_bytes)
            parameters = whole + (parameters - whole) / dp
        gradients = held * self.accumulator_ratio + self._prefix(work.gradient_bytes) + tied["gradient_bytes"]
        optimizer = self._prefix(work.parameter_bytes) * self.optimizer_ratio
        spread = self._prefix(work.spread_bytes)
        return {
            "parameters": parameters + spread + self._prefix(work.frozen_bytes),
            "gradients": gradients / (dp if option.zero >= 2 else 1) + spread * (1 + self.accumulator_ratio),
            "optimizer": optimizer / (dp if option.zero >= 1 else 1) + spread * self.optimizer_ratio,
        }

    @cached_property
    def _tied(self) -> dict[str, Floats]:
        """``[first, last]`` bytes that a run holds of parameters which belong to layers before it."""
        count = len(self.work.works)
        found = {name: np.zeros((count, count)) for name in ("held_bytes", "copied_bytes", "gradient_bytes")}
        for leaf in self.work.tied:
            uses = _meets(leaf.later, count) & ~_meets(leaf.first, count)
            for name, num_bytes in found.items():
                num_bytes += uses * getattr(leaf, name)
        return found


def _scaling(seconds: Callable[[Floats], Floats], num_bytes: Floats) -> Floats:
    """Seconds of collectives without what it takes to start them, which they share."""
    return np.asarray(seconds(num_bytes)) - seconds(np.zeros(()))


def _meets(layers: Iterable[int], count: int) -> Floats:
    """``[first, last]`` whether a run of layers has one of these."""
    marks = np.zeros(count)
    marks[list(layers)] = 1.0
    total = np.concatenate([[0.0], np.cumsum(marks)])
    has: Floats = total[None, 1:] - total[:-1, None] > 0
    return has


def mesh_cost(
    work: LayerWork,
    hardware: Hardware,
    submesh: Submesh,
    ratios: "StateRatios",
    layers: Layers,
    *,
    row_shards: bool = False,
    programs: LayerPrograms | None = None,
) -> MeshCost:
    return MeshCost(
        work=work,
        hardware=hardware,
        submesh=submesh,
        optimizer_ratio=ratios.optimizer,
        accumulator_ratio=ratios.accumulator,
        live_bytes=np.array(layers.live_bytes, float),
        row_shards=row_shards,
        programs=programs,
    )


@dataclass(frozen=True)
class StateRatios:
    """Bytes of optimizer state, and of gradient accumulators, per byte of trainable parameters."""

    optimizer: float
    accumulator: float

    @property
    def held(self) -> float:
        """Bytes a device holds per byte of parameters: these, their gradients, sums of gradients, state."""
        return 2 + self.optimizer + self.accumulator

    @property
    def update(self) -> float:
        """Bytes that the optimizer's update moves per byte of parameters."""
        return 2 + 2 * self.optimizer + self.accumulator


def state_ratios(problem: Problem) -> StateRatios:
    state = sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(problem.optimizer_struct))
    params = problem.of_kind(PARAMS)
    held = sum(leaf.num_bytes for leaf in params)
    wide = sum(
        leaf.num_bytes // np.dtype(leaf.dtype).itemsize * np.dtype(problem.accumulation_dtype(leaf.dtype)).itemsize
        for leaf in params
    )
    return StateRatios(state / max(held, 1), wide / max(held, 1))
