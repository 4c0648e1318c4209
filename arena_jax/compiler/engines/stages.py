"""The inter-op problem at a fixed number of stages, and the search over the slowest stage's time.

The objective (Alpa, section 5) is ``sum_s t_s + (M - 1) max_s t_s`` plus what crossing into each stage
costs. A program that finds the least sum with no stage above a bound is all that an engine must give.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Layers ``[first, last]`` on the devices of one choice.
Stage = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """Cut layers into exactly ``num_stages`` stages, each on one choice of devices.

    Attributes:
        num_microbatches: ``M`` of the objective.
        seconds: ``[k - 1, choice, first, last]`` time per microbatch of layers ``first..last`` on a choice
            of devices as the ``k``-th stage from the end; infinite where it does not fit. Earlier
            stages (larger ``k``) hold more activations, so times do not fall with ``k``.
        boundary_s: ``[layer]`` seconds to move what crosses into a layer, paid by a stage that begins there.
        sizes: per choice, the devices it takes (at least one).
        total: the devices that the stages take together, exactly.
    """

    num_microbatches: int
    seconds: np.ndarray
    boundary_s: np.ndarray
    sizes: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        layers = self.boundary_s.size
        assert self.seconds.shape[1:] == (len(self.sizes), layers, layers), f"times of shape {self.seconds.shape}"
        assert min(self.sizes, default=1) >= 1, f"sizes {self.sizes}"

    @property
    def num_stages(self) -> int:
        return int(self.seconds.shape[0])

    @property
    def num_layers(self) -> int:
        return self.boundary_s.size

    def sum_and_slowest_s(self, stages: Sequence[Stage]) -> tuple[float, float]:
        """Sum of the stages' times and boundaries, and the longest time, of stages in order."""
        times = [
            float(self.seconds[self.num_stages - 1 - i, choice, first, last])
            for i, (first, last, choice) in enumerate(stages)
        ]
        return sum(times) + sum(float(self.boundary_s[first]) for first, _, _ in stages), max(times)


@dataclass(frozen=True, kw_only=True)
class StageSolution:
    """Stages in order, their objective in seconds, and by engine what each one asked has found."""

    stages: tuple[Stage, ...]
    objective: float
    objectives: Mapping[str, float] = field(default_factory=dict)


def search_bounds(problem: StageProblem, least_sum: Callable[[float], Sequence[Stage] | None]) -> StageSolution | None:
    """The best cut; ``None`` when none fits.

    Bounds on the slowest stage fall from the largest time there is. Below a bound whose least sum is
    ``L``, a slowest stage of ``b`` costs at least ``L + (M - 1) b``: bounds that cannot pay are jumped
    over, so that the result is exact after a few programs rather than one per time.

    Args:
        least_sum: the stages of least sum with no time above its argument.
    """
    if problem.num_stages > problem.num_layers:
        return None
    times = np.unique(problem.seconds[np.isfinite(problem.seconds)])
    rounds = problem.num_microbatches - 1
    best: StageSolution | None = None
    below = times.size
    while below > 0:
        stages = least_sum(float(times[below - 1]))
        if stages is None:
            break
        total_s, slowest_s = problem.sum_and_slowest_s(stages)
        objective = total_s + rounds * slowest_s
        if best is None or objective < best.objective:
            best = StageSolution(stages=tuple(stages), objective=objective)
        if rounds == 0:
            break
        limit = min(slowest_s, (best.objective - total_s) / rounds)
        below = int(np.searchsorted(times, limit, side="left"))
    return best
