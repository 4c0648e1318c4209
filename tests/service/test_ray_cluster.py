"""The Ray executor on a real Ray cluster of this machine: four nodes, trainings that span two of them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from arena_jax.service.own_processes import processes_of
from arena_jax.service.ray_executor import RayExecutor
from arena_jax.service.ray_link import Given, RayProcess
from arena_jax.service.ray_local import LocalRay
from arena_jax.service.rules import Rules
from arena_jax.service.service import Options, Service
from tests.service.stub import CLUSTER, StubIndexer, recipe

pytest.importorskip("ray", reason="needs the extra [ray]")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc"),
    pytest.mark.skipif("ARENA_JAX_LONG" not in os.environ, reason="takes minutes; `make verify` runs it"),
]
ROOT = Path(__file__).resolve().parents[2]
WORKER = [sys.executable, "-m", "tests.service.toy_worker"]
SMALL = {"num_cpus": 0, "object_store_memory": 80_000_000}
# Ten milliseconds each on all of the quick type, forty on the slow one.
STEPS = 3000


@pytest.fixture
def ray_cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    for kind in ("quick", "quick", "slow", "slow"):
        cluster.add_node(wait=False, resources={f"arena-{kind}": 4}, **SMALL)
    cluster.wait_for_nodes(120)
    yield cluster
    cluster.shutdown()


def service_of(state: Path, make) -> Service:
    rules = Rules(back_off_s=0.2, settle_s=0.1, change_cost_s=1.0)
    made = Service(
        Options(state=state, cluster=CLUSTER, rules=rules), lambda store: (make(), StubIndexer()), note=print
    )
    made.start()
    return made


def end(service: Service, *, idle: bool = True) -> None:
    service.close()
    service.executor.close(idle=idle)


def play(service: Service, seconds: float = 300, until=lambda: False) -> list:
    """Tick until all jobs have ended, or something is true."""
    stop = time.monotonic() + seconds
    while True:
        service.tick()
        jobs = service.store.jobs()
        if until() or all(job.phase in ("finished", "failed", "cancelled") for job in jobs):
            return jobs
        assert time.monotonic() < stop, [(job.id, job.phase, job.reason, job.step) for job in jobs]
        time.sleep(0.1)


def submit(service: Service, steps: int, **bounds) -> None:
    service.store.submit(recipe("toy", recipe=f'{{"steps": {steps}}}', steps=steps, **bounds), time.time())


def check_steps(state: Path, number: int) -> int:
    """That it never ran twice at once, and began where it had saved; how often it began."""
    folder = state / f"jobs/{number}/train/run"
    assert not (folder / "VIOLATION").exists()
    saved = starts = 0
    for line in (folder / "steps").read_text().splitlines():
        what, step = line.split()
        if what == "start":
            starts += 1
            assert int(step) >= saved
        saved = max(saved, int(step))
    return starts


def test_a_killed_node_and_a_killed_service(tmp_path, ray_cluster):
    state = tmp_path / "s"

    def make() -> RayExecutor:
        link = RayProcess(Given(ray_cluster.address), tmp_path / "ray.log")
        link.wait(60)
        return RayExecutor(state, CLUSTER, link, worker=WORKER)

    service = service_of(state, make)
    try:
        submit(service, STEPS, min_devices=8)
        submit(service, STEPS, max_devices=8)
        play(service, until=lambda: all(job.step > 30 for job in service.store.jobs()))
        first, second = service.store.jobs()
        assert len(first.held.nodes) == 2
        runs = [first.run, second.run]
        end(service, idle=False)
        assert len(processes_of(f"{state}/jobs/", prefix=True)) >= 4  # they go on
        service = service_of(state, make)
        play(service, until=lambda: service.store.jobs()[0].step > first.step + 20)
        assert [job.run for job in service.store.jobs()] == runs  # taken up, not started
        lost = (first.held.allocation.device_type, first.held.nodes[-1])
        ray_id = service.executor._nodes[lost]
        node = next(node for node in ray_cluster.worker_nodes if node.node_id == ray_id)
        ray_cluster.remove_node(node, allow_graceful=False)
        jobs = play(service)
        assert [(job.phase, job.step) for job in jobs] == [("finished", STEPS)] * 2
        assert service.executor.lost_nodes() == {lost}
        assert jobs[0].run > runs[0]
        assert check_steps(state, 1) >= 2
        check_steps(state, 2)
        assert {"node lost", "finish"} <= {event["kind"] for event in service.store.events()}
    finally:
        end(service)
    assert not processes_of(f"{state}/", prefix=True)


def test_a_ray_of_its_own_is_closed_to_others_and_started_anew_when_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    state = tmp_path / "s"
    where: list[LocalRay] = []

    def make() -> RayExecutor:
        where.append(LocalRay(state, CLUSTER))
        link = RayProcess(where[-1], tmp_path / "ray.log")
        link.wait(120)
        return RayExecutor(state, CLUSTER, link, worker=WORKER)

    service = service_of(state, make)
    try:
        submit(service, STEPS, min_devices=8)
        play(service, until=lambda: service.store.jobs()[0].step > 30)
        address = where[-1].address()
        code = f"import ray; ray.init(address={address!r}, namespace='arena-jax'); print(ray.util.list_named_actors())"
        other = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        refused = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, timeout=120)
        assert refused.returncode != 0
        assert "/" not in refused.stdout
        assert (state / "ray/token").stat().st_mode & 0o077 == 0
        for pid in processes_of(f"{state}/ray:ray"):  # all of Ray, at once
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (job,) = play(service)
        assert (job.phase, job.step) == ("finished", STEPS)
        assert check_steps(state, 1) >= 2
    finally:
        end(service)
    assert not processes_of(f"{state}/", prefix=True)
