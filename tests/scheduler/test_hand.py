"""Schedules computed by hand, to the second: every policy on cases small enough to follow.

Unless said otherwise: one node of four a100, a job of 100 steps at 2, 1.25 and 1 s a step on 1, 2 and 4 devices,
10 s charged for every start and change.
"""

import pytest

from arena_jax.scheduler import NodeEvent
from arena_jax.scheduler.policies import (
    POLICIES,
    Arena,
    ArenaPaper,
    ElasticFlow,
    Fcfs,
    FcfsElastic,
    Gavel,
    Sia,
    Srtf,
    Tiresias,
    make_policy,
)
from arena_jax.scheduler.simulator import REJECTED
from tests.scheduler.build import A100, cluster, finishes, job, profiles, run, workload


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "gavel"])
def test_one_job_runs_at_once_on_everything(name: str) -> None:
    # 10 s charge, then 100 steps of 1 s.
    assert finishes(run(workload([job("A")]), make_policy(name)[0])) == {"A": 110.0}


def test_fcfs_waits_for_its_request() -> None:
    result = run(workload([job("A"), job("B", 10)]), Fcfs())
    assert finishes(result) == {"A": 110.0, "B": 220.0}
    assert result.run_s.tolist() == [110.0, 110.0]


def test_fcfs_blocks_the_line() -> None:
    # A holds two devices until 135; B wants four and blocks C, though C would fit.
    jobs = [job("A", num_devices=2), job("B", 1), job("C", 2, num_devices=2)]
    assert finishes(run(workload(jobs), Fcfs())) == {"A": 135.0, "B": 245.0, "C": 380.0}
    # With backfilling C starts at 2 and B waits for both.
    assert finishes(run(workload(jobs), Fcfs(blocking="none"))) == {"A": 135.0, "C": 137.0, "B": 247.0}


def test_fcfs_blocks_one_type_or_all() -> None:
    on = cluster(a100=(1, 4), a10=(1, 2))
    times = profiles(m=A100 | {"a10:2": 4.0})
    jobs = [job("A"), job("B", 1), job("C", 2, num_devices=2, device_type="a10")]
    assert finishes(run(workload(jobs, on, times), Fcfs()))["C"] == 412.0
    assert finishes(run(workload(jobs, on, times), Fcfs(blocking="all")))["C"] == 520.0


def test_elastic_fcfs_shrinks_for_the_head_and_grows_only_where_it_pays() -> None:
    # A runs on 4 (50 steps by 60). B arrives: A shrinks to 2 (10 s + 50 x 1.25 = 132.5), B is admitted at 1 and
    # grows to 2 within the event (60 + 10 + 125). At 132.5 growing to 4 would save 12.5 s, under twice 10 s.
    result = run(workload([job("A"), job("B", 60)]), FcfsElastic())
    assert finishes(result) == {"A": 132.5, "B": 195.0}
    assert result.num_restarts.tolist() == [1, 0]
    # With a hysteresis of one charge it grows: 132.5 + 10 + 50.
    assert finishes(run(workload([job("A"), job("B", 60)]), FcfsElastic(hysteresis=1.0)))["B"] == 192.5


def test_elastic_fcfs_over_any_type() -> None:
    on = cluster(a100=(1, 4), a10=(1, 2))
    times = profiles(m=A100 | {"a10:2": 1.5})
    # B finds the a100 taken and starts on the a10. By 110 it has done 40 / 1.5 steps, and moving saves half a second
    # on each of the 73.3 left: 110 + 10 + 73.333.
    result = run(workload([job("A"), job("B", 60)], on, times), FcfsElastic(any_type=True))
    assert finishes(result) == {"A": 110.0, "B": 193.333}
    assert [s.cause for s in result.segments] == ["start", "start", "move"]


def test_srtf_preempts() -> None:
    # At 50 A has 60 steps left, B 20: B runs 50 + 10 + 20, A resumes 80 + 10 + 60.
    result = run(workload([job("A"), job("B", 50, 20)]), Srtf())
    assert finishes(result) == {"B": 80.0, "A": 150.0}
    assert result.run_s.tolist() == [120.0, 30.0]


def test_tiresias_demotes_by_attained_service() -> None:
    # At 900 A has attained 3,600 device-s, past the first threshold: B preempts it and A resumes at 1,010.
    jobs = [job("A", num_steps=2000), job("B", 900)]
    assert finishes(run(workload(jobs), Tiresias())) == {"B": 1010.0, "A": 2130.0}
    # At 600 it has only 2,400: B waits until A crosses 3,250 at 812.5 (timer), then runs 110 s.
    jobs = [job("A", num_steps=2000), job("B", 600)]
    assert finishes(run(workload(jobs), Tiresias()))["B"] == pytest.approx(922.5, abs=0.01)


def test_gavel_throughput_matches_jobs_to_types() -> None:
    # A loses three quarters of its speed on the a10, B a fifth: A gets the a100 although both prefer it. At 110 the
    # a100 is free and B moves, 80 steps done: 110 + 10 + 20.
    on = cluster(a100=(1, 1), a10=(1, 1))
    times = profiles(a={"a100:1": 1.0, "a10:1": 4.0}, b={"a100:1": 1.0, "a10:1": 1.25})
    jobs = [job("A", num_devices=1, model="a"), job("B", num_devices=1, model="b")]
    assert finishes(run(workload(jobs, on, times), Gavel(objective="throughput"))) == {"A": 110.0, "B": 140.0}


def test_gavel_max_min_shares_time() -> None:
    # Two equal jobs on one a100: half of the time each, in rounds of 100 s. A 0-100 (90 steps), B 100-200 (90); both
    # have had the same then, so the one that runs stays: B to 210, A 210 + 10 + 10.
    on = cluster(a100=(1, 1))
    times = profiles(m={"a100:1": 1.0})
    jobs = [job("A", num_devices=1), job("B", num_devices=1)]
    assert finishes(run(workload(jobs, on, times), Gavel(round_s=100.0))) == {"A": 230.0, "B": 210.0}


def test_sia_splits_between_equals() -> None:
    # sqrt(1.6) twice beats sqrt(2) and nothing: two devices each.
    assert finishes(run(workload([job("A"), job("B")]), Sia())) == {"A": 135.0, "B": 135.0}


def test_sia_ramps_up_in_rounds() -> None:
    # On 1 until 60 (25 steps), on 2 until 120 (40), then on 4: 120 + 10 + 35. The restart factors 60/70 and 110/130
    # leave doubling worth it both times.
    result = run(workload([job("A")]), Sia(ramp=True, round_s=60.0), round_s=60.0)
    assert finishes(result) == {"A": 165.0}
    assert [result.workload.columns.num_devices[s.column] for s in result.segments] == [1, 2, 4]


def test_elasticflow_doubles_the_cheapest() -> None:
    assert finishes(run(workload([job("A"), job("B")]), ElasticFlow(loose=True))) == {"A": 135.0, "B": 135.0}
    # The shorter job grows first: it adds 40 x 0.5 device-s, the longer 100 x 0.5; then both sit on 2.
    # With three jobs the fourth device goes to C, the shortest.
    jobs = [job("A"), job("B"), job("C", num_steps=40)]
    result = run(workload(jobs), ElasticFlow(loose=True))
    assert finishes(result)["C"] == 60.0


def test_elasticflow_admits_by_minimum_share() -> None:
    # On two devices 135 s give 108 steps of the 100 and two charges (16) needed, so A is promised four; B cannot be
    # promised anything. At 92 A has 18 steps and 43 s left, for which two devices are enough (34.4 of 18 + 16 steps):
    # 92 + 10 + 22.5. C starts on the others; at 124.5 it has done 18 steps and grows: 124.5 + 10 + 82.
    jobs = [job("A", deadline_s=135.0), job("B", 1, deadline_s=140.0), job("C", 2)]
    result = run(workload(jobs), ElasticFlow(slot_s=10.0))
    assert result.state.tolist()[1] == REJECTED
    assert finishes(result)["A"] == 124.5
    assert finishes(result)["C"] == 216.5


def test_arena_paper_halves_for_an_arrival_and_doubles_after() -> None:
    # B asks for two: A is halved (132.5), B runs on two; at 132.5 B doubles, 50 steps left: 132.5 + 10 + 50.
    result = run(workload([job("A"), job("B", 60, num_devices=2)]), ArenaPaper())
    assert finishes(result) == {"A": 132.5, "B": 192.5}


def test_arena_takes_the_other_type_and_moves_when_it_pays() -> None:
    # B takes the idle a10 rather than half of A's devices, and moves at 110 with 80 steps left: 110 + 10 + 80.
    on = cluster(a100=(1, 4), a10=(1, 2))
    result = run(workload([job("A"), job("B", 60)], on, profiles(m=A100 | {"a10:2": 2.0})), Arena())
    assert finishes(result) == {"A": 110.0, "B": 200.0}
    assert [s.cause for s in result.segments] == ["start", "start", "move"]


def test_arena_stays_when_moving_does_not_pay() -> None:
    # On the a10 B needs 1.05 s a step: at 110, 61.9 steps are left, 65 s here against 10 + 61.9 there.
    on = cluster(a100=(1, 4), a10=(1, 2))
    result = run(workload([job("A"), job("B", 60)], on, profiles(m=A100 | {"a10:2": 1.05})), Arena())
    assert finishes(result) == {"A": 110.0, "B": 175.0}


def test_arena_shrinks_before_it_lets_others_wait() -> None:
    # Two equal jobs at once share: 10 + 125 each.
    assert finishes(run(workload([job("A"), job("B")]), Arena())) == {"A": 135.0, "B": 135.0}


def test_a_failed_node_and_what_it_loses() -> None:
    down = NodeEvent(time_s=50, device_type="a100-40", node=0, kind="fail")
    up = NodeEvent(time_s=150, device_type="a100-40", node=0, kind="up")
    # 40 steps done by 50; 150 + 10 + 60.
    assert finishes(run(workload([job("A")]), Fcfs(), node_events=(down, up))) == {"A": 220.0}
    # Saved every 30 s of productive time: 10 s are lost.
    result = run(workload([job("A")]), Fcfs(), node_events=(down, up), save_every_s=30.0)
    assert finishes(result) == {"A": 230.0}
    assert [s.cause for s in result.segments] == ["start", "failure"]


def test_scattered_devices_are_gathered_by_a_migration() -> None:
    # Two nodes of two. A and B fill the first, C half of the second. B ends at 60 and D wants a whole node: one
    # device is free on each, so C (or A) migrates and pays 10 s.
    on = cluster(a100=(2, 2))
    times = profiles(m={"a100:1": 1.0, "a100:2": 0.5})
    jobs = [
        job("A", num_devices=1),
        job("B", num_steps=50, num_devices=1),
        job("C", num_devices=1),
        job("D", 1, num_devices=2),
    ]
    result = run(workload(jobs, on, times), Fcfs())
    done = finishes(result)
    assert (done["B"], done["D"]) == (60.0, 120.0)
    assert sorted([done["A"], done["C"]]) == [110.0, 120.0]
    assert [s.cause for s in result.segments].count("migrate") == 1


def test_artifact_rounds_quantise_starts_and_ends() -> None:
    # Arrives at 130, starts at 300, needs 110 s, is seen done at 600; counted from 0.
    result = run(workload([job("A", 130)]), Fcfs(), round_s=300.0, quantise=True)
    assert result.finish_s[0] - result.counted_arrival_s[0] == 600.0


def test_an_arrival_at_the_instant_of_a_completion_finds_the_devices_free() -> None:
    assert finishes(run(workload([job("A"), job("B", 110)]), Fcfs())) == {"A": 110.0, "B": 220.0}


def test_a_change_during_a_charge_starts_a_new_one() -> None:
    # B arrives at 5, inside A's charge: A shrinks, 5 + 10 + 125.
    assert finishes(run(workload([job("A"), job("B", 5)]), FcfsElastic())) == {"A": 140.0, "B": 140.0}
