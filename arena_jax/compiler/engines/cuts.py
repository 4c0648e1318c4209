"""Our own dynamic program over (stages left, first layer, devices left)."""

from collections.abc import Sequence

import numpy as np

from arena_jax.compiler.engines.stages import Stage, StageProblem, StageSolution, search_bounds


def best_stages(problem: StageProblem) -> StageSolution | None:
    """The best cut; exact."""
    return search_bounds(problem, lambda bound: _least_sum(problem, bound))


def _least_sum(problem: StageProblem, bound: float) -> Sequence[Stage] | None:
    """Least sum of stage times and boundaries with no stage time above ``bound``."""
    num_layers, num_stages, total = problem.num_layers, problem.num_stages, problem.total
    seconds = np.where(problem.seconds <= bound, problem.seconds, np.inf) + problem.boundary_s[:, None]
    # least[i, d]: layers i.. on d devices with the stages left; layer num_layers means none is left.
    least = np.full((num_layers + 1, total + 1), np.inf)
    least[num_layers, 0] = 0.0
    came_from: list[tuple[np.ndarray, np.ndarray]] = []
    for k in range(1, num_stages + 1):
        value = np.full_like(least, np.inf)
        which = np.zeros(least.shape, np.int32)
        until = np.zeros(least.shape, np.int32)
        # The last stage ends with the last layer, the first begins with the first and uses up all devices.
        ends = slice(num_layers - 1, num_layers) if k == 1 else slice(0, num_layers)
        begins = slice(0, 1) if k == num_stages else slice(0, num_layers)
        for choice, n in enumerate(problem.sizes):
            if n > total:
                continue
            first_left = total - n if k == num_stages else 0
            after = least[1:][ends, first_left : total + 1 - n]
            # sums[i, j, d]: this stage holds layers i..j and leaves d devices.
            sums = seconds[k - 1, choice, begins, ends, None] + after[None]
            last = sums.argmin(axis=1)
            smallest = np.take_along_axis(sums, last[:, None, :], axis=1)[:, 0, :]
            at = (begins, slice(first_left + n, total + 1))
            better = smallest < value[at]
            value[at][better] = smallest[better]
            which[at][better] = choice
            until[at][better] = last[better] + ends.start
        least = value
        came_from.append((which, until))
    if not np.isfinite(least[0, total]):
        return None
    stages: list[Stage] = []
    layer, left = 0, total
    for which, until in reversed(came_from):
        choice, last_layer = int(which[layer, left]), int(until[layer, left])
        stages.append((layer, last_layer, choice))
        layer, left = last_layer + 1, left - problem.sizes[choice]
    return stages
