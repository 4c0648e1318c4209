"""The artifact's own numbers: FCFS under its rules, bounds, what arena reaches where there is no contention."""

import csv

import numpy as np
import pytest

from arena_jax.scheduler import Scenario, isolated_bound_s, load_trace, simulate
from arena_jax.scheduler.metrics import completion_times_s
from arena_jax.scheduler.simulator import FINISHED
from arena_jax.scheduler.tables import artifact_cluster, data_parallel_only, load_artifact
from tests.scheduler.build import DATA, needs_data

pytestmark = needs_data


def scenario(trace: str, **kwargs: object) -> Scenario:
    cluster = artifact_cluster()
    profiles = load_artifact(DATA / "arena_artifact/measured_iteration_seconds.csv", cluster)
    jobs = tuple(load_trace(DATA / f"arena_artifact/traces/{trace}.csv"))
    return Scenario(jobs=jobs, cluster=cluster, profiles=profiles, **kwargs)  # type: ignore[arg-type]


def recorded(trace: str, policy: str) -> dict[str, float]:
    with (DATA / "arena_artifact/recorded_policies.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["trace"], row["policy"]) == (trace, policy)]
    return {key: float(value) for key, value in rows[0].items() if key not in ("trace", "policy")}


def test_fcfs_on_pai_to_completion() -> None:
    result = simulate(scenario("pai", round_s=300.0, quantise=True), "fcfs")
    times = completion_times_s(result)
    assert (result.state == FINISHED).all()
    assert times.mean() == pytest.approx(7459, rel=0.02)
    # 124 of them within the recorded horizon.
    known = recorded("pai", "fcfs")
    first = np.sort(times)[: int(known["finished_jobs"])]
    assert first.mean() == pytest.approx(known["mean_jct_s"], rel=0.02)


def test_fcfs_on_helios_by_round_500() -> None:
    known = recorded("helios_venus", "fcfs")
    result = simulate(scenario("helios_venus", round_s=300.0, quantise=True, horizon_s=500 * 300.0), "fcfs")
    times = completion_times_s(result)[result.state == FINISHED]
    assert len(times) == known["finished_jobs"] == 437
    assert times.mean() == pytest.approx(known["mean_jct_s"], rel=0.005)
    assert np.median(times) == known["median_jct_s"] == 9900
    assert times.max() == known["max_jct_s"] == 108_000


@pytest.mark.parametrize(("trace", "isolated", "bound"), [("pai", 2083, 2134), ("helios_venus", 4910, 4975)])
def test_arena_reaches_the_bound_where_there_is_no_contention(trace: str, isolated: float, bound: float) -> None:
    case = scenario(trace)
    workload = case.workload()
    assert workload.isolated_s.mean() == pytest.approx(isolated, abs=1)
    arena = completion_times_s(simulate(case, "arena")).mean()
    assert isolated_bound_s(workload, 40.0) - 1e-6 <= arena <= bound * 1.005
    elastic = completion_times_s(simulate(case, "fcfs-elastic-any")).mean()
    assert arena <= elastic * 1.005


def test_the_data_parallel_switch_narrows_what_a_policy_sees() -> None:
    import json

    case = scenario("pai")
    [memory] = json.loads((DATA / "arena_artifact/data_parallel_memory_gb.json").read_text())
    narrow = data_parallel_only(case.profiles, memory, case.cluster)
    wide = {key: len(list(case.profiles.profile(*key).allocations())) for key in case.profiles.pairs()}
    kept = {key: len(list(narrow.profile(*key).allocations())) for key in narrow.pairs()}
    assert 0 < sum(kept.values()) < sum(wide.values())
    assert all(kept[key] <= wide[key] for key in kept)
