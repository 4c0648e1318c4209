"""Jobs under the Ray executor, on nodes that are plain processes of this machine; what only Ray can show is in
``test_ray_cluster.py``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.cli import main
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service import ray_executor, ray_link
from arena_jax.service.executor import LaunchError, Orders, StillAlive
from arena_jax.service.job import Held, Job, Submission
from arena_jax.service.own_processes import processes_of
from arena_jax.service.ray_executor import RayExecutor
from arena_jax.service.ray_link import RayNode, Seen
from arena_jax.service.ray_nodes import assign
from arena_jax.service.rules import Rules
from arena_jax.service.service import Options, Service
from tests.service.stub import CLUSTER, StubIndexer, recipe
from tests.service.waiting import ended, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
ROOT = Path(__file__).resolve().parents[2]
NODES = [("a", "quick"), ("b", "quick"), ("c", "slow"), ("d", "slow")]


class PlainLink:
    """Actors that are processes of this machine; nodes that are names."""

    def __init__(self) -> None:
        self.nodes = {name: RayNode(id=name, host=name, resources={f"arena-{kind}": 4.0}) for name, kind in NODES}
        self.actors: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self.silent = self.deaf = False
        self.count = 0

    def look(self) -> Seen | None:
        if self.silent:
            return None
        alive = frozenset(name for name, (_, process) in self.actors.items() if process.poll() is None)
        return Seen(nodes=tuple(self.nodes.values()), actors=alive, answered=self.count)

    def create(self, name: str, folder: Path, *, node: str, resource: str, amount: int) -> int:
        self.count += 1
        assert name not in self.actors
        if not self.deaf:
            assert self.nodes[node].resources[resource] >= amount
            self.actors[name] = (node, self.actor(folder))
        return self.count

    @staticmethod
    def actor(folder: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "arena_jax.service.ray_actor", str(folder)], cwd=ROOT)

    def kill(self, name: str) -> int:
        self.count += 1
        if name in self.actors:
            self.actors[name][1].kill()
        return self.count

    def lose(self, node: str) -> None:
        del self.nodes[node]
        for on, process in self.actors.values():
            if on == node:
                process.kill()

    def close(self, *, idle: bool) -> None:
        for _, process in self.actors.values():
            process.kill()
            process.wait()


@pytest.fixture
def link():
    made = PlainLink()
    yield made
    made.close(idle=False)


@pytest.fixture
def executor(tmp_path, link, monkeypatch):
    monkeypatch.setattr(ray_executor, "_FAILED_S", 0.5)
    yield RayExecutor(tmp_path, CLUSTER, link)
    for pid in processes_of(f"{tmp_path}/jobs/", prefix=True):
        os.kill(pid, signal.SIGKILL)


def command(text: str, *, nodes: int = 1, number: int = 1) -> Job:
    allocation = Allocation("quick", nodes, 2)
    spec = Submission(kind="command", name="c", command=text, on=str(allocation))
    held = Held(allocation, tuple((node, (0, 1)) for node in range(nodes)))
    return Job(number=number, id=f"c-{number}", spec=spec, submitted_at=1.0, held=held, run=1, launched_at=time.time())


def begun(tmp_path, job):
    files = [tmp_path / f"jobs/{job.number}/runs/{job.run}/{rank}/keeper.json" for rank in range(len(job.held.nodes))]
    until(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def test_a_process_on_every_node_and_one_end(executor, tmp_path):
    job = command('echo "$ARENA_JAX_DEVICES is $ARENA_JAX_PROCESS_ID of $ARENA_JAX_NUM_PROCESSES"; exit 7', nodes=2)
    executor.launch(job, Orders())
    assert ended(executor, job).exit_code == 7
    said = executor.logs(job, 0, 1000)[0].decode()
    assert "--- run 1 on quick:2x2 ---\nquick/0:0,1 is 0 of 2\n" in said
    assert "--- process 1, exit code 7 ---\nquick/1:0,1 is 1 of 2\n" in said
    meets = {
        json.loads((tmp_path / f"jobs/1/runs/1/{rank}/launch.json").read_text())["env"]["ARENA_JAX_COORDINATOR"]
        for rank in (0, 1)
    }
    assert len(meets) == 1
    # Another service, later, knows as much.
    assert RayExecutor(tmp_path, CLUSTER, PlainLink()).heartbeat(job).exit_code == 7


def test_nothing_is_started_while_an_earlier_run_lives(executor, tmp_path, link):
    job = command("sleep 100")
    executor.launch(job, Orders())
    begun(tmp_path, job)
    again = RayExecutor(tmp_path, CLUSTER, link)  # the service was killed, and does not know of the launch
    assert again.heartbeat(job).alive
    job.run = 2
    with pytest.raises(StillAlive):
        again.launch(job, Orders())
    assert again.heartbeat(job).alive  # by its earlier run
    assert ended(again, job).exit_code is None  # whose actors were told to end


@pytest.mark.parametrize("victim", ["actor", "keeper", "pid"])
def test_when_one_process_is_lost_all_are_ended(executor, tmp_path, link, victim):
    job = command("sleep 100 & (setsid sleep 100 &) ; wait", nodes=2)
    executor.launch(job, Orders())
    second = begun(tmp_path, job)[1]
    until(lambda: len(processes_of(f"{tmp_path}/jobs/1:1.1")) >= 4)
    if victim == "actor":
        link.kill(next(name for name in link.actors if name.endswith("/1")))
    else:
        os.kill(second[victim], signal.SIGKILL)
    assert ended(executor, job).exit_code in (-9, None)
    until(lambda: not processes_of(f"{tmp_path}/jobs/", prefix=True))


def test_signals_reach_the_processes_from_a_file(executor, tmp_path):
    job = command('trap "echo asked; exit 75" TERM; echo ready; while true; do sleep 0.1; done', nodes=2)
    executor.launch(job, Orders())
    until(lambda: b"ready" in executor.logs(job, 0, 1000)[0])
    begun(tmp_path, job)
    time.sleep(0.2)  # for the trap of the second
    for _ in range(3):
        executor.stop(job)
    assert ended(executor, job).exit_code == 75
    assert executor.logs(job, 0, 1000)[0].count(b"asked") == 1


def test_what_ray_does_not_tell_is_not_guessed(executor, tmp_path, link):
    job = command("sleep 100")
    executor.launch(job, Orders())
    begun(tmp_path, job)
    link.silent = True
    assert executor.heartbeat(job).alive  # its lock is held
    executor.signal(job, signal.SIGKILL)  # by the file: Ray need not answer
    until(lambda: not processes_of(f"{tmp_path}/jobs/", prefix=True))
    until(lambda: all(process.poll() is not None for _, process in link.actors.values()))
    with pytest.raises(ArenaError, match="not known"):
        executor.heartbeat(job)
    other = command("true", number=2)
    with pytest.raises(LaunchError, match="does not answer"):
        executor.launch(other, Orders())
    link.silent = False
    assert ended(executor, job).exit_code == -9


def test_an_actor_that_comes_late_does_nothing(executor, tmp_path, link):
    link.deaf = True  # the request was lost, or is still on its way
    job = command("echo it ran")
    executor.launch(job, Orders())
    assert ended(executor, job).exit_code is None
    late = link.actor(tmp_path / "jobs/1/runs/1/0")
    assert late.wait(20) == 0
    said = executor.logs(job, 0, 1000)[0]
    assert b"its run is over" in said
    assert b"it ran\n" not in said


def test_a_lost_node_is_known_and_a_spare_takes_its_place(tmp_path, link):
    executor = RayExecutor(tmp_path, CLUSTER, link)
    assert executor.lost_nodes() == frozenset()
    del link.nodes["b"]
    assert executor.lost_nodes() == {("quick", 1)}
    job = command("true", nodes=2)
    with pytest.raises(LaunchError, match="quick/1 is not there"):
        executor.launch(job, Orders())
    link.silent = True
    assert RayExecutor(tmp_path, CLUSTER, link).lost_nodes() == {("quick", 1)}  # until Ray says otherwise
    link.silent = False
    link.nodes["e"] = RayNode(id="e", host="e", resources={"arena-quick": 4.0})
    assert executor.lost_nodes() == frozenset()


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 9), st.integers(0, 9)), max_size=8), st.data())
def test_no_ray_node_stands_for_more_than_it_has(rows, data):
    rows = {name: (quick, slow) for name, quick, slow in rows}
    nodes = [RayNode(id=n, host="h", resources={"arena-quick": q, "arena-slow": s}) for n, (q, s) in rows.items()]
    found = assign(CLUSTER, nodes, {})
    for column, kind in enumerate(("quick", "slow")):
        used = [ray_id for (of, _), ray_id in found.items() if of == kind]
        rooms = {name: row[column] // 4 for name, row in rows.items()}
        assert all(used.count(name) <= rooms[name] for name in rooms)
        assert len(used) == min(2, sum(rooms.values()))
    left = data.draw(st.lists(st.sampled_from(nodes), unique_by=lambda n: n.id)) if nodes else []
    after = assign(CLUSTER, left, found)
    alive = {node.id for node in left}
    assert all(after[name] == ray_id for name, ray_id in found.items() if ray_id in alive)


def test_a_job_on_a_lost_node_goes_on_elsewhere_from_its_checkpoint(tmp_path, link, monkeypatch):
    monkeypatch.setattr(ray_executor, "_FAILED_S", 0.5)
    state = tmp_path / "s"
    worker = [sys.executable, "-m", "tests.service.toy_worker"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = Options(state=state, cluster=CLUSTER, rules=Rules(back_off_s=0.2, settle_s=0.1))
    service = Service(options, lambda store: (RayExecutor(state, CLUSTER, link, worker=worker), StubIndexer()))
    service.start()
    try:
        service.store.submit(recipe("toy", recipe='{"steps": 120}', steps=120, min_devices=8), time.time())
        lost = False
        end = time.monotonic() + 60
        while (job := service.store.job("1")).phase not in ("finished", "failed"):
            assert time.monotonic() < end, (job.phase, job.reason, job.step)
            service.tick()
            time.sleep(0.03)
            if job.step > 25 and not lost:
                lost = True
                assert job.held.allocation.device_type == "quick"
                link.lose("b")
    finally:
        service.close()
    assert (job.phase, job.step) == ("finished", 120), (job.reason, job.log_tail)
    kinds = [event["kind"] for event in service.store.events()]
    assert kinds.index("node lost") < max(i for i, kind in enumerate(kinds) if kind in ("resume", "move"))
    assert job.ran_on == "slow:2x4"
    said = (state / "jobs/1/train/run/steps").read_text().splitlines()
    starts = [int(line.split()[1]) for line in said if line.startswith("start")]
    assert len(starts) == 2
    assert starts[1] >= 20
    assert not (state / "jobs/1/train/run/VIOLATION").exists()
    assert not processes_of(f"{state}/jobs/", prefix=True)


def test_another_executor_does_not_take_up_what_runs(tmp_path, link):
    options = Options(state=tmp_path, cluster=CLUSTER)
    service = Service(options, lambda store: (RayExecutor(tmp_path, CLUSTER, link), StubIndexer()))
    service.start()
    job = service.store.submit(recipe(), time.time())
    job.phase, job.run, job.plan_key = "running", 1, ""
    service.store.save([job])
    service.close()
    from arena_jax.service.local import LocalExecutor

    other = Service(options, lambda store: (LocalExecutor(tmp_path, CLUSTER), StubIndexer()))
    try:
        with pytest.raises(UsageError, match="ray executor"):
            other.start()
    finally:
        other.close()


def test_only_virtual_cpu_devices(tmp_path, link):
    with pytest.raises(UsageError, match="a100"):
        RayExecutor(tmp_path, Cluster.from_tables({"nodes": [{"type": "a100"}]}), link)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--executor", "ray"], "arena-jax[ray]"), (["--ray-address", "x:1"], "add --executor ray")],
)
def test_what_serve_needs_for_ray(tmp_path, capfd, monkeypatch, arguments, said):
    monkeypatch.setattr(ray_link.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "cluster.toml"
    file.write_text('[types.q]\nthreads = 1\npeak_flops = 1e9\n[[nodes]]\ntype = "q"\ndevices = 2\n')
    assert main(["serve", "--cluster", str(file), "--state", str(tmp_path / "s"), "--port", "-1", *arguments]) == 2
    assert said in capfd.readouterr().err
