"""The intra-op search space of a program on one mesh: nodes that choose, values that follow.

Nodes are parameters, the batch, and operations whose partitioning is worth deciding: products,
look-ups, joins of two streams, the carries of scans. Every other operation follows the largest of
its operands, so that each value's layout is a function of one node's strategy. A node's cost holds
the work of all that follows it; an edge holds what it takes to bring a value from the layout its
node gives it to the one a reader needs. Nothing here knows hardware: work is priced later.

Alpa, section 4 (arXiv 2201.12023), on forward equations with the backward pass in the costs.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from arena_jax.compiler.annotations import Annotations
from arena_jax.compiler.dims import ELEMENTWISE, Rule
from arena_jax.compiler.flops import HEAVY, eqn_flops
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.flat import CARRY, Flat, Op, Value
from arena_jax.compiler.intra_op.flow import Flow
from arena_jax.compiler.intra_op.layout import DP, TP, Layout, MeshShape
from arena_jax.compiler.intra_op.partition import Assignment, Partitioned, follow, free_factors, partition, stacked_work
from arena_jax.compiler.problem import PARAMS, STATE, Leaf

Layouts = tuple[Layout, ...]
"""A layout per strategy."""

_LOOKUPS = frozenset({"gather", "scatter", "scatter-add", "scatter_add"})
_JOINS = ELEMENTWISE | {"concatenate", "stack"}
# Products of at least this part of the largest one's FLOPs are never run alike by all of a tp group.
_LARGE = 0.05
# FLOPs per element of the results above which an operation decides its own partitioning.
_INTENSE = 8
# Streams smaller than this part of the largest value are not worth a decision where they meet.
_JOIN_SHARE = 1 / 64


@dataclass(eq=False)
class Node:
    """One decision.

    Attributes:
        strategies: what is chosen among: assignments of an operation, or layouts of an input.
        work: ``[strategy, SIZE]`` work of the operation and of all that follows it.
        parameter_bytes: ``[strategy]`` bytes of trainable parameters that one device holds.
        frozen_bytes: ``[strategy]`` bytes of frozen ones.
        group: nodes of one group take the same strategy.
    """

    name: str
    strategies: tuple[Assignment, ...] | Layouts
    work: w.Floats
    parameter_bytes: w.Floats
    frozen_bytes: w.Floats
    group: object


@dataclass(frozen=True)
class Reading:
    """A value that another node's operation reads: an edge.

    Attributes:
        table: ``[source strategy, reader strategy]`` row of the work in ``works``.
        works: ``[row, SIZE]``.
    """

    source: int
    reader: int
    table: np.ndarray
    works: w.Floats
    times: float


@dataclass(frozen=True)
class Led:
    """A value whose layout a node decides."""

    node: int
    layouts: Layouts


@dataclass(frozen=True)
class Step:
    """What replaying a choice needs of one operation: the node that decides, and how operands are led."""

    op: Op
    node: int | None
    decides: bool
    leader: int
    operands: tuple[Led | None, ...]
    needs_gradient: tuple[bool, ...]
    is_parameter: tuple[bool, ...]


@dataclass(eq=False)
class Strategies:
    """The whole space on one mesh.

    Attributes:
        leaves: leaf number -> how the parameter lies.
        unknown: primitives without a rule, which are replicated.
    """

    mesh: MeshShape
    nodes: list[Node] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    leaves: dict[int, Led] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)


def strategies_of(
    flat: Flat,
    flow: Flow,
    leaves: Sequence[Leaf],
    batch_has_rows: Sequence[bool],
    mesh: MeshShape,
    annotations: Annotations | None = None,
) -> Strategies:
    """Build the space of one program on one mesh, which must be able to hold what annotations require."""
    return _Builder(flat, flow, leaves, batch_has_rows, mesh, annotations or Annotations()).build()


class _Builder:
    def __init__(
        self,
        flat: Flat,
        flow: Flow,
        leaves: Sequence[Leaf],
        batch_has_rows: Sequence[bool],
        mesh: MeshShape,
        annotations: Annotations,
    ) -> None:
        self._flat = flat
        self._flow = flow
        self._mesh = mesh
        self._out = Strategies(mesh)
        self._led: list[Led | None] = [None] * flat.num_values
        self._leaves = leaves
        self._batch_has_rows = batch_has_rows
        self._annotations = annotations
        largest = max((v.num_bytes for op in flat.ops for v in op.results), default=0)
        self._join_bytes = largest * _JOIN_SHARE
        products = (op for op in flat.ops if op.name in HEAVY)
        self._most_flops = max((op.times * eqn_flops(op.eqn) for op in products), default=0.0)
        self._partitioned: dict[object, Partitioned] = {}
        self._followed: dict[object, tuple[tuple[Partitioned, ...], w.Floats]] = {}
        self._edges: dict[object, tuple[np.ndarray, w.Floats]] = {}

    def build(self) -> Strategies:
        self._inputs()
        for index, op in enumerate(self._flat.ops):
            self._op(index, op)
        self._close_carries()
        return self._out

    # Inputs of the program.

    def _inputs(self) -> None:
        for number, value in self._flat.leaves.items():
            leaf = self._leaves[number]
            if leaf.kind == STATE:
                continue
            layouts = tuple(self._leaf_layouts(number, value))
            share = np.array([self._mesh.share(layout) for layout in layouts])
            trainable = leaf.kind == PARAMS
            node = Node(
                name=leaf.name,
                strategies=layouts,
                work=w.empty(len(layouts)),
                parameter_bytes=leaf.num_bytes * share * trainable,
                frozen_bytes=leaf.num_bytes * share * (not trainable),
                group=("leaf", leaf.shape, leaf.kind, self._flow.first_use.get(number, number)),
            )
            led = Led(self._add(node), layouts)
            self._led[value.number] = self._out.leaves[number] = led
        for position, value in self._flat.batch.items():
            if not self._batch_has_rows[position]:
                continue
            fits = value.shape and self._mesh.fits(value.shape[0], DP) and self._mesh.dp > 1
            layout = (DP if fits else 0, *(0 for _ in value.shape[1:]))
            self._input_node(f"batch {position}", value, layout)

    def _input_node(self, name: str, value: Value, layout: Layout) -> None:
        none = np.zeros(1)
        node = self._add(Node(name, (layout,), w.empty(1), none, none, ("input", name)))
        self._led[value.number] = Led(node, (layout,))

    def _add(self, node: Node) -> int:
        self._out.nodes.append(node)
        return len(self._out.nodes) - 1

    def _leaf_layouts(self, number: int, value: Value) -> Iterable[Layout]:
        """As annotated; else whole, or any one dim over each axis, but dims that a scan slices stay whole."""
        if number in self._annotations.leaves:
            yield from self._annotations.leaves[number].layouts(self._mesh)
            return
        stacked = number in self._flow.stacked
        choices: list[tuple[int | None, ...]] = []
        for axis in (DP, TP):
            dims = [
                d
                for d, size in enumerate(value.shape)
                if axis in self._mesh.axes and size > 1 and self._mesh.fits(size, axis) and not (stacked and d == 0)
            ]
            if axis == DP and number not in self._flow.expert_like:
                dims = []
            choices.append((None, *dims))
        for dp, tp in itertools.product(*choices):
            if dp is None or dp != tp:
                yield tuple((DP if d == dp else 0) | (TP if d == tp else 0) for d in range(len(value.shape)))

    # Operations.

    def _op(self, index: int, op: Op) -> None:
        led = tuple(None if v is None else self._led[v.number] for v in op.operands)
        grads, params = self._flow.of_operands(op)
        if self._decides(op, led, params):
            self._decide(index, op, led, grads, params)
        else:
            self._follow(op, led, grads, params)

    def _decides(self, op: Op, led: tuple[Led | None, ...], params: tuple[bool, ...]) -> bool:
        if op.rule is None or self._annotations.of(op.eqn) is not None:
            return True
        if op.name == CARRY:
            return op.results[0].num_bytes >= self._join_bytes
        if op.name in HEAVY or op.name in _LOOKUPS or _is_intense(op):
            return any(x is not None for x in led)
        if op.name not in _JOINS or not op.results:
            return False
        shape, size = op.results[0].shape, op.results[0].num_bytes
        streams = {
            x.node
            for x, v, p in zip(led, op.operands, params, strict=True)
            if x is not None
            and v is not None
            and not p
            and (len(v.shape) == len(shape))
            and len(x.layouts) > 1
            and (op.name not in ELEMENTWISE or v.shape == shape)
        }
        return len(streams) > 1 and len(shape) > 1 and size >= self._join_bytes

    def _decide(
        self, index: int, op: Op, led: tuple[Led | None, ...], grads: tuple[bool, ...], params: tuple[bool, ...]
    ) -> None:
        assignments = self._assignments(op, params)
        parts = [self._partition(op, a, grads, params) for a in assignments]
        if op.rule is None:
            self._out.unknown[op.name] = None
        none = np.zeros(len(assignments))
        group = ("op", self._flow.groups[index], assignments, grads)
        node = self._add(Node(op.key or op.name, assignments, stacked_work(parts, op.times), none, none, group))
        for i, (value, x) in enumerate(zip(op.operands, led, strict=True)):
            if value is not None and x is not None:
                self._read(x, node, value, tuple(p.operands[i] for p in parts), op.times, grads[i], params[i])
        for k, value in enumerate(op.results):
            self._led[value.number] = Led(node, tuple(p.results[k] for p in parts))
        self._out.steps.append(Step(op, node, True, -1, led, grads, params))

    def _follow(self, op: Op, led: tuple[Led | None, ...], grads: tuple[bool, ...], params: tuple[bool, ...]) -> None:
        leader = self._leader(op, led, params)
        if leader is None:
            self._out.steps.append(Step(op, None, False, -1, led, grads, params))
            return
        head = led[leader]
        assert head is not None
        parts, works = self._follow_all(op, leader, head.layouts, grads, params)
        node = self._out.nodes[head.node]
        node.work += works * op.times
        for i, (value, x) in enumerate(zip(op.operands, led, strict=True)):
            if value is None or x is None:
                continue
            targets = tuple(p.operands[i] for p in parts)
            if x.node != head.node:
                self._read(x, head.node, value, targets, op.times, grads[i], params[i])
            elif x.layouts != targets:
                table, costs = self._reshardings(value, x.layouts, targets, grads[i], params[i])
                node.work += costs[table.diagonal()] * op.times
        for k, value in enumerate(op.results):
            self._led[value.number] = Led(head.node, tuple(p.results[k] for p in parts))
        self._out.steps.append(Step(op, head.node, False, leader, led, grads, params))

    def _leader(self, op: Op, led: tuple[Led | None, ...], params: tuple[bool, ...]) -> int | None:
        """The largest operand that some node leads; activations before parameters, choices before inputs."""
        best: tuple[tuple[bool, int, bool], int] | None = None
        for i, (value, x) in enumerate(zip(op.operands, led, strict=True)):
            if value is None or x is None:
                continue
            rank = (not params[i], value.num_bytes, len(x.layouts) > 1)
            if best is None or rank > best[0]:
                best = rank, i
        return None if best is None else best[1]

    def _follow_all(
        self, op: Op, leader: int, layouts: Layouts, grads: tuple[bool, ...], params: tuple[bool, ...]
    ) -> tuple[tuple[Partitioned, ...], w.Floats]:
        key = op.signature, op.kept, leader, layouts, grads, params
        if key not in self._followed:
            rule = op.rule
            assert rule is not None
            parts = tuple(
                self._partition(op, follow(rule, leader, layout, self._mesh), grads, params) for layout in layouts
            )
            self._followed[key] = parts, stacked_work(parts, 1.0)
        return self._followed[key]

    def _partition(
        self, op: Op, assignment: Assignment, grads: tuple[bool, ...], params: tuple[bool, ...]
    ) -> Partitioned:
        key = op.signature, op.kept, assignment, grads, params
        if key not in self._partitioned:
            self._partitioned[key] = partition(op, assignment, self._mesh, grads, params)
        return self._partitioned[key]

    def _read(
        self, source: Led, reader: int, value: Value, targets: Layouts, times: float, grad: bool, param: bool
    ) -> None:
        table, works = self._reshardings(value, source.layouts, targets, grad, param)
        if works.any():
            self._out.readings.append(Reading(source.node, reader, table, works, times))

    def _reshardings(
        self, value: Value, sources: Layouts, targets: Layouts, grad: bool, param: bool
    ) -> tuple[np.ndarray, w.Floats]:
        key = value.num_bytes, sources, targets, grad, param
        if key not in self._edges:
            rows: dict[tuple[Layout, Layout], int] = {}
            table = np.array([[rows.setdefault((s, t), len(rows)) for t in targets] for s in sources])
            works = np.stack([reading_work(self._mesh, value, s, t, grad, param) for s, t in rows])
            self._edges[key] = table, works
        return self._edges[key]

    def _close_carries(self) -> None:
        """The value that a scan's body hands to the next iteration must lie as the carry does."""
        for i, step in enumerate(self._out.steps):
            op = step.op
            if op.name != CARRY:
                continue
            back = op.operands[1]
            x = None if back is None else self._led[back.number]
            led = (step.operands[0], x)
            self._out.steps[i] = Step(
                op, step.node, step.decides, step.leader, led, step.needs_gradient, step.is_parameter
            )
            own = self._led[op.results[0].number]
            if back is None or x is None or own is None:
                continue
            grad = self._flow.needs_gradient[back.number]
            if x.node != own.node:
                self._read(x, own.node, back, own.layouts, op.times, grad, False)
            elif x.layouts != own.layouts:
                table, works = self._reshardings(back, x.layouts, own.layouts, grad, False)
                self._out.nodes[own.node].work += works[table.diagonal()] * op.times

    # What an operation may be assigned.

    def _assignments(self, op: Op, params: tuple[bool, ...]) -> tuple[Assignment, ...]:
        if op.rule is None:
            return ((),)
        required = self._annotations.of(op.eqn)
        if required is not None:
            return tuple(follow(op.rule, 0, layout, self._mesh) for layout in required.layouts(self._mesh))
        rows, others = self._candidates(op, op.rule, params)
        over_dp: list[int | None] = [f for f in rows if self._mesh.fits(op.rule.sizes[f], DP)]
        if DP not in self._mesh.axes or not over_dp:
            over_dp = [None]
        over_tp: list[int | None] = []
        if TP in self._mesh.axes:
            over_tp += [f for f in others if self._mesh.fits(op.rule.sizes[f], TP)]
        if not (over_tp and op.name in HEAVY and self._is_large(op)):
            # A large product that all devices would run alike is split by XLA in its own way.
            over_tp.append(None)
        found = []
        for dp, tp in itertools.product(over_dp, over_tp):
            if dp is not None and dp == tp and not self._mesh.fits(op.rule.sizes[dp], DP | TP):
                continue
            pairs = [(DP, dp)] if dp is not None else []
            pairs += [(TP, tp)] if tp is not None else []
            found.append(tuple(pairs))
        return tuple(found)

    def _is_large(self, op: Op) -> bool:
        return op.times * eqn_flops(op.eqn) >= _LARGE * self._most_flops

    def _candidates(self, op: Op, rule: Rule, params: tuple[bool, ...]) -> tuple[list[int], list[int]]:
        """Factors that dp, and that tp, may shard.

        Rows go over dp, or experts do, which then receive rows all to all; tp takes anything but rows.
        Looking up a table by whole rows leaves its columns alone: the stream that starts there is worth
        more than the table.
        """
        free = free_factors(rule)
        rows = self._flow.row_factors(op, rule) & free
        batch: set[int] = set()
        if op.name == "dot_general":
            batch = {f for i in op.eqn.params["dimension_numbers"][1][0] for f in rule.operands[0][i]} & free
            batch = batch if any(params) else set()
        barred = set()
        if op.name == "conv_general_dilated":
            # Neighbouring pixels are needed together; XLA also exchanges more than once around such a split.
            barred = {f for i in op.eqn.params["dimension_numbers"].lhs_spec[2:] for f in rule.operands[0][i]}
        if op.name in _LOOKUPS and params[0]:
            barred = {dim[0] for dim in rule.operands[0] if dim and dim[0] not in rule.reduced}
        return sorted(rows | batch), sorted(free - rows - barred)


def _is_intense(op: Op) -> bool:
    """Whether an operation computes much for what it gives: a kernel, or a loop with products inside."""
    if op.name in _JOINS or op.name == CARRY or not op.key:
        return False
    num_elements = sum(math.prod(v.shape) for v in op.results)
    return eqn_flops(op.eqn) > _INTENSE * num_elements


def reading_work(
    mesh: MeshShape, value: Value, source: Layout, target: Layout, needs_gradient: bool, is_parameter: bool
) -> w.Floats:
    """Work to bring a value to the layout a reader needs.

    Cotangents of parameters are gradients. A parameter is brought there in every microbatch, and again for the
    backward pass: what a pass gathers is not kept.
    """
    work = mesh.reshard(value.num_bytes, source, target, differentiable=needs_gradient)
    if not is_parameter:
        return work
    found = w.empty()
    for c in w.collectives(work):
        phase, times = (w.GRADIENT, 1) if c.phase == w.BACKWARD else (w.PARAMETER, 2 if needs_gradient else 1)
        w.add_collective(found, c.axis, c.kind, phase, times * c.num_bytes, times * c.count)
    return found


def scattered(moved: w.Floats, reader: w.Floats) -> w.Floats:
    """What changes where a reader's gradients are reduced over tp and a shard of each kept: XLA scatters them.

    Over dp that is ZeRO's choice.

    Args:
        moved: work to bring the trained parameters to the reader, for both passes.
        reader: work of the reader, whose gradients count as reduced to all.
    """
    change = w.empty()
    (_, tp) = w.AXES
    gathered = moved[w.collective_at(tp, "all_gather", w.PARAMETER)] / 2
    at = w.collective_at(tp, "all_reduce", w.GRADIENT)
    num_bytes = min(gathered, reader[at])
    if num_bytes:
        change[at] = -num_bytes
        w.add_collective(change, tp, "reduce_scatter", w.GRADIENT, num_bytes)
    return change
