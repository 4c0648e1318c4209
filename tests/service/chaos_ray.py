"""Faults against a real service on a real Ray cluster.

    python -m tests.service.chaos_ray [NUM_FAULTS] [SEED] [head]

As :mod:`tests.service.chaos`, on four Ray nodes of this machine, with trainings that span two. Besides the service,
keepers and workers, there are killed: Ray nodes (another comes in their place), actors, and the process that
connects the service to Ray. With ``head`` the service starts Ray itself, and all of Ray is killed at once, too.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from arena_jax.service.own_processes import processes_of
from arena_jax.service.ray_executor import RayExecutor
from arena_jax.service.ray_link import Given, RayProcess, Where
from arena_jax.service.ray_local import LocalRay
from tests.service.chaos import ROOT, Chaos, main, run
from tests.service.stub import CLUSTER

SMALL = {"num_cpus": 0, "object_store_memory": 80_000_000}


def serve(state: str, address: str) -> None:
    """The service's process."""
    folder = Path(state)

    def make() -> RayExecutor:
        where: Where = Given(address) if address else LocalRay(folder, CLUSTER)
        link = RayProcess(where, Path(f"{folder.parent}.ray.log"))
        link.wait(120)
        return RayExecutor(folder, CLUSTER, link, worker=[sys.executable, "-m", "tests.service.toy_worker"])

    run(folder, make, start_grace_s=60.0)  # Ray starts an actor in seconds, on a busy machine in many


class RayChaos(Chaos):
    """On nodes that are killed one by one."""

    faults = ("service", "worker", "keeper", "hang", "disk", "actor", "bridge", "node", "node")

    def __init__(self, seed: int) -> None:
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        os.environ["PYTHONPATH"] = str(ROOT)
        self.address = self._start_ray()
        super().__init__(seed)

    def _start_ray(self) -> str:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        self.kinds = {
            self._add(group.device_type).node_id: group.device_type for group in CLUSTER.groups for _ in range(2)
        }
        self.cluster.wait_for_nodes(120)
        return self.cluster.address

    def _add(self, kind: str):
        return self.cluster.add_node(wait=False, resources={f"arena-{kind}": 4}, **SMALL)

    def _serve(self) -> str:
        return f"from tests.service.chaos_ray import serve; serve({str(self.state)!r}, {self.address!r})"

    def _do(self, kind: str, keepers: list[int], workers: list[int]) -> None:
        if kind == "node":
            node = self.draw.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.node_id))
            kind = self.kinds.pop(node.node_id)
            self.cluster.remove_node(node, allow_graceful=False)
            self.kinds[self._add(kind).node_id] = kind
        elif kind == "actor":
            for pid in self.draw.sample(found := actors(self._raylets()), min(1, len(found))):
                os.kill(pid, signal.SIGKILL)
        elif kind == "bridge":
            for pid in children(self.service.pid, b"arena_jax.service.ray_bridge"):
                os.kill(pid, signal.SIGKILL)
        else:
            super()._do(kind, keepers, workers)

    def _raylets(self) -> list[int]:
        return [node.all_processes["raylet"][0].process.pid for node in self.cluster.worker_nodes]

    def clean(self) -> None:
        super().clean()
        self.cluster.shutdown()


class HeadChaos(RayChaos):
    """On a Ray that the service has started, all of which is killed."""

    faults = ("service", "worker", "keeper", "disk", "bridge", "head", "head", "head")

    def _start_ray(self) -> str:
        return ""

    def _do(self, kind: str, keepers: list[int], workers: list[int]) -> None:
        if kind == "head":
            for pid in processes_of(f"{self.state}/ray:ray"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(5)
        else:
            super()._do(kind, keepers, workers)

    def clean(self) -> None:
        where = LocalRay(self.state, CLUSTER)
        where.close(idle=True)
        Chaos.clean(self)


def children(parent: int, holds: bytes) -> list[int]:
    """Children of a process with these bytes in their command lines."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            stat = Path(f"/proc/{int(entry)}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(stat[1]) == parent and holds in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def actors(raylets: list[int]) -> list[int]:
    """Processes of the executor's actors."""
    return sorted(pid for raylet in raylets for pid in children(raylet, b"ray::NodeProcess"))


if __name__ == "__main__":
    main(HeadChaos if "head" in sys.argv[3:] else RayChaos)
