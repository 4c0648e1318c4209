"""A strategy problem in the units of a solver.

MILP solvers stop at absolute tolerances of 1e-6 to 1e-7, and seconds and bytes are far from one:
costs and memory are counted from the least possible and scaled so that the tolerances are tiny shares.
"""

from dataclasses import dataclass

import numpy as np

from arena_jax.compiler.engines.problem import StrategyProblem

# The largest cost and the memory there is to give away.
_LARGEST = 1e4
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Units:
    """Costs and memory above the least, all finite except forbidden pairs.

    Attributes:
        costs: per node ``[strategies]``, ``(seconds - least of the node) * scale``.
        edges: as the problem's, times ``scale``.
        memory: per node ``[strategies]``, above the least of the node.
        room: what the memory of all may sum to; ``None`` without a cap.
        base_s: seconds of all nodes at their least.
        scale: units per second.
    """

    costs: list[np.ndarray]
    edges: dict[tuple[int, int], np.ndarray]
    memory: list[np.ndarray]
    room: float | None
    base_s: float
    scale: float

    @classmethod
    def of(cls, problem: StrategyProblem, memory_cap: float | None) -> "Units":
        """In units for this cap, which may be a little tighter than the problem's own."""
        least_s = [float(cost.min()) for cost in problem.costs]
        costs = [cost - least for cost, least in zip(problem.costs, least_s, strict=True)]
        largest = max(
            (float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in (*costs, *problem.edges.values())), default=0.0
        )
        scale = _LARGEST / max(largest, _TINY)
        least_bytes = [float(memory.min()) for memory in problem.memory]
        memory = [m - least for m, least in zip(problem.memory, least_bytes, strict=True)]
        room = None
        if memory_cap is not None:
            free = max(memory_cap - sum(least_bytes), 0.0)
            unit = max(free, 1e-6 * max((float(m.max()) for m in memory), default=0.0), _TINY) / _LARGEST
            memory = [m / unit for m in memory]
            room = free / unit
        return cls(
            costs=[cost * scale for cost in costs],
            edges={pair: seconds * scale for pair, seconds in problem.edges.items()},
            memory=memory,
            room=room,
            base_s=sum(least_s),
            scale=scale,
        )

    def seconds(self, objective: float) -> float:
        """A solver's objective in seconds."""
        return self.base_s + objective / self.scale


def cap_after(problem: StrategyProblem, cap: float | None, choices: list[int]) -> float | None:
    """``None`` when choices keep the problem's cap; otherwise a cap so much tighter that they would have."""
    used = problem.memory_bytes(choices)
    if cap is None or problem.memory_cap is None or problem.fits(used):
        return None
    return cap - 2 * (used - problem.memory_cap)
