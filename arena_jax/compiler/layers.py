"""Cluster the nodes of a graph into layers: the units that stages are made of.

Alpa's operator clustering (section 5.2 of its paper): among all ways to cut the program into K runs
of about equal work, take the one whose cuts carry the fewest bytes. A cut may lie between two
iterations of a ``lax.scan``, where it carries the scan's carry.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.flops import array_bytes, eqn_flops
from arena_jax.compiler.graph import PLACED, Graph
from arena_jax.compiler.state_spans import state_spans

MAX_LAYERS = 16
# A layer may hold this much more work than the mean before the clustering is loosened.
_SLACK = 1.5
_NUM_BUCKETS = 160
# A cut is worth considering only where it carries little more than the lightest one around it:
# within this share of the work on either side, at most this factor.
_NEIGHBOURHOOD = 1 / 8
_FACTOR = 1.25
# Bytes are told apart by this share of the lightest cut's.
_GRAIN = 1e-3
# With fewer layers than this, heavier cuts are better than none.
_FEW = 4


@dataclass(frozen=True, order=True)
class Position:
    """A place to cut: before node ``node``, or inside it before scan iteration ``iteration``."""

    node: int
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a graph.

    Attributes:
        starts: where each layer begins; the first is the start of the program.
        flops: forward FLOPs of each layer for one microbatch.
        live_bytes: bytes that cross into each layer (0 for the first).
    """

    starts: tuple[Position, ...]
    flops: tuple[float, ...]
    live_bytes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class _Candidate:
    position: Position
    work: float
    live_bytes: int


def find_layers(graph: Graph, max_layers: int = MAX_LAYERS, *, only_light: bool = True) -> Layers:
    """Cut the graph into at most ``max_layers`` layers of about equal FLOPs.

    Args:
        only_light: cut where little crosses even if that makes fewer layers; else make as many as equal FLOPs allow.
    """
    candidates, total = _candidates(graph)
    chosen = _cluster(candidates, total, max_layers, only_light=only_light)
    if len(chosen) + 1 < _FEW:  # one equation may outweigh all others: the convolution that images enter by
        more = _cluster(*_even_out(candidates, total, max_layers), max_layers, only_light=only_light)
        chosen = more if len(more) > len(chosen) else chosen
    work = {c.position: c.work for c in candidates}
    return _layers([replace(c, work=work[c.position]) for c in chosen], total)


def _cluster(candidates: Sequence[_Candidate], total: float, max_layers: int, *, only_light: bool) -> list[_Candidate]:
    buckets = _thin(candidates, total)
    chosen = _as_many_as_fit(_light(buckets, total) if only_light else buckets, total, max_layers)
    if len(chosen) + 1 < _FEW:  # a program that thins out towards its end has its light cuts there only
        more = _as_many_as_fit(buckets, total, max_layers)
        chosen = more if len(more) > len(chosen) else chosen
    return chosen


def _even_out(candidates: Sequence[_Candidate], total: float, max_layers: int) -> tuple[list[_Candidate], float]:
    """Count what cannot be cut and is heavier than a layer as one layer's share of the rest."""
    marks = [0.0, *(c.work for c in candidates), total]
    pieces = sorted((b - a for a, b in itertools.pairwise(marks)), reverse=True)
    share, rest = total / max_layers, total
    for heavier, piece in enumerate(pieces[: max_layers - 1], start=1):
        if piece <= share:
            break
        rest -= piece
        share = rest / (max_layers - heavier)
    evened = list(itertools.accumulate(min(b - a, share) for a, b in itertools.pairwise(marks)))
    return [replace(c, work=work) for c, work in zip(candidates, evened[:-1], strict=True)], evened[-1]


def _as_many_as_fit(cuts: Sequence[_Candidate], total: float, max_layers: int) -> list[_Candidate]:
    for count in range(min(max_layers, len(cuts) + 1), 1, -1):
        chosen = _choose(cuts, total, count)
        if chosen is not None:
            return chosen
    return []


def _layers(chosen: Sequence[_Candidate], total: float) -> Layers:
    marks = [0.0, *(c.work for c in chosen), total]
    return Layers(
        starts=(Position(0), *(c.position for c in chosen)),
        flops=tuple(b - a for a, b in itertools.pairwise(marks)),
        live_bytes=(0, *(c.live_bytes for c in chosen)),
    )


def _candidates(graph: Graph) -> tuple[list[_Candidate], float]:
    """Every place where a cut is possible, with the work before it and the bytes that cross."""
    last_use: dict[Any, int] = {}
    for index, node in enumerate(graph.nodes):
        for atom in node.eqn.invars:
            if not isinstance(atom, _compat.Literal):
                last_use[atom] = index
    for atom in graph.trace.jaxpr.outvars[:2]:
        if not isinstance(atom, _compat.Literal):
            last_use[atom] = len(graph.nodes)
    dying: dict[int, int] = {}
    found: list[_Candidate] = []
    live, work = 0, 0.0
    for index, node in enumerate(graph.nodes):
        if index and node.placed:
            found.append(_Candidate(Position(index), work, live))
        if not node.placed:
            live -= dying.pop(index, 0)
            continue
        flops = eqn_flops(node.eqn)
        if node.eqn.primitive.name == "scan" and not node.eqn.params["reverse"]:
            found.extend(_inside_scan(node.eqn, index, work, flops, live - _replaced(graph, node.eqn, index, last_use)))
        work += flops
        for var in node.eqn.outvars:
            until = last_use.get(var, index)
            if until > index and graph.flag(var) & PLACED:
                size = array_bytes(var)
                live += size
                dying[until] = dying.get(until, 0) + size
        live -= dying.pop(index, 0)
    spans = state_spans(graph)
    return [c for c in found if not any(_separates(c.position, *span) for span in spans)], work


def _separates(cut: Position, first: int, last: int) -> bool:
    """Whether a cut comes between two nodes, or between iterations of either."""
    return first < cut.node <= last or (cut.iteration > 0 and first == cut.node)


def _replaced(graph: Graph, eqn: Any, index: int, last_use: dict[Any, int]) -> int:
    """Bytes of the values that a scan starts from and nothing needs later: its carry takes their place."""
    num_consts, num_carry = _compat.scan_sizes(eqn)
    starts = {a for a in eqn.invars[num_consts : num_consts + num_carry] if not isinstance(a, _compat.Literal)}
    return sum(array_bytes(a) for a in starts if last_use[a] == index and graph.flag(a) & PLACED)


def _inside_scan(eqn: Any, index: int, work: float, flops: float, live: int) -> list[_Candidate]:
    num_consts, num_carry = _compat.scan_sizes(eqn)
    carry = sum(array_bytes(a) for a in eqn.invars[num_consts : num_consts + num_carry])
    length = eqn.params["length"]
    return [_Candidate(Position(index, i), work + flops * i / length, live + carry) for i in range(1, length)]


def _thin(candidates: Sequence[_Candidate], total: float) -> list[_Candidate]:
    """Keep the lightest cut of every equal share of the work, so that the program below stays small."""
    best: dict[int, _Candidate] = {}
    for candidate in candidates:
        # After the last real work a cut is always light, and would make the useful ones before it look heavy.
        if not 0 < candidate.work < total * (1 - 1 / _NUM_BUCKETS) or candidate.live_bytes == 0:
            continue
        bucket = int(candidate.work / total * _NUM_BUCKETS)
        if bucket not in best or candidate.live_bytes < best[bucket].live_bytes:
            best[bucket] = candidate
    return [best[b] for b in sorted(best)]


def _light(kept: Sequence[_Candidate], total: float) -> list[_Candidate]:
    """Cuts that carry little more than the lightest around them."""
    light = []
    for candidate in kept:
        near = [c.live_bytes for c in kept if abs(c.work - candidate.work) <= _NEIGHBOURHOOD * total]
        if candidate.live_bytes <= _FACTOR * min(near):
            light.append(candidate)
    return light


def _choose(cuts: Sequence[_Candidate], total: float, num_layers: int) -> list[_Candidate] | None:
    """Least bytes over ``num_layers - 1`` cuts such that no layer exceeds its share by the slack.

    Of cuts that carry about equal bytes, those that make the layers most alike (least sum of squared work), as
    Alpa does: a scalar that crosses beside the activations must not decide.
    """
    limit = total / num_layers * _SLACK
    marks = [0.0, *(c.work for c in cuts), total]
    grain = max(min((c.live_bytes for c in cuts), default=1) * _GRAIN, 1.0)
    costs = [0.0, *(round(c.live_bytes / grain) * grain for c in cuts), 0.0]
    end = len(marks) - 1
    nowhere = (float("inf"), float("inf"))
    # best[k][j]: least bytes, and squares, with the k-th cut at mark j; cut 0 is the start of the program.
    best = [[nowhere] * (end + 1) for _ in range(num_layers + 1)]
    came_from = [[0] * (end + 1) for _ in range(num_layers + 1)]
    best[0][0] = (0.0, 0.0)
    for k in range(1, num_layers + 1):
        for j in range(1, end + 1):
            if (j == end) != (k == num_layers):
                continue
            first = bisect_right(marks, marks[j] - limit - 1e-9 * total)
            for i in range(first, j):
                num_bytes, squares = best[k - 1][i]
                value = num_bytes + costs[j], squares + ((marks[j] - marks[i]) / total) ** 2
                if value < best[k][j]:
                    best[k][j], came_from[k][j] = value, i
    if best[num_layers][end] == nowhere:
        return None
    chosen, j = [], end
    for k in range(num_layers, 0, -1):
        j = came_from[k][j]
        if j:
            chosen.append(cuts[j - 1])
    return chosen[::-1]
