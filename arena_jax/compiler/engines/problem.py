"""The intra-op problem in Alpa's form: one strategy per node, costs on nodes and edges, one memory bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A sum of memories may exceed the cap by this share: rounding, less than a byte in a terabyte.
MEMORY_SLACK = 1e-12
# Bounds come from sums in another order and from solvers' tolerances: closer than this share is equal.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyProblem:
    """Pick one strategy of every node (Alpa, section 4.2): least sum of costs within the memory.

    Attributes:
        costs: per node ``[strategies]``, seconds; infinite forbids a strategy.
        memory: per node ``[strategies]``, bytes.
        edges: ``(u, v)`` with ``u < v`` -> ``[strategies of u, strategies of v]``, seconds; infinite
            forbids a pair.
        memory_cap: bytes that the chosen strategies may take together; ``None`` is no bound.
    """

    costs: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    edges: Mapping[tuple[int, int], np.ndarray]
    memory_cap: float | None = None

    def __post_init__(self) -> None:
        assert len(self.costs) == len(self.memory), f"{len(self.costs)} costs, {len(self.memory)} memories"
        for v, (cost, memory) in enumerate(zip(self.costs, self.memory, strict=True)):
            assert cost.ndim == 1, f"node {v}: costs of shape {cost.shape}"
            assert cost.size, f"node {v} has no strategy"
            assert cost.shape == memory.shape, f"node {v}: {cost.shape} costs, {memory.shape} memories"
        for (u, v), seconds in self.edges.items():
            assert 0 <= u < v < len(self.costs), f"edge {u, v} of {len(self.costs)} nodes"
            wanted = self.costs[u].size, self.costs[v].size
            assert seconds.shape == wanted, f"edge {u, v}: shape {seconds.shape} where {wanted} is due"

    @property
    def num_nodes(self) -> int:
        return len(self.costs)

    @property
    def num_strategies(self) -> int:
        return sum(cost.size for cost in self.costs)

    def objective(self, choices: Sequence[int]) -> float:
        """Seconds of these strategies."""
        nodes = sum(float(cost[i]) for cost, i in zip(self.costs, choices, strict=True))
        return nodes + sum(float(seconds[choices[u], choices[v]]) for (u, v), seconds in self.edges.items())

    def memory_bytes(self, choices: Sequence[int]) -> float:
        """Bytes of these strategies."""
        return sum(float(memory[i]) for memory, i in zip(self.memory, choices, strict=True))

    def fits(self, memory_bytes: float) -> bool:
        """Whether so many bytes are within the cap."""
        return self.memory_cap is None or memory_bytes <= self.memory_cap * (1 + MEMORY_SLACK)

    def may_fit(self) -> bool:
        """Whether every node has a strategy and the fewest bytes of each are within the cap together."""
        least = sum(
            float(memory[np.isfinite(cost)].min(initial=np.inf))
            for cost, memory in zip(self.costs, self.memory, strict=True)
        )
        return bool(np.isfinite(least)) and self.fits(least)

    def solution(self, choices: Sequence[int], bound: float, *, relative_gap: float = 0.0) -> "StrategySolution":
        """These choices with a proved lower bound; optimal when the two meet up to ``relative_gap`` and rounding."""
        objective = self.objective(choices)
        bound = min(float(bound), objective)
        return StrategySolution(
            choices=tuple(int(i) for i in choices),
            objective=objective,
            memory_bytes=self.memory_bytes(choices),
            bound=bound,
            optimal=objective - bound <= (relative_gap + ROUNDING) * abs(objective),
        )


@dataclass(frozen=True, kw_only=True)
class StrategySolution:
    """One strategy per node.

    Attributes:
        choices: index of each node's strategy.
        objective: seconds.
        memory_bytes: bytes of the strategies together.
        bound: seconds that no choice within the memory can beat (proved).
        optimal: whether the bound proves that nothing better than the asked gap is left.
    """

    choices: tuple[int, ...]
    objective: float
    memory_bytes: float
    bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """Share of the objective that might be saved at most."""
        return (self.objective - self.bound) / abs(self.objective) if self.objective > self.bound else 0.0
