"""Choose how a program is sharded on a logical mesh: the intra-op integer program.

Alpa, section 4: one strategy per node, least sum of node and edge costs. Nodes of repeated layers are
tied before solving (one variable for all). The space is built once per mesh, hardware left open;
prices turn it into an integer program, and the answer into specs and work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arena_jax.compiler.engines import Engine, StrategyProblem, StrategySolution, engine
from arena_jax.compiler.flops import HEAVY
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.flat import Flat, flatten
from arena_jax.compiler.intra_op.flow import Flow, flow_of
from arena_jax.compiler.intra_op.layout import Axes, Layout, MeshShape, to_axes
from arena_jax.compiler.intra_op.partition import Assignment, Partitioned, follow, partition
from arena_jax.compiler.intra_op.prices import Prices, nominal_prices
from arena_jax.compiler.intra_op.products import Product, product_of
from arena_jax.compiler.intra_op.strategies import Led, Step, Strategies, reading_work, scattered, strategies_of
from arena_jax.compiler.residuals import Cast
from arena_jax.errors import ArenaError

# Good enough to stop at, and seconds after which the best found so far is taken.
RELATIVE_GAP = 1e-3
TIME_LIMIT_S = 20.0
# With a memory cap the program is hard: what was found by then will do.
LEAN_LIMIT_S = 3.0
# A lean sharding may use this part of what lies between the least memory and that of the fastest one,
# and is sought where the least is below this part of the fastest one's.
_LEAN = 0.25
_WORTH_SAVING = 0.8


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The sharding of a whole program on one logical mesh.

    Attributes:
        parameters: leaf number -> axes; replicated leaves are absent.
        works: ``[graph node, SIZE]`` work for all rows of the global batch.
        specs: value key -> axes, the values to constrain: ``"12:0"`` is a result of an operation,
            ``"12<1"`` an operand as it is read there.
        unknown: primitives without a rule, which are replicated.
        solution: what the engine answered, its objective in seconds for one step.
        products: matrix products by graph node, each with how often it runs in a forward pass.
    """

    dp: int
    tp: int
    parameters: Mapping[int, Axes]
    works: w.Floats
    specs: Mapping[str, Axes]
    unknown: tuple[str, ...]
    solution: StrategySolution
    products: tuple[tuple[tuple[Product, float], ...], ...] = ()


class ShardingSearch:
    """Finds shardings for one graph on any mesh, at any prices."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._spaces: dict[tuple[int, int], TiedSpace] = {}
        self._found: dict[tuple[int, int, Prices, str], Sharding] = {}
        self._lean: dict[tuple[int, int, Prices, str], Sharding | None] = {}

    @cached_property
    def _flat(self) -> Flat:
        return flatten(self._graph)

    @cached_property
    def _flow(self) -> Flow:
        trace = self._graph.trace
        return flow_of(self._flat, trace.leaves, trace.batch_has_rows)

    @property
    def casts(self) -> Mapping[int, Cast]:
        """Number of a trainable leaf -> how it is cast, where it is to a narrower dtype."""
        return self._flat.casts

    @property
    def has_experts(self) -> bool:
        """Whether rows can travel to parameters that lie over dp."""
        return bool(self._flow.expert_like)

    def space(self, dp: int, tp: int) -> "TiedSpace":
        """All shardings on ``dp x tp``."""
        if (dp, tp) not in self._spaces:
            trace = self._graph.trace
            mesh = MeshShape(dp, tp)
            found = strategies_of(self._flat, self._flow, trace.leaves, trace.batch_has_rows, mesh, trace.annotations)
            self._spaces[dp, tp] = TiedSpace(found, len(self._graph.nodes), rows=self._flow.rows)
        return self._spaces[dp, tp]

    def find(self, dp: int, tp: int, prices: Prices | None = None, solver: Engine | None = None) -> Sharding:
        """The best sharding for ``dp x tp`` at these prices; by default at nominal ones, by our engine."""
        prices, solver = prices or nominal_prices(), solver or engine("highs")
        key = dp, tp, prices, solver.name
        if key not in self._found:
            space = self.space(dp, tp)
            solution = solver.solve_strategies(
                space.problem(prices), time_limit_s=TIME_LIMIT_S, relative_gap=RELATIVE_GAP
            )
            if solution is None:
                raise ArenaError(f"the sharding program of a {dp} x {tp} mesh was not solved in {TIME_LIMIT_S:g} s")
            self._found[key] = space.sharding(solution)
        return self._found[key]

    def find_lean(self, dp: int, tp: int, prices: Prices, solver: Engine) -> Sharding | None:
        """The best sharding that takes clearly less memory than :meth:`find`'s, if there is one."""
        key = dp, tp, prices, solver.name
        if key not in self._lean:
            self._lean[key] = self._find_lean(dp, tp, prices, solver)
        return self._lean[key]

    def _find_lean(self, dp: int, tp: int, prices: Prices, solver: Engine) -> Sharding | None:
        space = self.space(dp, tp)
        free_bytes = self.find(dp, tp, prices, solver).solution.memory_bytes
        least_bytes = sum(float(memory.min()) for memory in space.problem(prices).memory)
        if least_bytes > _WORTH_SAVING * free_bytes:
            return None
        cap = least_bytes + _LEAN * (free_bytes - least_bytes)
        problem = space.problem(prices, cap)
        solution = solver.solve_strategies(problem, time_limit_s=LEAN_LIMIT_S, relative_gap=RELATIVE_GAP)
        return None if solution is None else space.sharding(solution)


class TiedSpace:
    """A space of shardings whose repeated layers share their decisions.

    Args:
        strategies: the untied space.
        num_graph_nodes: length of the graph it came from.
    """

    def __init__(
        self,
        strategies: Strategies,
        num_graph_nodes: int,
        *,
        tie: bool = True,
        rows: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        self._rows = rows
        self.strategies = strategies
        self._num_graph_nodes = num_graph_nodes
        numbers: dict[object, int] = {}
        keys = [(node.group, node.strategies) if tie else i for i, node in enumerate(strategies.nodes)]
        self._variable = [numbers.setdefault(key, len(numbers)) for key in keys]
        self._num_variables = len(numbers)
        self._parts: dict[object, Partitioned] = {}

    def problem(self, prices: Prices, memory_cap: float | None = None) -> StrategyProblem:
        """The integer program at these prices, all layers on one mesh."""
        sizes = [0] * self._num_variables
        for node, variable in zip(self.strategies.nodes, self._variable, strict=True):
            sizes[variable] = len(node.strategies)
        costs = [np.zeros(size) for size in sizes]
        memory = [np.zeros(size) for size in sizes]
        for node, variable in zip(self.strategies.nodes, self._variable, strict=True):
            costs[variable] += prices.seconds(node.work) + prices.parameter_s * node.parameter_bytes
            memory[variable] += prices.memory_bytes(node.work, node.parameter_bytes, node.frozen_bytes)
        edges: dict[tuple[int, int], np.ndarray] = {}
        priced: dict[int, np.ndarray] = {}
        for reading in self.strategies.readings:
            at = id(reading.works)
            if at not in priced:
                priced[at] = prices.seconds(reading.works)
            seconds = priced[at][reading.table] * reading.times
            u, v = self._variable[reading.source], self._variable[reading.reader]
            if u == v:
                costs[u] += seconds.diagonal()
            elif u < v:
                edges[u, v] = edges[u, v] + seconds if (u, v) in edges else seconds
            else:
                edges[v, u] = edges[v, u] + seconds.T if (v, u) in edges else seconds.T
        return StrategyProblem(costs=tuple(costs), memory=tuple(memory), edges=edges, memory_cap=memory_cap)

    def sharding(self, solution: StrategySolution) -> Sharding:
        """Replay the program under the choices."""
        strategies, mesh = self.strategies, self.strategies.mesh
        choice = [solution.choices[variable] for variable in self._variable]
        works = w.empty(self._num_graph_nodes)
        specs: dict[str, Axes] = {}
        products: list[dict[Product, float]] = [{} for _ in range(self._num_graph_nodes)]
        for step in strategies.steps:
            if step.node is None:
                continue
            part = self._part(step, choice[step.node])
            work = works[step.op.node]
            work += part.work * step.op.times
            product = self._product(step, part)
            if product is not None:
                of_node = products[step.op.node]
                of_node[product] = of_node.get(product, 0.0) + step.op.times
            trained: list[w.Floats] = []  # of parameters, what brings them here
            for i, (led, target) in enumerate(zip(step.operands, part.operands, strict=True)):
                value = step.op.operands[i]
                if led is None or value is None:
                    continue
                source = _layout(led, choice)
                if source != target:
                    moved = reading_work(mesh, value, source, target, step.needs_gradient[i], step.is_parameter[i])
                    work += moved * step.op.times
                    if step.is_parameter[i] and step.needs_gradient[i]:
                        trained.append(moved)
            if trained:
                work += scattered(np.sum(trained, axis=0), part.work) * step.op.times
            if step.decides and step.op.can_constrain and step.op.rule is not None:
                specs.update(_specs(step, part))
        parameters = {leaf: led.layouts[choice[led.node]] for leaf, led in strategies.leaves.items()}
        return Sharding(
            dp=mesh.dp,
            tp=mesh.tp,
            parameters={leaf: to_axes(layout) for leaf, layout in parameters.items() if any(layout)},
            works=works,
            specs=specs,
            unknown=tuple(strategies.unknown),
            solution=solution,
            products=tuple(tuple(of_node.items()) for of_node in products),
        )

    def layouts(self, solution: StrategySolution) -> dict[str, tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
        """Key of an equation -> the layout of each operand as it is read, and of each result."""
        choice = [solution.choices[variable] for variable in self._variable]
        found: dict[str, tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {}
        for step in self.strategies.steps:
            op = step.op
            if not op.key:
                continue
            if step.node is None:  # made of nothing that is sharded
                found[op.key] = ((),) * len(op.operands), ((),) * len(op.results)
                continue
            part = self._part(step, choice[step.node])
            found[op.key] = part.operands, part.results
        return found

    def _product(self, step: Step, part: Partitioned) -> Product | None:
        if step.op.name not in HEAVY or self._rows is None:
            return None
        rows = [() if v is None else self._rows[v.number] for v in step.op.operands]
        return product_of(step.op, part.operands, part.results, rows, step.needs_gradient, self.strategies.mesh)

    def _part(self, step: Step, choice: int) -> Partitioned:
        op, mesh = step.op, self.strategies.mesh
        assert step.node is not None
        assignment: Assignment
        if step.decides:
            assignment = self.strategies.nodes[step.node].strategies[choice]  # type: ignore[assignment]
        else:
            led = step.operands[step.leader]
            assert led is not None
            assert op.rule is not None
            assignment = follow(op.rule, step.leader, led.layouts[choice], mesh)
        key = op.signature, op.kept, assignment, step.needs_gradient, step.is_parameter
        if key not in self._parts:
            self._parts[key] = partition(op, assignment, mesh, step.needs_gradient, step.is_parameter)
        return self._parts[key]


def _layout(led: Led, choice: Sequence[int]) -> Layout:
    return led.layouts[choice[led.node]]


def _specs(step: Step, part: Partitioned) -> dict[str, Axes]:
    """Layouts of a deciding operation: what it reads, and what it gives."""
    found = {f"{step.op.key}:{k}": to_axes(layout) for k, layout in enumerate(part.results) if layout}
    for i, (led, layout) in enumerate(zip(step.operands, part.operands, strict=True)):
        if led is not None and layout:
            found[f"{step.op.key}<{i}"] = to_axes(layout)
    return found
