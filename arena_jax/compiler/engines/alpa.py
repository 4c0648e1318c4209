"""The engine ``alpa``: our problems in Alpa's terms, solved by Alpa's code in its worker process."""

import numpy as np

from arena_jax.compiler.engines.alpa_process import AlpaProcess
from arena_jax.compiler.engines.problem import StrategyProblem, StrategySolution
from arena_jax.compiler.engines.stages import Stage, StageProblem, StageSolution, search_bounds
from arena_jax.compiler.engines.units import Units, cap_after
from arena_jax.errors import ArenaError


def solve_strategies(
    worker: AlpaProcess, problem: StrategyProblem, *, time_limit_s: float | None = None
) -> StrategySolution | None:
    """One strategy per node by Alpa's ILP solve (CBC, to optimality); ``None`` when nothing fits.

    Alpa's own bound of the memory is per point in the program; one point at which everything lives is
    the sum that we bound. Forbidden pairs are what Alpa calls aliases that must not differ.

    Raises:
        ArenaError: the worker is missing, crashes, or takes longer than ``time_limit_s``.
    """
    if not problem.may_fit():
        return None
    kept = [np.flatnonzero(np.isfinite(cost)) for cost in problem.costs]
    allowed = StrategyProblem(
        costs=tuple(cost[k] for cost, k in zip(problem.costs, kept, strict=True)),
        memory=tuple(memory[k] for memory, k in zip(problem.memory, kept, strict=True)),
        edges={(u, v): seconds[np.ix_(kept[u], kept[v])] for (u, v), seconds in problem.edges.items()},
        memory_cap=problem.memory_cap,
    )
    if any(not np.isfinite(seconds).any() for seconds in allowed.edges.values()):
        return None
    cap = allowed.memory_cap
    while True:
        units = Units.of(allowed, cap)
        fields, arrays = _ilp_arguments(units)
        answer, found = worker.call("ilp", fields, arrays, timeout_s=time_limit_s)
        if not answer["feasible"]:
            return None
        choices = [int(i) for i in found["choices"]]
        if (tighter := cap_after(allowed, cap, choices)) is None:
            break
        cap = tighter
    original = [int(k[i]) for k, i in zip(kept, choices, strict=True)]
    proved = units.seconds(answer["objective"]) if answer["proved"] else -np.inf
    return problem.solution(original, proved)


def _ilp_arguments(units: Units) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The arguments of ``alpa.shard_parallel.auto_sharding._call_solver_serialized_args``."""
    sizes = [cost.size for cost in units.costs]
    num_nodes = len(sizes)
    memory, cap = units.memory, 0.0  # a cap of 0 is none
    alive = np.zeros(num_nodes, int)
    if units.room is not None:
        # One unit that is always taken: a cap that leaves nothing to give away is not 0 either.
        memory, cap = [memory[0] + 1.0, *memory[1:]], units.room + 1.0
        alive[0] = num_nodes
    pairs = list(units.edges)
    forbidden = [pair for pair in pairs if not np.isfinite(units.edges[pair]).all()]
    return {"num_nodes": num_nodes, "memory_cap": cap}, {
        "s_len": np.array(sizes),
        "s_follow": np.full(num_nodes, -1),
        "E": np.array(pairs, int).reshape(-1),
        "A": np.array(forbidden, int).reshape(-1),
        "L": np.concatenate([alive, np.arange(alive.sum())]),
        "c": np.concatenate(units.costs),
        "d": np.zeros(sum(sizes)),
        "m": np.concatenate(memory),
        "r": _flat([np.where(np.isfinite(costs), costs, 0.0) for costs in units.edges.values()]),
        "v": _flat([~np.isfinite(units.edges[pair]) for pair in forbidden]),
    }


def _flat(matrices: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(matrix.reshape(-1) for matrix in matrices)])


def best_stages(worker: AlpaProcess, problem: StageProblem) -> StageSolution | None:
    """The best cut by Alpa's dynamic program, which adds up in float32; ``None`` when nothing fits.

    A stage's time depends on how many stages follow it only through the memory it may take. Alpa says
    so with configurations: one per place from the end, allowed with so many stages after it.

    Raises:
        ArenaError: the worker is missing or crashes.
    """
    fields, arrays = _stage_arguments(problem)
    worker.call("stages", {}, arrays)

    def least_sum(bound: float) -> list[Stage] | None:
        answer, _ = worker.call("cut", {**fields, "bound": bound}, {})
        if not answer["feasible"]:
            return None
        return [(first, end - 1, choice) for first, end, choice in answer["stages"]]

    return search_bounds(problem, least_sum)


def _stage_arguments(problem: StageProblem) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """The arguments of ``alpa.pipeline_parallel.stage_construction.training_dp_impl_2``, all bounds together."""
    seconds, num_stages, num_layers = problem.seconds, problem.num_stages, problem.num_layers
    if (seconds[1:] < seconds[:-1]).any():
        raise ArenaError(
            "alpa cannot say that a stage is faster with more stages after it", hint="use plan.engine=highs"
        )
    rows: list[np.ndarray] = []
    times: list[np.ndarray] = []
    for k in range(num_stages):
        listed = np.isfinite(seconds[k]) & np.tri(num_layers, dtype=bool).T
        if k + 1 < num_stages:
            # The configuration for one place earlier costs the same and is allowed here too.
            listed &= seconds[k] != seconds[k + 1]
        choice, first, last = np.nonzero(listed)
        time = seconds[k][listed]
        rows.append(
            np.stack([first, last, choice, np.full(time.size, k), time + problem.boundary_s[first]], axis=1).astype(
                float
            )
        )
        times.append(time)
    shape = num_layers, num_layers, len(problem.sizes), num_stages
    return {"num_layers": num_layers, "num_devices": problem.total, "num_stages": num_stages}, {
        "candidates": np.concatenate(rows),
        "times": np.concatenate(times),
        "submesh_sizes": np.array(problem.sizes, np.int64),
        "max_n_succ_stages": np.broadcast_to(np.arange(num_stages), shape).astype(np.int64),
    }
