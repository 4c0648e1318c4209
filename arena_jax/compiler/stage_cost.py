"""Seconds and bytes of runs of layers, for every logical mesh, ZeRO level and rematerialisation.

Per layer and mesh the search keeps what scales with the rows of a microbatch and what does not, so
that any number of microbatches and any run of layers is a sum over prefixes.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from arena_jax.compiler import _compat
from arena_jax.compiler.cost import Hardware, Link, links_of
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.layers import Layers
from arena_jax.compiler.problem import PARAMS, STATE, Problem
from arena_jax.compiler.propagate import DP, Work
from arena_jax.compiler.sharding import Sharding
from arena_jax.grid import Submesh

# A backward pass computes two products for every one of the forward pass.
_BACKWARD = 2.0
Floats = np.ndarray


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work of every layer on one mesh shape, hardware left open; arrays are indexed by layer.

    Attributes:
        works: summed work of each layer, for all rows of the global batch.
        parameter_bytes: bytes of trainable parameters one device holds.
        frozen_bytes: bytes of frozen parameters one device holds.
    """

    sharding: Sharding
    works: tuple[Work, ...]
    parameter_bytes: Floats
    frozen_bytes: Floats


def layer_work(graph: Graph, layers: Layers, sharding: Sharding) -> LayerWork:
    """Sum nodes into layers; a scan that spans layers is shared out by iterations."""
    shares = _node_shares(graph, layers)
    works = [Work() for _ in range(layers.num_layers)]
    first_layer: dict[int, dict[int, float]] = {}
    # Casts and views of parameters may stand far from their use: the layer that uses one holds it.
    leaves_of: dict[Any, set[int]] = {var: {unit.leaf} for var, unit in graph.units.items()}
    for index, node in enumerate(graph.nodes):
        for layer, share in shares[index]:
            works[layer].merge(sharding.works[index], share)
        used: set[int] = set()
        for atom in node.eqn.invars:
            if not isinstance(atom, _compat.Literal):
                used |= leaves_of.get(atom, set())
        if node.placed:
            for leaf_number in used:
                first_layer.setdefault(leaf_number, dict(shares[index]))
        elif used:
            leaves_of.update(dict.fromkeys(node.eqn.outvars, used))
    held = np.zeros((2, layers.num_layers))
    for leaf_number, leaf in enumerate(graph.trace.leaves):
        if leaf.kind == STATE:
            continue
        split = sharding.tp if "tp" in sharding.parameters.get(leaf_number, ()) else 1
        row = 0 if leaf.kind == PARAMS else 1
        for layer, share in first_layer.get(leaf_number, {0: 1.0}).items():
            held[row, layer] += leaf.num_bytes / split * share
    return LayerWork(sharding=sharding, works=tuple(works), parameter_bytes=held[0], frozen_bytes=held[1])


def _node_shares(graph: Graph, layers: Layers) -> list[list[tuple[int, float]]]:
    """Per node, the layers it belongs to and its share in each."""
    starts = layers.starts
    shares: list[list[tuple[int, float]]] = []
    layer = 0
    for index, node in enumerate(graph.nodes):
        while layer + 1 < len(starts) and (starts[layer + 1].node, starts[layer + 1].iteration) <= (index, 0):
            layer += 1
        inside = [k for k in range(layer + 1, len(starts)) if starts[k].node == index]
        if not inside:
            shares.append([(layer, 1.0)])
            continue
        length = node.eqn.params["length"]
        bounds = [0, *(starts[k].iteration for k in inside), length]
        shares.append([(layer + i, (b - a) / length) for i, (a, b) in enumerate(itertools.pairwise(bounds))])
        layer += len(inside)
    return shares


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
    """

    work: LayerWork
    hardware: Hardware
    submesh: Submesh
    optimizer_ratio: float
    accumulator_ratio: float
    live_bytes: Floats

    @property
    def dp(self) -> int:
        return self.work.sharding.dp

    @property
    def tp(self) -> int:
        return self.work.sharding.tp

    @cached_property
    def _links(self) -> dict[str, Link]:
        dp, tp = links_of(self.hardware, self.submesh, self.dp, self.tp)
        return {"dp": dp, "tp": tp}

    @cached_property
    def _forward(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Per layer: compute seconds that scale and that do not, communication seconds likewise."""
        return self._per_layer(backward=False)

    @cached_property
    def _backward(self) -> tuple[Floats, Floats, Floats, Floats]:
        return self._per_layer(backward=True)

    def _per_layer(self, *, backward: bool) -> tuple[Floats, Floats, Floats, Floats]:
        out = np.zeros((4, len(self.work.works)))
        times = _BACKWARD if backward else 1.0
        for layer, work in enumerate(self.work.works):
            flops_s = sum(self.hardware.compute_s(f, dtype) for dtype, f in work.flops.items())
            out[0, layer] = times * (flops_s + self.hardware.memory_s(work.moved_bytes))
            out[1, layer] = times * work.num_ops / 3 * self.hardware.launch_s
            for (axis, kind, is_backward), (num_bytes, count) in work.collectives.items():
                if is_backward != backward:
                    continue
                link = self._links[axis]
                seconds = getattr(link, f"{kind}_s")
                latency = seconds(0.0) * count
                out[2, layer] += seconds(num_bytes) - seconds(0.0)
                out[3, layer] += latency
        return out[0], out[1], out[2], out[3]

    def _prefix(self, per_layer: Floats) -> Floats:
        """``[first, last]`` sums over runs of layers; meaningless below the diagonal."""
        total = np.concatenate([[0.0], np.cumsum(per_layer)])
        return total[None, 1:] - total[:-1, None]

    def step_parts(self, num_microbatches: int, option: Option) -> tuple[Floats, Floats, Floats]:
        """Compute and communication seconds of one microbatch, and seconds once a step, per run of layers."""
        forward, backward = self._forward, self._backward
        again = 1.0 if option.remat else 0.0
        m = num_microbatches
        compute = (1 + again) * (forward[0] / m + forward[1]) + backward[0] / m + backward[1]
        communication = (1 + again) * (forward[2] / m + forward[3]) + backward[2] / m + backward[3]
        dp = self._links[DP]
        held = self.work.parameter_bytes
        if option.zero == 3:
            communication = communication + 2 * np.array([dp.all_gather_s(b) for b in held])
        sync = np.array([dp.all_reduce_s(b) for b in held])
        if option.zero in (1, 2):  # updated shards are gathered again
            sync = sync + np.array([dp.all_gather_s(b) for b in held])
        share = self.dp if option.zero else 1
        updated = held * (2 + 2 * self.optimizer_ratio + self.accumulator_ratio) / share
        update = np.array([self.hardware.memory_s(b) for b in updated])
        return self._prefix(compute), self._prefix(communication), self._prefix(sync + update)

    def memory(self, num_microbatches: int, in_flight: int, option: Option) -> Floats:
        """Peak bytes of one device per run of layers."""
        dp = self.dp
        held = self.work.parameter_bytes
        parameters = held / (dp if option.zero == 3 else 1)
        gradients = held * self.accumulator_ratio / (dp if option.zero >= 2 else 1)
        optimizer = held * self.optimizer_ratio / (dp if option.zero >= 1 else 1)
        # The gradients of one microbatch exist beside their sums.
        passing = held / (dp if option.zero >= 2 else 1)
        static = parameters + gradients + optimizer + passing + self.work.frozen_bytes
        saved = np.array([w.saved_bytes for w in self.work.works]) / num_microbatches
        if not option.remat:
            return self._prefix(static + saved * in_flight)
        inputs = self.live_bytes / (self.dp * num_microbatches)
        count = len(saved)
        largest = np.array([[saved[i : j + 1].max() if j >= i else 0.0 for j in range(count)] for i in range(count)])
        return self._prefix(static + inputs * in_flight) + largest


def state_ratios(problem: Problem) -> tuple[float, float]:
    """Bytes of optimizer state, and of gradient accumulators, per byte of trainable parameters."""
    state = sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(problem.optimizer_struct))
    params = problem.of_kind(PARAMS)
    held = sum(leaf.num_bytes for leaf in params)
    wide = sum(
        leaf.num_bytes // np.dtype(leaf.dtype).itemsize * np.dtype(problem.accumulation_dtype(leaf.dtype)).itemsize
        for leaf in params
    )
    return state / max(held, 1), wide / max(held, 1)
