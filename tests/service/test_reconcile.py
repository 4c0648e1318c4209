"""The loop against a stub machine: where jobs run, what they survive, and that nothing is ever given twice."""

import pytest

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation
from arena_jax.service.job import Phase, Submission
from arena_jax.service.page import stretches
from arena_jax.service.rules import Rules
from tests.service.stub import CLUSTER, Bench, recipe, step_time_s


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_job_alone_gets_the_fastest_devices_and_finishes(bench):
    job = bench.submit(recipe())
    bench.run(5)
    running = bench.job(job)
    assert str(running.held.allocation) == "quick:2x4"
    assert running.phase is Phase.RUNNING
    bench.run(60)
    done = bench.job(job)
    assert (done.phase, done.step, done.held) == (Phase.FINISHED, 100, None)
    assert bench.kinds(job) == ["submit", "planned", "start", "finish"]
    assert bench.executor.launches == [(job.number, 1)]


def test_a_running_job_shrinks_in_its_process_and_grows_back(bench):
    job = bench.submit(recipe("long", steps=600, types=("quick",)))
    bench.run(10)
    bench.requests.answer({"do": "resize", "job": job.id, "grid": "quick:2"})
    bench.run(1)
    asked = bench.job(job)
    assert asked.told == "quick:2"
    assert asked.held.allocation.num_devices == 8
    bench.run(5)
    assert bench.job(job).held.devices == ((0, (0, 1)),)
    bench.requests.answer({"do": "resize", "job": job.id, "grid": "auto"})
    bench.run(300)
    assert bench.job(job).phase is Phase.FINISHED
    assert bench.job(job).run == 1
    changes = [(e["kind"], e["from"], e["to"]) for e in bench.store.events(job=job.id) if "how" in e]
    assert changes == [
        ("start", None, "quick:2x4"),
        ("shrink", "quick:2x4", "quick:2"),
        ("grow", "quick:2", "quick:2x4"),
    ]


def test_a_job_moves_to_another_type_by_a_new_process(bench):
    first = bench.submit(recipe("long", steps=900))
    bench.run(10)
    assert bench.job(first).held.allocation.device_type == "quick"
    bench.requests.answer({"do": "resize", "job": first.id, "grid": "slow:4"})
    bench.run(20)
    job = bench.job(first)
    assert str(job.held.allocation) == "slow:4"
    assert job.run == 2
    moves = [e for e in bench.store.events(last=1000) if e["kind"] == "move"]
    assert [(e["from"], e["to"]) for e in moves] == [("quick:2x4", "slow:4")]
    bench.requests.answer({"do": "resize", "job": first.id, "grid": "auto"})
    bench.run(600)
    assert bench.job(first).phase is Phase.FINISHED


def test_devices_are_free_only_when_the_release_is_confirmed(bench):
    bench.executor.stop_s = 50.0
    rigid = bench.submit(recipe("first", steps=10_000, types=("quick",), min_devices=8))
    bench.run(10)
    bench.requests.answer({"do": "resize", "job": rigid.id, "grid": "pause"})
    second = bench.submit(recipe("second", types=("quick",)))
    bench.run(30)
    assert bench.job(second).phase is Phase.QUEUED
    assert bench.job(second).desired is not None
    assert bench.job(rigid).phase is Phase.STOPPING
    assert bench.job(rigid).held is not None
    bench.run(40)
    assert bench.job(second).phase is Phase.RUNNING
    assert bench.job(rigid).phase is Phase.QUEUED
    assert "pause" in bench.kinds(rigid)
    bench.requests.answer({"do": "resize", "job": rigid.id, "grid": "auto"})
    bench.run(100)
    assert bench.job(rigid).phase is Phase.RUNNING
    assert "resume" in bench.kinds(rigid)


def test_what_does_not_stop_is_killed(tmp_path):
    bench = Bench(tmp_path, rules=Rules(stop_grace_s=20, change_cost_s=4.0), stop_s=1e9)
    job = bench.submit(recipe(steps=10_000))
    bench.run(10)
    bench.requests.answer({"do": "cancel", "job": job.id})
    bench.run(15)
    assert bench.job(job).phase is Phase.STOPPING
    bench.run(15)
    assert bench.job(job).phase is Phase.CANCELLED
    assert "kill" in bench.kinds(job)


def test_a_crash_at_once_is_tried_again_later_and_then_fails_with_its_last_lines(bench):
    bench.executor.crash = lambda job: 1
    job = bench.submit(recipe())
    bench.run(3)
    once = bench.job(job)
    assert once.phase is Phase.QUEUED
    assert once.crashes == 1
    assert "exit code 1; again in 5 s" in once.reason
    bench.run(60)
    failed = bench.job(job)
    assert failed.phase is Phase.FAILED
    assert failed.log_tail == ["first line", "last line"]
    assert [run for _, run in bench.executor.launches] == [1, 2, 3, 4]


def test_a_crash_after_progress_starts_the_count_anew(bench):
    job = bench.submit(recipe(steps=3000))
    bench.run(10)
    for _ in range(6):
        bench.executor.runs[job.number].alive = False
        bench.executor.runs[job.number].exit_code = -9
        bench.run(40)
    alive = bench.job(job)
    assert alive.phase is Phase.RUNNING
    assert alive.crashes == 1
    assert alive.run == 7
    assert "killed by SIGKILL" in [e["why"] for e in bench.store.events(job=job.id) if e["kind"] == "crash"]


def test_usage_errors_are_not_tried_again(bench):
    bench.executor.crash = lambda job: 2
    job = bench.submit(recipe())
    bench.run(5)
    assert bench.job(job).phase is Phase.FAILED
    assert len(bench.executor.launches) == 1


def test_a_hanging_job_is_killed_and_resumes_from_its_checkpoint(tmp_path):
    bench = Bench(tmp_path, rules=Rules(hang_s=120, change_cost_s=4.0))
    job = bench.submit(recipe(steps=2000))
    bench.run(20)
    bench.executor.runs[job.number].hangs = True
    saved = bench.executor.runs[job.number].saved
    bench.run(130)
    assert "hang" in bench.kinds(job)
    assert bench.job(job).run == 2
    assert bench.executor.runs[job.number].step >= saved > 0
    bench.run(900, 3.0)
    assert bench.job(job).phase is Phase.FINISHED


def test_a_command_is_never_moved_and_its_devices_are_not_there_for_others(bench):
    command = bench.submit(Submission(kind="command", name="other", command="true", on="quick:4", expected_s=100.0))
    bench.run(3)
    training = bench.submit(recipe(steps=4000, types=("quick",)))
    bench.run(30)
    assert bench.job(command).phase is Phase.RUNNING
    assert bench.job(training).held.allocation.num_devices == 4
    bench.run(100)
    assert bench.job(command).phase is Phase.FINISHED
    assert bench.job(training).held.allocation.num_devices == 8
    assert len([n for n, _ in bench.executor.launches if n == command.number]) == 1


def test_a_command_that_fails_is_not_run_twice(bench):
    bench.executor.crash = lambda job: 3
    command = bench.submit(Submission(kind="command", name="c", command="false", on="slow:1", expected_s=9.0))
    bench.run(60)
    assert bench.job(command).phase is Phase.FAILED
    assert len(bench.executor.launches) == 1


def test_draining_a_node_moves_its_jobs_away_and_undraining_brings_them_back(bench):
    job = bench.submit(recipe(steps=10_000, types=("quick",)))
    bench.run(10)
    assert len(bench.job(job).held.nodes) == 2
    bench.requests.answer({"do": "drain", "node": "quick/1"})
    bench.run(30)
    assert bench.job(job).held.nodes == (0,)
    bench.start()  # a drained node stays drained
    bench.run(10)
    assert bench.job(job).held.nodes == (0,)
    bench.requests.answer({"do": "undrain", "node": "quick/1"})
    bench.run(30)
    assert bench.job(job).held.nodes == (0, 1)


def test_a_change_that_the_process_refuses_is_made_by_a_new_one(bench):
    job = bench.submit(recipe(steps=10_000, types=("quick",)))
    bench.run(10)
    bench.executor.refuses = True
    bench.requests.answer({"do": "resize", "job": job.id, "grid": "quick:2"})
    bench.run(20)
    assert bench.job(job).held.allocation.num_devices == 2
    assert bench.job(job).run == 2
    assert "refused" in bench.kinds(job)


def test_a_job_without_any_plan_fails_and_says_why(bench):
    job = bench.submit(recipe("hopeless"))
    bench.run(3)
    assert bench.job(job).phase is Phase.FAILED
    assert bench.job(job).reason == "no plan fits"


def test_measured_times_correct_the_estimates(bench):
    job = bench.submit(recipe(steps=5000))
    bench.loop.tick()
    key = bench.job(job).plan_key
    before = bench.loop.indexes.step_times(key)
    index = bench.loop.indexes.of
    index[key] = {a: type(s)(step_time_s=s.step_time_s / 2) for a, s in index[key].items()}
    bench.run(20)
    after = bench.loop.indexes.step_times(key)
    held = bench.job(job).held.allocation
    assert after[held] == pytest.approx(before[held])
    for allocation, seconds in after.items():  # its type learns, the other does not
        same = allocation.device_type == held.device_type
        assert seconds == pytest.approx(before[allocation] if same else before[allocation] / 2)


def test_a_state_that_cannot_be_written_stops_every_action(bench, monkeypatch):
    bench.submit(recipe())
    monkeypatch.setattr(bench.loop.store, "save", _full)
    with pytest.raises(ArenaError, match="disk full"):
        bench.run(3)
    assert bench.executor.launches == []
    monkeypatch.undo()
    bench.start()
    bench.run(3)
    assert len(bench.executor.launches) == 1


def _full(*args, **kwargs):
    raise ArenaError("disk full")


def test_a_service_that_starts_again_adopts_what_runs(bench):
    jobs = [bench.submit(recipe(f"job{i}", steps=800)) for i in range(3)]
    bench.run(20)
    before = {job.number: bench.job(job).run for job in jobs}
    bench.clock.now += 30
    bench.start()
    bench.run(5)
    assert {job.number: bench.job(job).run for job in jobs} == before
    bench.run(2000, 5.0)
    assert all(bench.job(job).phase is Phase.FINISHED for job in jobs)


@pytest.mark.parametrize(
    "policy", ["fcfs", "fcfs-elastic-any", "srtf", "tiresias", "gavel", "sia", "elasticflow-loose"]
)
def test_every_policy_drives_it(tmp_path, policy):
    bench = Bench(tmp_path, policy=policy)
    jobs = [bench.submit(recipe(f"job{i}", steps=60, on="quick:4" if i % 2 else "slow:4")) for i in range(5)]
    bench.run(1200, 5.0)
    assert [bench.job(job).phase for job in jobs] == [Phase.FINISHED] * 5


def test_the_curves_of_a_long_job_are_thinned(bench):
    job = bench.submit(recipe(steps=20_000))
    bench.run(400)
    steps = [step for step, *_ in bench.store.points(job.number)]
    assert steps
    assert all(step % 10 == 0 for step in steps)


def test_a_job_that_trips_the_indexer_up_fails_alone(bench, monkeypatch):
    def key(job):
        if job.spec.name == "bad":
            raise ZeroDivisionError("by zero")
        return job.spec.name

    monkeypatch.setattr(bench.loop.indexer, "key", key)
    bad, good = bench.submit(recipe("bad")), bench.submit(recipe("good"))
    bench.run(8)
    assert bench.job(bad).phase is Phase.FAILED
    assert "ZeroDivisionError: by zero" in bench.job(bad).reason
    assert bench.job(good).phase is Phase.RUNNING


def test_a_start_is_not_broken_off_for_another_job(tmp_path):
    bench = Bench(tmp_path, start_s=60.0)
    first = bench.submit(recipe("long", steps=2000, types=("quick",), min_devices=8))
    bench.run(10)
    urgent = bench.submit(recipe("short", steps=10, types=("quick",), priority=1000.0))
    bench.run(40)
    assert bench.job(first).phase is Phase.STARTING
    assert bench.job(urgent).phase is Phase.QUEUED
    bench.run(30)  # its first step has come, and the other's weight counts
    assert bench.job(urgent).held is not None
    assert bench.job(first).run == 1


def test_a_job_about_to_end_is_not_paused_for_another(bench):
    ending = bench.submit(recipe("ending", steps=200, types=("quick",), min_devices=8, max_devices=8))
    bench.run(76)
    left_s = (200 - bench.job(ending).step) * step_time_s(CLUSTER.packed("quick", 8))
    assert 2 < left_s < bench.rules.change_cost_s
    urgent = bench.submit(recipe("urgent", steps=10, types=("quick",), priority=1000.0))
    bench.run(2)
    assert bench.job(ending).phase is Phase.RUNNING
    assert bench.job(urgent).held is None
    bench.run(5)
    assert bench.job(ending).phase is Phase.FINISHED
    assert bench.job(ending).run == 1
    assert bench.job(urgent).held is not None


def test_the_page_shows_no_more_devices_held_than_there_are(bench):
    jobs = [bench.submit(recipe(f"job{i}", steps=200 + 100 * i)) for i in range(4)]
    bench.run(60)
    bench.requests.answer({"do": "resize", "job": jobs[0].id, "grid": "slow:2"})
    bench.run(300)
    events = bench.store.events(last=5000)
    assert "left" in {event["kind"] for event in events}
    held = stretches(events, bench.clock())
    for _, _, begin, _, _ in held:
        now = [Allocation.parse(on, CLUSTER.catalogue) for _, on, start, end, _ in held if start <= begin < end]
        for group in CLUSTER.groups:
            used = sum(a.num_devices for a in now if a.device_type == group.device_type)
            assert used <= group.num_nodes * group.devices_per_node
