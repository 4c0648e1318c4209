"""Shrink a strategy problem without losing its optimum.

A :class:`Reduction` always has the objective of the problem it came from, for every choice it still
holds. Costs move from edges to nodes (an edge whose matrix is a sum of a row and a column vanishes);
strategies go that another one beats whatever the neighbours do (dead-end elimination, as protein
design calls it), that are forbidden, or that cannot fit.
"""

from collections.abc import Sequence

import numpy as np

from arena_jax.compiler.engines.problem import MEMORY_SLACK, StrategyProblem


class Reduction:
    """A smaller problem and the way back; arrays as in :class:`StrategyProblem`, ``kept`` the original indices."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.memory_cap = problem.memory_cap
        self.kept = [np.arange(cost.size) for cost in problem.costs]
        self.costs = [np.array(cost, float) for cost in problem.costs]
        self.memory = [np.array(memory, float) for memory in problem.memory]
        self.edges = {pair: np.array(seconds, float) for pair, seconds in problem.edges.items()}
        self.neighbours: list[set[int]] = [set() for _ in problem.costs]
        for u, v in self.edges:
            self.neighbours[u].add(v)
            self.neighbours[v].add(u)
        self.feasible = True

    def problem(self) -> StrategyProblem:
        """What is left, as a problem."""
        return StrategyProblem(
            costs=tuple(self.costs), memory=tuple(self.memory), edges=dict(self.edges), memory_cap=self.memory_cap
        )

    def original(self, choices: Sequence[int]) -> list[int]:
        """Choices of what is left, in the indices of the problem this began with."""
        return [int(kept[i]) for kept, i in zip(self.kept, choices, strict=True)]

    def keep(self, v: int, mask: np.ndarray) -> None:
        """Drop the strategies of ``v`` where ``mask`` is false."""
        if mask.all():
            return
        if not mask.any():
            self.feasible = False
            return
        self.kept[v], self.costs[v], self.memory[v] = self.kept[v][mask], self.costs[v][mask], self.memory[v][mask]
        for w in self.neighbours[v]:
            if v < w:
                self.edges[v, w] = self.edges[v, w][mask]
            else:
                self.edges[w, v] = self.edges[w, v][:, mask]

    def run(self, *, dominance: bool = True) -> "Reduction":
        """Apply every rule until none changes anything; ``feasible`` says whether a choice may be left."""
        pending = dict.fromkeys(range(len(self.costs)))
        while pending and self.feasible:
            v = next(iter(pending))
            del pending[v]
            size = self.costs[v].size
            self._settle(v)
            if dominance and self.feasible:
                self.keep(v, self._undominated(v))
            if self.costs[v].size < size:
                pending[v] = None
                pending.update(dict.fromkeys(self.neighbours[v]))
        if self.feasible:
            self._fit()
        return self

    def _settle(self, v: int) -> None:
        """Move what each edge of ``v`` costs anyway to its nodes, and drop what is forbidden."""
        for w in sorted(self.neighbours[v]):
            pair = min(v, w), max(v, w)
            seconds = self.edges[pair]
            for axis, node in ((1, pair[0]), (0, pair[1])):
                least = seconds.min(axis=axis)
                if least.any():
                    self.costs[node] = self.costs[node] + least
                    # A row that is forbidden throughout is dropped with its strategy.
                    taken = np.where(np.isfinite(least), least, 0.0)
                    seconds = seconds - np.expand_dims(taken, axis)
            self.edges[pair] = seconds
            if not seconds.any():
                del self.edges[pair]
                self.neighbours[v].discard(w)
                self.neighbours[w].discard(v)
            if not np.isfinite(self.costs[w]).all():
                self.keep(w, np.isfinite(self.costs[w]))
        self.keep(v, np.isfinite(self.costs[v]))

    def _undominated(self, v: int) -> np.ndarray:
        cost, memory = self.costs[v], self.memory[v]
        alive = np.ones(cost.size, bool)
        if cost.size == 1:
            return alive
        # excess[a, b]: at most so much dearer is a than b, whatever the neighbours choose.
        excess = cost[:, None] - cost[None, :]
        for w in self.neighbours[v]:
            seconds = self.edges[v, w] if v < w else self.edges[w, v].T
            with np.errstate(invalid="ignore"):
                dearer = seconds[:, None, :] - seconds[None, :, :]
            dearer[:, ~np.isfinite(seconds)] = -np.inf
            with np.errstate(invalid="ignore"):
                excess += dearer.max(axis=2)
        beats = excess <= 0
        if self.memory_cap is not None:
            beats &= memory[:, None] <= memory[None, :]
        np.fill_diagonal(beats, False)
        for b in np.flatnonzero(beats.any(axis=0)):
            if (beats[:, b] & alive).any():
                alive[b] = False
        return alive

    def _fit(self) -> None:
        """Drop the strategies that do not fit beside the least memory of the others; forget a cap that never binds."""
        if self.memory_cap is None:
            return
        limit = self.memory_cap * (1 + MEMORY_SLACK)
        if sum(float(memory.max()) for memory in self.memory) <= limit:
            self.memory_cap = None
            self.run()
            return
        least = sum(float(memory.min()) for memory in self.memory)
        if least > limit:
            self.feasible = False
            return
        changed = False
        for v, memory in enumerate(self.memory):
            fits = memory - memory.min() <= limit - least
            changed |= not fits.all()
            self.keep(v, fits)
        if changed:
            self.run()
