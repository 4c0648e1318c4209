"""No policy beats the optimum: by brute force on tiny cases, and the linear program is a bound on the same."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.scheduler import JobSpec, Workload, interval_bound_s, isolated_bound_s
from arena_jax.scheduler.policies import POLICIES, make_policy
from tests.scheduler.build import cluster, job, profiles, run, workload

RESTART_S = 5.0
WAKES = {"gavel", "gavel-throughput", "tiresias", "elasticflow"}  # decide between events as well


def optimum(built: Workload, restart_s: float) -> float:
    """Least sum of completion times over allocations changed only at arrivals and completions, by exhaustion."""
    columns = built.columns
    arrival, steps = built.arrival_s, built.num_steps
    num = len(arrival)
    options = [[-1, *np.flatnonzero(np.isfinite(built.step_s[j])).tolist()] for j in range(num)]
    fastest = built.step_s.min(axis=1)
    best = math.inf

    def search(
        now: float, left: tuple[float, ...], held: tuple[int, ...], until: tuple[float, ...], total: float
    ) -> None:
        nonlocal best
        alive = [j for j in range(num) if left[j] > 0]
        floor = total + sum(max(now, arrival[j]) + left[j] * fastest[j] - arrival[j] for j in alive)
        if floor >= best - 1e-9:
            return
        if not alive:
            best = total
            return
        active = [j for j in alive if arrival[j] <= now + 1e-9]
        later = min((arrival[j] for j in alive if arrival[j] > now + 1e-9), default=math.inf)
        for choice in itertools.product(*(options[j] for j in active)):
            chosen = np.array(choice, dtype=np.int64)
            if (columns.usage(chosen) > columns.capacity).any():
                continue
            new_held, new_until, ends = list(held), list(until), {}
            for j, c in zip(active, choice, strict=True):
                if c != held[j]:
                    new_held[j], new_until[j] = c, now + restart_s
                if c >= 0:
                    ends[j] = max(new_until[j], now) + left[j] * built.step_s[j, c]
            after = min([later, *ends.values()])
            if math.isinf(after):
                continue
            new_left, done = list(left), total
            for j in ends:
                worked = max(0.0, after - max(new_until[j], now)) / built.step_s[j, new_held[j]]
                new_left[j] = 0.0 if ends[j] <= after + 1e-9 else left[j] - worked
                if new_left[j] == 0.0:
                    done += after - arrival[j]
                    new_held[j] = -1
            search(after, tuple(new_left), tuple(new_held), tuple(new_until), done)

    search(float(arrival.min()), tuple(steps), (-1,) * num, (0.0,) * num, 0.0)
    return best


@st.composite
def tiny(draw: st.DrawFn) -> Workload:
    """Two or three jobs on up to four devices of two types."""
    on = cluster(a100=(1, draw(st.sampled_from([1, 2]))), a10=(1, draw(st.sampled_from([1, 2]))))
    tables = {}
    for name in ("x", "y"):
        base = draw(st.floats(0.5, 3.0))
        slower = draw(st.floats(1.0, 4.0))
        scaling = draw(st.floats(1.1, 2.0))
        tables[name] = {
            "a100:1": base,
            "a100:2": base / scaling,
            "a10:1": base * slower,
            "a10:2": base * slower / scaling,
        }
    jobs: Sequence[JobSpec] = [
        job(
            f"J{i}",
            draw(st.sampled_from([0.0, 7.0, 40.0])),
            draw(st.integers(5, 60)),
            draw(st.sampled_from([1, 2])),
            model=draw(st.sampled_from(["x", "y"])),
            device_type=draw(st.sampled_from(["a100", "a10"])),
        )
        for i in range(draw(st.integers(2, 3)))
    ]
    return workload(jobs, on, profiles(**tables))


@settings(max_examples=15)
@given(tiny())
def test_brute_force_bounds_every_policy_that_only_wakes_at_events(built: Workload) -> None:
    least = optimum(built, RESTART_S)
    for name in POLICIES:
        if name in WAKES:
            continue
        result = run(built, make_policy(name)[0], restart_s=RESTART_S)
        total = float((result.finish_s - built.arrival_s).sum())
        assert total >= least - 1e-4, name
    arena = run(built, make_policy("arena")[0], restart_s=RESTART_S)
    # Not clairvoyant, yet never far off on cases this small.
    assert float((arena.finish_s - built.arrival_s).sum()) <= 1.6 * least


@settings(max_examples=15)
@given(tiny())
def test_the_linear_program_bounds_the_optimum(built: Workload) -> None:
    least = optimum(built, RESTART_S) / len(built.jobs)
    bound = interval_bound_s(built, RESTART_S, num_intervals=12)
    assert bound <= least + 1e-4
    assert bound >= isolated_bound_s(built, RESTART_S) - 1e-4


def test_the_bound_is_tight_for_one_job() -> None:
    built = workload([job("A")])
    assert interval_bound_s(built, 10.0) == pytest.approx(110.0)
    assert isolated_bound_s(built, 10.0) == 110.0


def test_the_bound_sees_contention() -> None:
    # One device, two jobs of 100 s: the second cannot be done before 200.
    on = cluster(a100=(1, 1))
    built = workload([job("A", num_devices=1), job("B", num_devices=1)], on, profiles(m={"a100:1": 1.0}))
    assert 100.0 < interval_bound_s(built, 0.0) <= 150.0
