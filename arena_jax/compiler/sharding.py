"""Choose how parameters are sharded over the tensor-parallel axis (first form of the intra-op search).

Rows go over dp. For tp every group of alike parameters (same place in repeated layers, same shape)
picks one dim or none, greedily in program order by the cost of the whole program, which recovers
Megatron's column-then-row pattern because a row-parallel matrix avoids the reduction that its
column-parallel predecessor would owe. The plan-search issue replaces this by an integer program.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.flops import HEAVY
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.problem import STATE
from arena_jax.compiler.propagate import DP, TP, Axes, Propagator, Work

# Passes over all parameters; the second may revise the first, which saw only what came before.
_SWEEPS = 2


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The sharding of a whole program on one logical mesh.

    Attributes:
        parameters: leaf number -> axes.
        works: per graph node, its cost for all rows.
        specs: value key -> axes, the values to constrain.
        unknown: primitives without a rule, which are replicated.
    """

    dp: int
    tp: int
    parameters: Mapping[int, Axes]
    works: tuple[Work, ...]
    specs: Mapping[str, Axes]
    unknown: tuple[str, ...]


class ShardingSearch:
    """Finds shardings for one graph; decisions for one tp size are shared by all dp sizes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._equations = [(node.key, node.eqn) for node in graph.nodes]
        self._leaves = {var: unit.leaf for var, unit in graph.units.items()}
        self._stacked = _stacked_leaves(graph)
        self._decisions: dict[int, dict[int, Axes]] = {}
        self._found: dict[tuple[int, int], Sharding] = {}

    def find(self, dp: int, tp: int) -> Sharding:
        """The sharding for ``dp x tp``."""
        if (dp, tp) not in self._found:
            parameters = self._decide(tp)
            propagator = Propagator(dp, tp)
            works = self._run(propagator, parameters)
            self._found[dp, tp] = Sharding(
                dp=dp,
                tp=tp,
                parameters=parameters,
                works=tuple(works),
                specs=dict(propagator.specs),
                unknown=tuple(propagator.unknown),
            )
        return self._found[dp, tp]

    def _run(self, propagator: Propagator, parameters: Mapping[int, Axes]) -> list[Work]:
        trace = self._graph.trace
        env: dict[Any, Axes] = {}
        params = set()
        for var, leaf in self._leaves.items():
            if trace.leaves[leaf].kind != STATE:
                env[var] = parameters.get(leaf, (None,) * len(var.aval.shape))
                params.add(var)
        for var, has_rows in zip(trace.batch_vars, trace.batch_has_rows, strict=True):
            if has_rows:
                env[var] = (DP, *(None,) * (len(var.aval.shape) - 1))
        return propagator.run(self._equations, env, params)

    def _decide(self, tp: int) -> dict[int, Axes]:
        if tp == 1:
            return {}
        if tp in self._decisions:
            return self._decisions[tp]
        propagator = Propagator(1, tp)
        chosen: dict[int, Axes] = {}
        best = _score(self._run(propagator, chosen), self._held(chosen, tp))
        groups = self._groups()
        for _ in range(_SWEEPS):
            before = chosen
            for group in groups:
                winner = None
                for axes in self._options(group[0], tp):
                    if chosen.get(group[0]) == axes:
                        continue
                    trial = {k: v for k, v in chosen.items() if k not in group}
                    if axes is not None:
                        trial |= dict.fromkeys(group, axes)
                    score = _score(self._run(propagator, trial), self._held(trial, tp))
                    if score < best:
                        best, winner = score, trial
                chosen = winner or chosen
            if chosen == before:
                break
        self._decisions[tp] = chosen
        return chosen

    def _groups(self) -> list[list[int]]:
        """Parameters that are decided together, in order of first use; tables that are only looked up last.

        A table decides how the stream it starts lies, and should follow the products, not lead them.
        """
        first_use = _first_uses(self._equations, dict(self._leaves))
        groups: dict[Any, list[int]] = {}
        for leaf_number in sorted(first_use, key=lambda i: first_use[i]):
            leaf = self._graph.trace.leaves[leaf_number]
            if leaf.kind == STATE:
                continue
            place = re.sub(r"\d+", "#", leaf.name), leaf.shape
            groups.setdefault(place, []).append(leaf_number)
        return list(groups.values())

    def _options(self, leaf_number: int, tp: int) -> list[Axes | None]:
        shape = self._graph.trace.leaves[leaf_number].shape
        first = 1 if leaf_number in self._stacked else 0
        dims = [d for d in range(first, len(shape)) if shape[d] % tp == 0]
        return [None, *(tuple(TP if i == d else None for i in range(len(shape))) for d in dims)]

    def _held(self, parameters: Mapping[int, Axes], tp: int) -> float:
        """Bytes of parameters one device holds."""
        total = 0.0
        for leaf_number, leaf in enumerate(self._graph.trace.leaves):
            if leaf.kind != STATE:
                total += leaf.num_bytes / (tp if TP in parameters.get(leaf_number, ()) else 1)
        return total


def _score(works: Sequence[Work], held_bytes: float) -> float:
    """Work of one device in byte-like units: what ranks shardings of one mesh against each other.

    FLOPs weigh far more than on real hardware, for a mesh with tp > 1 is only worth listing when it
    splits the work; meshes without tp compete with it on true costs. A byte between devices weighs
    five bytes through memory, and an all-reduce moves twice what a gather does.
    """
    total = 4 * held_bytes
    for work in works:
        total += 3 * sum(work.flops.values()) / 4 + 3 * work.moved_bytes
        for (_, kind, _), (num_bytes, _) in work.collectives.items():
            total += 5 * num_bytes * (2 if kind == "all_reduce" else 1)
    return total


def _first_uses(equations: Sequence[tuple[str, Any]], leaves: dict[Any, int]) -> dict[int, tuple[bool, int]]:
    """Leaf -> whether it is only looked up, and the order of its first product or look-up.

    Follows casts and views of leaves into scans and calls. What no product or look-up reads (biases,
    scales, positions that are added) has no decision of its own: it follows what it meets.
    """
    found: dict[int, tuple[bool, int]] = {}
    order = 0

    def walk(eqns: Sequence[Any], known: dict[Any, int]) -> None:
        nonlocal order
        for eqn in eqns:
            order += 1
            name = eqn.primitive.name
            behind = [None if isinstance(a, _compat.Literal) else known.get(a) for a in eqn.invars]
            if name in HEAVY or name == "gather":
                for leaf in behind:
                    if leaf is not None:
                        use = (name == "gather", order)
                        found[leaf] = min(found.get(leaf, use), use)
                continue
            held = {leaf for leaf in behind if leaf is not None}
            if not held:
                continue
            try:
                body = _compat.inner_jaxpr(eqn)[0]
            except KeyError:
                body = None
            if body is not None and len(body.invars) == len(behind):
                walk(body.eqns, {v: leaf for v, leaf in zip(body.invars, behind, strict=True) if leaf is not None})
            elif len(eqn.invars) == 1:
                known.update(dict.fromkeys(eqn.outvars, held.pop()))

    walk([eqn for _, eqn in equations], leaves)
    return found


def _stacked_leaves(graph: Graph) -> set[int]:
    """Leaves that a scan slices: their first dim is the layer and is never sharded."""
    producers = {var: node.eqn for node in graph.nodes for var in node.eqn.outvars}
    found: set[int] = set()
    for node in graph.nodes:
        if node.eqn.primitive.name != "scan":
            continue
        for atom in node.eqn.invars[sum(_compat.scan_sizes(node.eqn)) :]:
            while atom in producers and producers[atom].primitive.name == "convert_element_type":
                atom = producers[atom].invars[0]
            if not isinstance(atom, _compat.Literal) and atom in graph.units:
                found.add(graph.units[atom].leaf)
    return found
