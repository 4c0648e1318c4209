"""The real alpa as an engine: equal to brute force and to our own solvers, and what happens when it fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arena_jax import solver_setup
from arena_jax.compiler.engines import Comparison, StageProblem, StrategyProblem, alpa, engine
from arena_jax.compiler.engines.alpa_process import AlpaProcess, alpa_process
from arena_jax.compiler.inter_op.cuts import best_stages
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import GridShape
from tests.test_inter import GRIDS, Table, all_stagings, objective
from tests.test_strategies_solver import brute_force, random_problem

pytestmark = pytest.mark.skipif(solver_setup.alpa_folder() is None, reason="alpa is not installed (make setup)")
few = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(few, max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, -0.05, 0.0, 0.1, 0.3, 0.6]),
)
def test_both_find_the_best_strategies(seed: int, density: float, forbidden: float, cap: float | None) -> None:
    problem = random_problem(seed, num_nodes=4, density=density, forbidden=forbidden, cap=cap)
    best = brute_force(problem)
    both = engine("both")
    solution = both.solve_strategies(problem)
    (compared,) = both.comparisons
    assert compared.highs == pytest.approx(best, rel=1e-6)
    assert compared.alpa == pytest.approx(best, rel=1e-6)
    assert compared.agree
    assert (solution is None) == np.isinf(best)
    if solution is not None:
        assert solution.optimal
        assert problem.memory_cap is None or solution.memory_bytes <= problem.memory_cap


def test_real_units_change_nothing() -> None:
    """Microseconds and gigabytes, far from one: Alpa's solver has absolute tolerances."""
    for seed in range(4):
        small = random_problem(seed, cap=0.3)
        assert small.memory_cap is not None
        real = StrategyProblem(
            costs=tuple(1e-6 * c for c in small.costs),
            memory=tuple(1e9 * m for m in small.memory),
            edges={pair: 1e-6 * seconds for pair, seconds in small.edges.items()},
            memory_cap=1e9 * small.memory_cap,
        )
        solution = engine("alpa").solve_strategies(real)
        assert solution is not None
        assert solution.objective == pytest.approx(1e-6 * brute_force(small), rel=1e-9)


@settings(few, max_examples=60)
@given(
    st.sampled_from(GRIDS),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_both_find_the_best_stages(
    text: str, num_layers: int, num_microbatches: int, seed: int, density: float
) -> None:
    grid = GridShape.parse(text)
    table = Table(grid, num_layers, seed, density=density, monotone=True)
    values = [objective(grid, staging, table, num_microbatches) for staging in all_stagings(grid, num_layers)]
    best = min(values, default=np.inf)
    both = engine("both")
    found = best_stages(grid, num_layers, num_microbatches, table, table.boundary_s, solver=both)
    # Times are small integers, which float32 adds up exactly.
    assert all(compared.highs == compared.alpa for compared in both.comparisons)
    assert (np.inf if found is None else found.objective) == best


def test_float32_is_the_only_difference_of_the_dynamic_programs() -> None:
    rng = np.random.default_rng(1)
    for num_stages, total in ((1, 8), (2, 8), (4, 8), (5, 16)):
        seconds = np.maximum.accumulate(1e-3 * rng.random((num_stages, 4, 12, 12)), axis=0)
        seconds[..., np.tri(12, k=-1, dtype=bool)] = np.inf
        problem = StageProblem(
            num_microbatches=8, seconds=seconds, boundary_s=1e-4 * rng.random(12), sizes=(1, 2, 4, 8), total=total
        )
        both = engine("both")
        assert both.best_stages(problem) is not None
        (compared,) = both.comparisons
        assert compared.highs <= compared.alpa * (1 + 1e-12)
        assert compared.relative_difference < 1e-6


def test_times_that_fall_towards_the_front_are_refused() -> None:
    seconds = np.ones((2, 1, 2, 2))
    seconds[1] = 0.5
    problem = StageProblem(num_microbatches=1, seconds=seconds, boundary_s=np.zeros(2), sizes=(1,), total=2)
    with pytest.raises(ArenaError, match="alpa cannot say"):
        engine("alpa").best_stages(problem)


def test_one_process_serves_a_run_and_ends_with_it() -> None:
    code = """
from arena_jax.compiler.engines import engine
from tests.test_strategies_solver import random_problem
for seed in range(2):
    print(engine("alpa").solve_strategies(random_problem(seed)).objective)
from arena_jax.compiler.engines.alpa_process import alpa_process
print(alpa_process().pid, alpa_process()._scratch.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    *objectives, (pid, scratch) = [line.split() for line in done.stdout.splitlines()]
    assert [float(value) for (value,) in objectives] == [brute_force(random_problem(seed)) for seed in range(2)]
    assert done.stderr == ""
    assert not Path(scratch).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_missing_installation_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena_jax.compiler.engines.alpa_process.alpa_folder", lambda: None)
    with pytest.raises(ArenaError, match="is not installed") as error:
        AlpaProcess().call("hello", {}, {})
    assert "--install-alpa" in error.value.hint


def test_a_broken_installation_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena_jax.compiler.engines.alpa_process.alpa_folder", lambda: tmp_path)
    worker = AlpaProcess()
    with pytest.raises(ArenaError, match=r"alpa failed: .*alpa\.shard_parallel\.auto_sharding"):
        worker.call("hello", {}, {})
    worker.close()


def hard_problem() -> StrategyProblem:
    """Nothing CBC solves in a second: dense, with a knapsack across it."""
    rng = np.random.default_rng(0)
    return StrategyProblem(
        costs=tuple(rng.random(8) for _ in range(14)),
        memory=tuple(rng.random(8) for _ in range(14)),
        edges={(u, v): rng.random((8, 8)) for u in range(14) for v in range(u + 1, 14)},
        memory_cap=5.0,
    )


def test_out_of_time_is_said_and_the_next_call_works() -> None:
    with pytest.raises(ArenaError, match="no answer within 1 s") as error:
        alpa.solve_strategies(alpa_process(), hard_problem(), time_limit_s=1.0)
    assert "highs" in error.value.hint
    assert engine("alpa").solve_strategies(random_problem(0)) is not None


def test_a_crash_is_said_and_the_next_call_works() -> None:
    worker = alpa_process()
    worker.call("hello", {}, {})
    pid = worker.pid
    assert pid is not None
    killer = threading.Timer(0.5, os.killpg, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(ArenaError, match=r"ended in the middle of a call \(SIGKILL\)"):
        engine("alpa").solve_strategies(hard_problem())
    assert engine("alpa").solve_strategies(random_problem(0)) is not None


def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    """The worker and CBC go when whoever asked is gone, even in the middle of a solve."""
    code = """
import os
from arena_jax.compiler.engines import engine
from arena_jax.compiler.engines.alpa_process import alpa_process
from tests.test_alpa_engine import hard_problem
solver = engine("alpa")
print(alpa_process().pid, flush=True)
solver.solve_strategies(hard_problem())
"""
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert run.stdout is not None
    group = int(run.stdout.readline())
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.mps")):  # CBC's input: the solve has begun
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait()
    run.stdout.close()
    with pytest.raises(ProcessLookupError):  # noqa: PT012
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)


def test_engines_by_name() -> None:
    assert engine("highs").name == "highs"
    with pytest.raises(UsageError, match="did you mean 'alpa'"):
        engine("alpaa")


def test_engines_that_disagree_are_told_apart() -> None:
    alike = {"level": "stages", "highs_gap": 0.0, "highs_solve_s": 0.1, "alpa_solve_s": 0.2}
    assert Comparison(highs=1.0, alpa=1.0 + 1e-8, **alike).agree
    assert not Comparison(highs=1.0, alpa=1.001, **alike).agree
    assert not Comparison(highs=1.0, alpa=np.inf, **alike).agree
    assert Comparison(highs=np.inf, alpa=np.inf, **alike).agree
