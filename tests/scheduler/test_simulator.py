"""Conservation laws under random workloads, failures, stragglers and errors; snapshots, replays, horizons, rounds."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import ArenaError
from arena_jax.scheduler import Cluster, RestartCosts, Result, Settings, Simulator, Workload, make_policy, summary
from arena_jax.scheduler.policies import PAPER_FORMS, POLICIES, Arena, Fcfs
from arena_jax.scheduler.policy import Decision, Jobs, Stateless, View
from arena_jax.scheduler.seeds import Stragglers, estimate_errors, node_failures, permuted, scale_arrivals
from arena_jax.scheduler.simulator import FINISHED, REJECTED, RUNNING, WAITING
from arena_jax.scheduler.snapshot import Replay, restore, snapshot
from tests.scheduler.build import A100, cluster, finishes, job, profiles, run, workload

FORMS = [*POLICIES, *(f"{name}@paper" for name in PAPER_FORMS)]


def random_workload(seed: int, num_jobs: int = 25, *, varied: bool = False) -> Workload:
    """Jobs of three models on 18 devices of three types; ``varied`` gives some deadlines, weights and limits."""
    rng = np.random.default_rng(seed)
    on: Cluster = cluster(a100=(2, 4), v100=(1, 4), a10=(3, 2))
    tables = {}
    for name in ("x", "y", "z"):
        base, table = rng.uniform(1, 8), {}
        for kind, slower, counts in (
            ("a100", 1.0, (1, 2, 4, "2x4")),
            ("v100", 2.0, (1, 2, 4)),
            ("a10", 3.0, (1, 2, "2x2")),
        ):
            for i, count in enumerate(counts):
                if rng.random() < 0.85 or (kind == "a100" and i == 0):
                    table[f"{kind}:{count}"] = base * slower / rng.uniform(1.3, 1.9) ** i
        tables[name] = table
    jobs = [
        job(
            f"J{i}",
            float(rng.integers(0, 4000)),
            int(rng.integers(5, 300)),
            int(rng.choice([1, 2, 4])),
            model=str(rng.choice(["x", "y", "z"])),
            device_type=str(rng.choice(["a100", "v100", "a10"])),
            global_batch=8,
        )
        for i in range(num_jobs)
    ]
    if varied:
        jobs = [
            replace(
                j,
                weight=float(rng.choice([0.2, 1.0, 9.0])),
                deadline_s=j.arrival_s + float(rng.uniform(1, 900)) if rng.random() < 0.4 else None,
                max_devices=int(rng.choice([1, 2, 4])) if rng.random() < 0.4 else None,
                allowed_types=("a100", str(rng.choice(["v100", "a10"]))) if rng.random() < 0.4 else (),
            )
            for j in jobs
        ]
    return workload(jobs, on, profiles(**tables))


def check_conservation(result: Result, *, exact_work: bool) -> None:
    """No device twice, no overlap of a job with itself, no lost work, only feasible allocations."""
    built = result.workload
    columns = built.columns
    by_job = defaultdict(list)
    by_node = defaultdict(list)
    for s in result.segments:
        assert s.end_s >= s.start_s >= built.jobs[s.job].arrival_s - 1e-6
        assert np.isfinite(built.step_s[s.job, s.column])
        allocation = columns.allocations[s.column]
        assert len(s.nodes) == allocation.num_nodes == len(set(s.nodes))
        by_job[s.job].append(s)
        for node in s.nodes:
            by_node[allocation.device_type, node] += [
                (s.start_s, allocation.devices_per_node),
                (s.end_s, -allocation.devices_per_node),
            ]
    for (device_type, _), changes in by_node.items():
        held = 0
        for _, change in sorted(changes, key=lambda c: (round(c[0], 6), c[1])):
            held += change
            assert held <= built.cluster.group(device_type).devices_per_node
        assert held == 0
    for j, segments in by_job.items():
        segments.sort(key=lambda s: s.start_s)
        for a, b in itertools.pairwise(segments):
            assert b.start_s >= a.end_s - 1e-6
        if exact_work and result.state[j] == FINISHED:
            steps = sum((s.end_s - s.start_s - s.charge_s) / built.step_s[j, s.column] for s in segments)
            assert steps == pytest.approx(built.num_steps[j], rel=1e-6, abs=1e-3)
    done = result.state == FINISHED
    assert (
        result.finish_s[done] >= built.arrival_s[done] + built.isolated_s[done] + result.start_charge_s - 1e-6
    ).all()


@pytest.mark.parametrize("name", FORMS)
def test_every_policy_conserves(name: str) -> None:
    for seed in (1, 2):
        built = random_workload(seed)
        policy, round_s = make_policy(name)
        result = Simulator(built, policy, Settings(costs=RestartCosts.uniform(30), round_s=round_s)).run()
        check_conservation(result, exact_work=True)
        assert set(result.state.tolist()) <= {FINISHED, REJECTED}
        again = Simulator(built, make_policy(name)[0], Settings(costs=RestartCosts.uniform(30), round_s=round_s)).run()
        assert np.array_equal(result.finish_s, again.finish_s), "not deterministic"


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(["arena", "sia", "fcfs-elastic-any", "arena-paper", "srtf"]))
def test_conservation_under_failures_stragglers_and_errors(seed: int, name: str) -> None:
    built = random_workload(seed)
    start = float(built.arrival_s.min())
    events = node_failures(built.cluster, seed, per_day=20.0, start_s=start, length_s=20_000, repair_s=500.0)
    result = Simulator(
        built,
        make_policy(name)[0],
        Settings(
            costs=RestartCosts(start=20, resume=25, grow=30, shrink=5, move=40, migrate=30, failure=60),
            estimates=estimate_errors(built, seed, 0.2),
            learn=True,
            straggle=Stragglers(seed=seed, share=0.2),
            node_events=events,
            save_every_s=100.0,
        ),
    ).run()
    check_conservation(result, exact_work=False)
    assert (result.state == FINISHED).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(FORMS))
def test_laws_hold_with_deadlines_weights_limits_failures_and_drains(seed: int, name: str) -> None:
    built = random_workload(seed, varied=True)
    rng = np.random.default_rng(seed)
    start = float(built.arrival_s.min())
    failures = node_failures(built.cluster, seed, per_day=20.0, start_s=start, length_s=20_000, repair_s=500.0)
    kinds = rng.choice(["fail", "drain"], size=len(failures))
    events = [e if e.kind == "up" else replace(e, kind=str(k)) for e, k in zip(failures, kinds, strict=True)]
    policy, round_s = make_policy(name)
    costs = RestartCosts(start=20, resume=25, grow=30, shrink=5, move=40, migrate=30, failure=60)
    result = Simulator(built, policy, Settings(costs=costs, round_s=round_s, node_events=events)).run()
    check_conservation(result, exact_work=True)
    assert set(result.state.tolist()) <= ({FINISHED, REJECTED} if name == "elasticflow" else {FINISHED})
    down = defaultdict(list)
    for event in events:
        at = down[event.device_type, event.node]
        if event.kind == "up":
            at[-1] = (at[-1], event.time_s)
        else:
            at.append(event.time_s)
    for s in result.segments:
        allocation, spec = built.columns.allocations[s.column], built.jobs[s.job]
        assert allocation.num_devices <= (spec.max_devices or 99)
        assert not spec.allowed_types or allocation.device_type.partition("-")[0] in spec.allowed_types
        for node in s.nodes:
            assert all(s.end_s <= a + 1e-6 or s.start_s >= b - 1e-6 for a, b in down[allocation.device_type, node])


@pytest.mark.parametrize("name", ["arena", "gavel", "tiresias", "sia@paper", "elasticflow"])
def test_a_snapshot_goes_on_as_the_original(name: str) -> None:
    built = random_workload(7)
    policy, round_s = make_policy(name)
    chosen = Settings(round_s=round_s)
    simulator = Simulator(built, policy, chosen)
    for _ in range(30):
        simulator.step()
    text = json.dumps(snapshot(simulator))
    whole = simulator.run()
    resumed = restore(built, make_policy(name)[0], chosen, json.loads(text)).run()
    assert np.allclose(whole.finish_s, resumed.finish_s, rtol=0, atol=1e-9, equal_nan=True)
    assert whole.segments == resumed.segments


def test_a_snapshot_of_something_else_is_refused() -> None:
    built = random_workload(7)
    data = snapshot(Simulator(built, Arena(), Settings()))
    with pytest.raises(ArenaError, match="policy"):
        restore(built, Fcfs(), Settings(), data)
    with pytest.raises(ArenaError, match="another workload"):
        restore(random_workload(7, 5), Arena(), Settings(), data)
    with pytest.raises(ArenaError, match="format"):
        restore(built, Arena(), Settings(), {**data, "format": 99})


def test_a_replay_does_it_again() -> None:
    built = random_workload(3)
    result = run(built, Arena())
    assert np.allclose(run(built, Replay(result.segments)).finish_s, result.finish_s)


def test_a_horizon_tells_finished_running_and_waiting_apart() -> None:
    jobs = [job("A"), job("B", 1), job("C", 2), job("D", 900)]
    metrics = summary(run(workload(jobs), Fcfs(), horizon_s=150.0))
    assert (metrics["num_jobs"], metrics["finished"], metrics["running"], metrics["waiting"]) == (4, 1, 1, 1)
    assert metrics["mean_jct_s"] == metrics["max_jct_s"] == 110.0
    assert metrics["makespan_s"] is None


def test_estimates_mislead_the_policy_and_not_the_clock() -> None:
    built = workload([job("A")])
    # Believed: four devices are slower than two. The policy takes two; the clock charges what two really take.
    factor = np.array([[1.0, 1.0, 3.0]])
    assert finishes(run(built, Arena(), estimates=factor)) == {"A": 135.0}
    assert finishes(run(built, Arena())) == {"A": 110.0}


def test_stragglers_slow_the_clock() -> None:
    assert finishes(run(workload([job("A")]), Fcfs(), straggle=Stragglers(seed=0, share=1.0, factor=1.5))) == {
        "A": 160.0
    }


def test_a_drain_loses_no_work() -> None:
    from arena_jax.scheduler import NodeEvent

    drain = NodeEvent(time_s=50, device_type="a100-40", node=0, kind="drain")
    up = NodeEvent(time_s=60, device_type="a100-40", node=0, kind="up")
    result = run(workload([job("A")]), Fcfs(), node_events=(drain, up), save_every_s=35.0)
    assert finishes(result) == {"A": 130.0}
    assert [s.cause for s in result.segments] == ["start", "resume"]


def test_restart_costs_by_cause() -> None:
    costs = RestartCosts(start=10, resume=20, grow=30, shrink=1, move=50, migrate=5, failure=7)
    from arena_jax.scheduler.policies import FcfsElastic

    # A shrinks at 60 for one second only: 60 + 1 + 62.5.
    result = Simulator(workload([job("A"), job("B", 60)]), FcfsElastic(), Settings(costs=costs)).run()
    assert finishes(result)["A"] == 123.5


def test_a_policy_that_never_moves_is_an_error_not_a_loop() -> None:
    class Idle(Stateless):
        name = "idle"

        def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
            return Decision(np.full(len(jobs), -1))

    with pytest.raises(ArenaError, match="nothing will ever wake"):
        run(workload([job("A")]), Idle())


def test_cheating_policies_are_caught() -> None:
    class Greedy(Stateless):
        name = "greedy"

        def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
            return Decision(np.full(len(jobs), 2))

    with pytest.raises(AssertionError, match="uses"):
        run(workload([job("A"), job("B")]), Greedy())


def test_seeds_permute_and_scales_divide() -> None:
    jobs = [job(f"J{i}", 100.0 + 10 * i, 10 + i, deadline_s=500.0 + 10 * i) for i in range(20)]
    assert permuted(jobs, 0) == jobs
    other = permuted(jobs, 3)
    assert [j.arrival_s for j in other] == [j.arrival_s for j in jobs]
    assert sorted(j.num_steps for j in other) == sorted(j.num_steps for j in jobs)
    assert [j.num_steps for j in other] != [j.num_steps for j in jobs]
    assert permuted(jobs, 3) == other
    scaled = scale_arrivals(jobs, 10.0)
    assert scaled[5].arrival_s == pytest.approx(105.0)
    assert scaled[5].deadline_s - scaled[5].arrival_s == pytest.approx(400.0)  # type: ignore[operator]


def test_states_are_what_they_are_called() -> None:
    simulator = Simulator(workload([job("A"), job("B", 1)]), Fcfs(), Settings())
    simulator.step()
    simulator.step()
    assert simulator.state.tolist() == [RUNNING, WAITING]


def test_profiles_of_other_types_do_not_matter() -> None:
    built = workload([job("A")], cluster(a100=(1, 4)), profiles(m=A100 | {"h100:8": 0.1}))
    assert len(built.columns) == 3
