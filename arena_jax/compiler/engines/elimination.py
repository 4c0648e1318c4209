"""Exact solution of a strategy problem without memory bound, by eliminating one node after the other.

Bucket elimination (Dechter 1999): to eliminate a node, add up the tables that mention it and keep,
per choice of its neighbours, the least sum over its own strategies. The work is exponential in the
width of the order only, and traced models are nearly chains. A second pass, backwards, gives every
strategy its min-marginal: the best objective of any choice that uses it.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from arena_jax.compiler.engines.problem import StrategyProblem

# Entries of the largest table, and of all tables together; the latter take about a second.
MAX_TABLE = 1 << 22
MAX_ENTRIES = 1 << 25


def elimination_order(problem: StrategyProblem) -> list[int] | None:
    """An order of small tables (greedily the smallest next), or ``None`` when one would be too large."""
    sizes = [cost.size for cost in problem.costs]
    neighbours: list[set[int]] = [set() for _ in sizes]
    for u, v in problem.edges:
        neighbours[u].add(v)
        neighbours[v].add(u)

    def entries(v: int) -> int:
        count = sizes[v]
        for w in neighbours[v]:
            count *= sizes[w]
        return count

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    order: list[int] = []
    done = [False] * len(sizes)
    total = 0
    while heap:
        count, v = heapq.heappop(heap)
        if done[v]:
            continue
        current = entries(v)
        if current != count:
            heapq.heappush(heap, (current, v))
            continue
        total += count
        if count > MAX_TABLE or total > MAX_ENTRIES:
            return None
        done[v] = True
        order.append(v)
        for w in neighbours[v]:
            neighbours[w].discard(v)
            neighbours[w] |= neighbours[v] - {w}
            heapq.heappush(heap, (entries(w), w))
    return order


class Elimination:
    """The tables of one problem in one order; solved anew for other node costs, as a Lagrangian asks for."""

    def __init__(self, problem: StrategyProblem, order: Sequence[int]) -> None:
        self.order = list(order)
        self._place = {v: i for i, v in enumerate(order)}
        self._sizes = [cost.size for cost in problem.costs]
        # Per node eliminated: its edges to nodes eliminated later, that node last in the table's axes.
        self._edges: list[list[tuple[tuple[int, ...], np.ndarray]]] = [[] for _ in order]
        for (u, v), seconds in problem.edges.items():
            if self._place[u] < self._place[v]:
                self._edges[u].append(((v, u), seconds.T))
            else:
                self._edges[v].append(((u, v), seconds))
        self._scopes, self._parents = self._bucket_tree()

    def _bucket_tree(self) -> tuple[list[tuple[int, ...]], list[int | None]]:
        """Per node: the later nodes its table mentions (latest first), and the first of them to be eliminated."""
        mentioned: list[set[int]] = [set() for _ in self.order]
        scopes: list[tuple[int, ...]] = [()] * len(self.order)
        parents: list[int | None] = [None] * len(self.order)
        for v in self.order:
            for scope, _ in self._edges[v]:
                mentioned[v].update(scope)
            mentioned[v].discard(v)
            scopes[v] = tuple(sorted(mentioned[v], key=lambda w: -self._place[w]))
            if scopes[v]:
                parent = scopes[v][-1]
                parents[v] = parent
                mentioned[parent].update(scopes[v])
        return scopes, parents

    def _spread(self, table: np.ndarray, scope: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """``table`` over ``scope`` with axes for all of ``target``, which holds ``scope`` in the same order."""
        held = set(scope)
        return table.reshape([self._sizes[w] if w in held else 1 for w in target])

    def _tables(self, costs: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per node the sum of its tables over (scope, node), and what it passes to its parent over its scope."""
        children: list[list[int]] = [[] for _ in self.order]
        tables: list[np.ndarray] = [np.empty(0)] * len(self.order)
        messages: list[np.ndarray] = [np.empty(0)] * len(self.order)
        for v in self.order:
            target = (*self._scopes[v], v)
            table = np.zeros([self._sizes[w] for w in target])
            table += costs[v]
            for scope, seconds in self._edges[v]:
                table += self._spread(seconds, scope, target)
            for child in children[v]:
                table += self._spread(messages[child], self._scopes[child], target)
            tables[v], messages[v] = table, table.min(axis=-1)
            parent = self._parents[v]
            if parent is not None:
                children[parent].append(v)
        return tables, messages

    def solve(self, costs: Sequence[np.ndarray]) -> tuple[list[int], float]:
        """The best choices and their objective, infinite when every choice is forbidden."""
        tables, messages = self._tables(costs)
        choices = [0] * len(self.order)
        for v in reversed(self.order):
            choices[v] = int(tables[v][tuple(choices[w] for w in self._scopes[v])].argmin())
        return choices, float(sum(messages[v] for v in self.order if self._parents[v] is None))

    def min_marginals(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per node ``[strategies]``: the least objective of a choice with that strategy."""
        tables, messages = self._tables(costs)
        roots = sum(float(messages[v]) for v in self.order if self._parents[v] is None)
        if not np.isfinite(roots):
            return [np.full(size, np.inf) for size in self._sizes]
        marginals: list[np.ndarray] = [np.empty(0)] * len(self.order)
        for v in reversed(self.order):
            parent = self._parents[v]
            if parent is None:
                # Other components cost what they cost.
                tables[v] += roots - float(messages[v])
            else:
                held = set(self._scopes[v])
                axes = (*self._scopes[parent], parent)
                away = tuple(i for i, w in enumerate(axes) if w not in held)
                with np.errstate(invalid="ignore"):
                    outside = tables[parent].min(axis=away) - messages[v]
                # Forbidden within the subtree: whatever is outside does not matter.
                outside[~np.isfinite(messages[v])] = 0.0
                tables[v] += outside[..., None]
            marginals[v] = tables[v].min(axis=tuple(range(tables[v].ndim - 1)))
        return marginals
