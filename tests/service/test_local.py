"""Processes of this machine under the local executor: started once, ended for good, found again."""

import json
import os
import signal
import sys
import time

import pytest

from arena_jax.errors import UsageError
from arena_jax.events import EventLog
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.executor import LaunchError, Orders
from arena_jax.service.job import Held, Job, Submission
from arena_jax.service.local import LocalExecutor
from arena_jax.service.local_index import LocalIndexer
from arena_jax.service.own_processes import processes_of
from arena_jax.service.progress import RunReader
from tests.service.stub import CLUSTER, TABLES, recipe
from tests.service.waiting import ended, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


def command(text: str, number: int = 1) -> Job:
    spec = Submission(kind="command", name="c", command=text, on="quick:2")
    held = Held(Allocation("quick", 1, 2), ((0, (0, 1)),))
    return Job(number=number, id=f"c-{number}", spec=spec, submitted_at=1.0, held=held, run=1, launched_at=time.time())


@pytest.fixture
def executor(tmp_path):
    made = LocalExecutor(tmp_path, CLUSTER)
    yield made
    for job in list(tmp_path.glob("jobs/*")):
        for pid in processes_of(f"{job}:", prefix=True):
            os.kill(pid, signal.SIGKILL)


def test_a_command_runs_once_and_its_end_is_known(executor, tmp_path):
    job = command('echo "on $ARENA_JAX_DEVICES"; exit 7')
    executor.launch(job, Orders())
    assert ended(executor, job).exit_code == 7
    assert executor.logs(job, 0, 1000)[0].decode().splitlines() == ["--- run 1 on quick:2 ---", "on quick/0:0,1"]
    # Another service, later, knows as much.
    assert LocalExecutor(tmp_path, CLUSTER).heartbeat(job).exit_code == 7


def test_nothing_is_started_while_an_earlier_run_lives(executor, tmp_path):
    job = command("sleep 100")
    executor.launch(job, Orders())
    again = LocalExecutor(tmp_path, CLUSTER)  # the service was killed, and does not know of the launch
    job.run = 2
    with pytest.raises(LaunchError, match="earlier run"):
        again.launch(job, Orders())
    job.run = 1
    until(lambda: again.heartbeat(job).alive)
    again.signal(job, signal.SIGKILL)
    assert ended(again, job).exit_code is None
    job.run = 2
    again.launch(job, Orders())
    assert again.heartbeat(job).alive
    again.signal(job, signal.SIGKILL)


def test_a_run_that_was_never_launched_has_ended(executor):
    beat = executor.heartbeat(command("true"))
    assert (beat.alive, beat.exit_code, beat.progress) == (False, None, None)


def test_stop_is_one_sigterm(executor, tmp_path):
    job = command("trap 'echo term >> t; sleep 0.3; exit 5' TERM; echo ready > r; while true; do sleep 0.05; done")
    job.spec = Submission(**{**job.spec.__dict__, "folder": str(tmp_path)})
    executor.launch(job, Orders())
    until((tmp_path / "r").exists)
    until((tmp_path / "jobs/1/runs/1/keeper.json").exists)  # before that, the loop would ask again
    for _ in range(5):
        executor.stop(job)
    LocalExecutor(tmp_path, CLUSTER).stop(job)
    assert ended(executor, job).exit_code == 5
    assert (tmp_path / "t").read_text() == "term\n"


@pytest.mark.parametrize("victim", ["keeper", "pid"])
def test_a_killed_process_leaves_no_orphan(executor, tmp_path, victim):
    """Also what has left its process group."""
    job = command("sleep 300 & setsid sleep 300 & sleep 300")
    executor.launch(job, Orders())
    file = tmp_path / "jobs/1/runs/1/keeper.json"
    until(file.exists)
    token = f"{tmp_path}/jobs/1:1"
    until(lambda: len(processes_of(token)) >= 5)
    os.kill(json.loads(file.read_text())[victim], signal.SIGKILL)
    beat = ended(executor, job)
    assert beat.exit_code == (None if victim == "keeper" else -9)
    until(lambda: not processes_of(token))


def test_what_cannot_be_started_says_so(executor):
    job = command("true")
    job.spec = Submission(**{**job.spec.__dict__, "folder": "/nowhere"})
    executor.launch(job, Orders())
    assert ended(executor, job).exit_code == 127
    assert b"/nowhere" in executor.logs(job, 0, 1000)[0]


def test_only_virtual_cpu_devices(tmp_path):
    with pytest.raises(UsageError, match="a100"):
        LocalExecutor(tmp_path, Cluster.from_tables({"nodes": [{"type": "a100"}]}))


def test_progress_is_what_the_event_log_says_since_the_launch(tmp_path):
    folder = tmp_path / "20260101-a"
    reader = RunReader(tmp_path, run=2, since=time.time())
    reader.read()
    assert reader.progress() is None
    with EventLog(folder / "events.jsonl") as log:
        log.emit("plan", grid="cpu:4/s2")
        reader.read()
        assert reader.progress() is None
        for step in range(1, 8):
            log.emit("step", step=step, loss=2.0 / step, step_time_s=9.0 if step < 4 else 0.5)
        reader.read()
        first = reader.progress()
        assert (first.step, first.loss, first.num_devices, first.step_time_s) == (7, 2.0 / 7, 4, 0.5)
        assert [point[0] for point in first.points] == [1, 2, 3, 4, 5, 6, 7]
        assert reader.progress().points == ()
        log.emit("plan", grid="cpu:2/s1")
        log.emit("step", step=8, loss=float("nan"), step_time_s=1.0)
        log.emit("run_end", stop_reason="done")
        reader.read()
        second = reader.progress()
        assert (second.num_devices, second.step_time_s, reader.done) == (2, None, True)
    later = RunReader(tmp_path, run=3, since=time.time() + 10)
    later.read()
    assert later.progress() is None
    assert not later.done


def test_indexes_are_filed_by_what_changes_plans(tmp_path):
    indexer = LocalIndexer(tmp_path, CLUSTER, TABLES)

    def key(text: str, **spec) -> str:
        return indexer.key(Job(number=1, id="x-1", spec=recipe(**{**spec, "recipe": text}), submitted_at=1.0))

    base = key("model: {name: gpt}\nglobal_batch: 8\nsteps: 5")
    assert key("steps: 9\nglobal_batch: 8\nmodel: {name: gpt}\nseed: 4") == base
    assert key("model: {name: gpt}\nglobal_batch: 16\nsteps: 5") != base
    assert key("model: {name: gpt}\nglobal_batch: 8\nsteps: 5", max_devices=2) != base


@pytest.mark.parametrize(("kind", "text"), [("recipe", "x: ["), ("recipe", "- 1"), ("closure", "/nowhere.pkl")])
def test_a_recipe_that_is_none_is_refused(tmp_path, kind, text):
    spec = Submission(kind=kind, name="x", recipe=text)
    with pytest.raises(UsageError):
        LocalIndexer(tmp_path, CLUSTER, TABLES).key(Job(number=1, id="x-1", spec=spec, submitted_at=1.0))
