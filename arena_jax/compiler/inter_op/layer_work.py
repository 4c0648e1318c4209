"""Work and bytes of every layer on one mesh shape."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from arena_jax.compiler import _compat
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.layout import Axes
from arena_jax.compiler.intra_op.products import Product
from arena_jax.compiler.intra_op.sharding import Sharding
from arena_jax.compiler.layers import Layers
from arena_jax.compiler.problem import PARAMS, STATE
from arena_jax.compiler.residuals import Cast

DP, TP = w.AXES
Floats = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tied:
    """A parameter that layers of several stages may use: a stage without its first layer holds a copy.

    Attributes:
        first: layers that it belongs to.
        later: other layers that use it.
        held_bytes, copied_bytes, gradient_bytes: of one device, as in :class:`LayerWork`.
    """

    first: frozenset[int]
    later: frozenset[int]
    held_bytes: float
    copied_bytes: float
    gradient_bytes: float


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work of every layer on one mesh shape; arrays are indexed by layer.

    Attributes:
        works: ``[layer, SIZE]`` work of each layer, for all rows of the global batch.
        parameter_bytes: bytes of trainable parameters one device holds, those that dp shards apart.
        kept_bytes: those of ``parameter_bytes`` that are annotated whole over dp, which ZeRO-3 leaves so.
        spread_bytes: bytes of trainable parameters that are sharded over dp by themselves (experts).
        frozen_bytes: bytes of frozen parameters one device holds.
        copied_bytes: bytes of the copies of ``parameter_bytes`` in a narrower dtype that is computed in.
        gradient_bytes: bytes of one microbatch's gradients of them.
        tied: parameters that later layers use too.
        products: the unlike matrix products of all layers.
        times: ``[layer, product]`` how often each runs in a forward pass.
    """

    sharding: Sharding
    works: Floats
    parameter_bytes: Floats
    kept_bytes: Floats
    spread_bytes: Floats
    frozen_bytes: Floats
    copied_bytes: Floats
    gradient_bytes: Floats
    tied: tuple[Tied, ...] = ()
    products: tuple[Product, ...] = ()
    times: Floats = field(default_factory=lambda: np.zeros((0, 0)))


def layer_work(
    graph: Graph, layers: Layers, sharding: Sharding, casts: Mapping[int, Cast] = MappingProxyType({})
) -> LayerWork:
    """Sum nodes into layers; a scan that spans layers is shared out by iterations.

    Args:
        casts: number of a leaf -> how it is cast, where it is to a narrower dtype.
    """
    shares = _node_shares(graph, layers)
    works = w.empty(layers.num_layers)
    first_layer: dict[int, dict[int, float]] = {}
    used_in: dict[int, set[int]] = {}
    times: dict[Product, Floats] = {}
    # Casts and views of parameters may stand far from their use: the layer that uses one holds it.
    leaves_of: dict[Any, set[int]] = {var: {unit.leaf} for var, unit in graph.units.items()}
    for index, node in enumerate(graph.nodes):
        for layer, share in shares[index]:
            works[layer] += sharding.works[index] * share
            for product, count in sharding.products[index] if sharding.products else ():
                times.setdefault(product, np.zeros(layers.num_layers))[layer] += count * share
        used: set[int] = set()
        for atom in node.eqn.invars:
            if not isinstance(atom, _compat.Literal):
                used |= leaves_of.get(atom, set())
        if node.placed:
            for leaf_number in used:
                first_layer.setdefault(leaf_number, dict(shares[index]))
                used_in.setdefault(leaf_number, set()).update(layer for layer, _ in shares[index])
        elif used:
            leaves_of.update(dict.fromkeys(node.eqn.outvars, used))
    held, tied = _held(graph, layers, sharding, casts, first_layer, used_in)
    return LayerWork(
        sharding=sharding,
        works=works,
        parameter_bytes=held[0],
        kept_bytes=held[3],
        spread_bytes=held[1],
        frozen_bytes=held[2],
        copied_bytes=held[4],
        gradient_bytes=held[5],
        tied=tuple(tied),
        products=tuple(times),
        times=np.stack(list(times.values()), axis=1) if times else np.zeros((layers.num_layers, 0)),
    )


def _held(
    graph: Graph,
    layers: Layers,
    sharding: Sharding,
    casts: Mapping[int, Cast],
    first_layer: Mapping[int, Mapping[int, float]],
    used_in: Mapping[int, set[int]],
) -> tuple[Floats, list[Tied]]:
    """Bytes of one device ``[6, layer]``, and parameters that later layers use too.

    Rows: trainable, trainable over dp, frozen, annotated whole over dp, copied, gradients of one microbatch.
    """
    held = np.zeros((6, layers.num_layers))
    tied = []
    annotated = graph.trace.annotations.leaves
    for leaf_number, leaf in enumerate(graph.trace.leaves):
        if leaf.kind == STATE:
            continue
        used_axes = _axes_of(sharding.parameters.get(leaf_number, ()))
        split = math.prod(size for axis, size in ((DP, sharding.dp), (TP, sharding.tp)) if axis in used_axes)
        row = 2 if leaf.kind != PARAMS else int(DP in used_axes)
        first = first_layer.get(leaf_number, {0: 1.0})
        num_bytes = np.zeros(6)
        num_bytes[row] = leaf.num_bytes / split
        if row == 0:
            cast = casts.get(leaf_number, Cast())
            is_whole = leaf_number in annotated and annotated[leaf_number].is_whole_over_dp
            num_bytes[3:] = np.array([float(is_whole), cast.copied, cast.gradient]) * num_bytes[0]
            later = frozenset(used_in.get(leaf_number, set()) - set(first))
            if later:
                tied.append(
                    Tied(
                        first=frozenset(first),
                        later=later,
                        held_bytes=num_bytes[0],
                        copied_bytes=num_bytes[4],
                        gradient_bytes=num_bytes[5],
                    )
                )
        for layer, share in first.items():
            held[:, layer] += num_bytes * share
    return held, tied


def _axes_of(axes: Axes) -> set[str]:
    return {name for dim in axes for name in ((dim,) if isinstance(dim, str) else dim or ())}


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
