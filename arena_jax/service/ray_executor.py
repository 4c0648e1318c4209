"""The Ray executor: each job a process on every node of its allocation, kept there by a Ray actor.

Ray starts processes on other machines and says which machines there are; all else goes through the state folder,
which must be on storage that all nodes share, as the checkpoints must. A launch is a generation: a set of detached,
named actors, one for each node. No grid is changed inside of processes: a job that is resized is saved, and goes on
as another generation. See :mod:`arena_jax.service.ray_actor` for what keeps a job from running twice.
"""

import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.scheduler import Cluster
from arena_jax.service.devices import Node, name_of, node_of
from arena_jax.service.executor import Heartbeat, LaunchError, Orders, StillAlive
from arena_jax.service.job import Job, Submission
from arena_jax.service.job_folder import JobFolder, check_virtual, environment_of
from arena_jax.service.json_file import read_json, write_json
from arena_jax.service.own_processes import TOKEN, is_locked
from arena_jax.service.progress import RunReaders
from arena_jax.service.ray_actor import CLOSED, ORDERS
from arena_jax.service.ray_link import RayLink, Seen
from arena_jax.service.ray_nodes import assign, resource_of

# When one process of a run is gone, the others may have so long to end by themselves: after a failure, and after
# the first process has come to the end of the training.
_FAILED_S, _DONE_S = 5.0, 60.0
_KILL_EVERY_S = 2.0
# Of this service's own environment, jobs on other nodes get what says where shared things are.
_PASSED_ON = ("ARENA_JAX_", "MLFLOW_")


class RayExecutor:
    """Runs jobs on a Ray cluster; :class:`~arena_jax.service.executor.Executor`.

    Args:
        state: the service's state folder.
        worker: how the process of a training is started, in place of this package's own on the node; a file with
            its task is appended.

    Raises:
        UsageError: the cluster has device types that are not virtual CPU devices.
    """

    name = "ray"
    elastic = False

    def __init__(self, state: Path, cluster: Cluster, link: RayLink, *, worker: Sequence[str] | None = None) -> None:
        check_virtual(cluster, "ray")
        self._folder, self._cluster, self._link = state / "jobs", cluster, link
        self._worker = None if worker is None else list(worker)
        self._file = state / "ray.json"
        kept = read_json(self._file)
        # In the names of actors: several services may share a Ray cluster.
        self._name = str(kept.get("name") or secrets.token_hex(4))
        self._nodes: dict[Node, str] = {node_of(name): ray_id for name, ray_id in kept.get("nodes", {}).items()}
        self._everything = frozenset((g.device_type, n) for g in cluster.groups for n in range(g.num_nodes))
        self._known = bool(self._nodes)
        self._seen: Seen | None = None
        self._readers = RunReaders()
        self._requests: dict[tuple[int, int], int] = {}
        self._broken_s: dict[tuple[int, int], float] = {}
        self._killed_s: dict[tuple[int, int], float] = {}
        if not kept:
            self._write()

    def launch(self, job: Job, orders: Orders) -> None:
        assert job.held is not None
        folder, seen = self._of(job), self._look()
        if seen is None:
            raise LaunchError("Ray does not answer")
        lost = [f"{job.held.allocation.device_type}/{n}" for n in job.held.nodes if self._node_id(job, n) is None]
        if lost:
            raise LaunchError(f"{', '.join(lost)} is not there")
        earlier = [name for name in seen.actors if name.startswith(self._prefix(job))]
        for name in earlier:
            self._link.kill(name)
        if earlier or self._any_locked(folder):
            raise StillAlive(f"a process of an earlier run of {job.id} is alive")
        resource = resource_of(job.held.allocation.device_type)
        try:
            wanted = self._prepare(job, orders, folder)
        except OSError as error:
            raise LaunchError(f"cannot write {str(folder.path)!r}: {error.strerror}") from error
        for rank, (number, devices) in enumerate(job.held.devices):
            ray_id = self._node_id(job, number)
            assert ray_id is not None
            request = self._link.create(
                self._actor(job, rank), wanted[rank], node=ray_id, resource=resource, amount=len(devices)
            )
            self._requests[job.number, job.run] = request
        self._readers.forget(job)

    def tell(self, job: Job, orders: Orders) -> None:
        raise AssertionError("a grid is not changed inside of processes")

    def stop(self, job: Job) -> None:
        self._order(job, signal.SIGTERM, rank=None if job.spec.rigid else 0)

    def signal(self, job: Job, number: int) -> None:
        self._order(job, number, rank=None)
        key, now_s = (job.number, job.run), time.monotonic()
        if number == signal.SIGKILL and now_s - self._killed_s.get(key, -_KILL_EVERY_S) >= _KILL_EVERY_S:
            self._killed_s[key] = now_s
            for rank in range(self._num_ranks(job)):
                self._link.kill(self._actor(job, rank))

    def heartbeat(self, job: Job) -> Heartbeat:
        folder, seen = self._of(job), self._look()
        reader = self._readers.of(job, self._of(job).train)
        if not job.spec.rigid:
            reader.read()
        if self._alive(job, folder, seen):
            return Heartbeat(alive=True, progress=reader.progress())
        try:  # from here on, an actor that comes late does nothing
            folder.run.mkdir(parents=True, exist_ok=True)
            (folder.run / CLOSED).touch()
        except OSError as error:
            raise ArenaError(f"cannot write {str(folder.run)!r}: {error.strerror}") from error
        if self._any_locked(folder):
            return Heartbeat(alive=True, progress=reader.progress())
        for kept in (self._requests, self._broken_s, self._killed_s):
            kept.pop((job.number, job.run), None)
        code = _exit_code(folder.run, self._num_ranks(job))
        return Heartbeat(alive=False, exit_code=0 if code is None and reader.done else code, progress=reader.progress())

    def logs(self, job: Job, offset: int, max_bytes: int) -> tuple[bytes, int]:
        return self._of(job).output(offset, max_bytes)

    def lost_nodes(self) -> frozenset[Node]:
        self._look()
        return self._everything - self._nodes.keys() if self._known else frozenset()

    def spans_nodes(self, spec: Submission) -> bool:
        return spec.kind != "closure"  # `fit` trains in one process

    def close(self, *, idle: bool) -> None:
        self._link.close(idle=idle)

    # Ray.

    def _look(self) -> Seen | None:
        seen = self._link.look()
        if seen is not None and seen is not self._seen:
            self._seen = seen
            nodes = assign(self._cluster, seen.nodes, self._nodes)
            if nodes != self._nodes:
                self._nodes = nodes
                self._write()
            self._known = True
        return seen

    def _write(self) -> None:
        nodes = {name_of(node): ray_id for node, ray_id in self._nodes.items()}
        try:
            write_json(self._file, {"name": self._name, "nodes": nodes})
        except OSError as error:
            raise ArenaError(f"cannot write {str(self._file)!r}: {error.strerror}") from error

    def _node_id(self, job: Job, number: int) -> str | None:
        assert job.held is not None
        return self._nodes.get((job.held.allocation.device_type, number))

    def _prefix(self, job: Job) -> str:
        return f"{self._name}/{job.number}/"

    def _actor(self, job: Job, rank: int) -> str:
        return f"{self._prefix(job)}{job.run}/{rank}"

    # The folder.

    def _of(self, job: Job) -> JobFolder:
        return JobFolder(self._folder, job)

    def _num_ranks(self, job: Job) -> int:
        """Processes of the run; 0 for one that was never launched."""
        return int(read_json(self._of(job).run / "run.json").get("num_processes", 0))

    def _any_locked(self, folder: JobFolder) -> bool:
        return any(is_locked(path) for path in (folder.path / "locks").glob("*"))

    def _prepare(self, job: Job, orders: Orders, folder: JobFolder) -> list[Path]:
        """Write what each node's process is to be, and return their folders."""
        assert job.held is not None
        spec, allocation = job.spec, job.held.allocation
        count = len(job.held.devices)
        folder.run.mkdir(parents=True, exist_ok=True)
        task = folder.run / "task.json"
        argv: list[str] | None = ["/bin/sh", "-c", spec.command]
        if not spec.rigid:
            # A plan of several stages must have each in one process, and only who plans for processes knows.
            one_stage = count == 1 or orders.num_stages == 1
            size = f"{count}x{allocation.devices_per_node}" if count > 1 else f"{allocation.num_devices}"
            grid = f"cpu:{size}/s{orders.num_stages}" if one_stage else f"cpu:{size}"
            write_json(task, folder.training(orders, grid=grid, most_devices=allocation.devices_per_node))
            argv = None if self._worker is None else [*self._worker, str(task)]
        passed_on = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        folders = []
        for rank, (number, _) in enumerate(job.held.devices):
            own = folder.run / str(rank)
            own.mkdir(exist_ok=True)
            wanted: dict[str, Any] = {
                "rank": rank,
                "num_processes": count,
                "argv": argv,
                "task": str(task),
                "env": {**passed_on, **environment_of(job, node=number), TOKEN: f"{folder.token}.{rank}"},
                "token_of_run": f"{folder.token}.",
                "token_of_job": f"{folder.path}:",
                "folders": [path for path in (spec.folder, str(folder.path)) if path],
                "lock": str(_lock(folder, rank)),
                "log": str(folder.log if rank == 0 else own / "log"),
                "job_log": str(folder.log),
            }
            write_json(own / "wanted.json", wanted)
            folders.append(own)
        write_json(folder.run / "run.json", {"num_processes": count})
        with open(folder.log, "ab") as log:
            log.write(folder.head_line())
        return folders

    def _order(self, job: Job, number: int, *, rank: int | None) -> None:
        """Add a signal to the run's orders, once."""
        file = self._of(job).run / ORDERS
        signals = read_json(file).get("signals", [])
        if [number, rank] in signals:
            return
        try:
            write_json(file, {"signals": [*signals, [number, rank]]})
        except OSError:
            return  # ordered again with the next tick

    def _alive(self, job: Job, folder: JobFolder, seen: Seen | None) -> bool:
        """Whether anything of any launch of the job is alive, or may come to life."""
        locked = self._any_locked(folder)
        if seen is None:
            if locked:
                return True
            raise ArenaError("Ray does not answer: whether it runs is not known")
        if seen.answered < self._requests.get((job.number, job.run), 0):
            return True
        acting = {name for name in seen.actors if name.startswith(self._prefix(job))}
        count = self._num_ranks(job)
        gone = [r for r in range(count) if self._actor(job, r) not in acting and not is_locked(_lock(folder, r))]
        if (locked or acting) and gone:
            self._check_whole(job, folder)
        return locked or bool(acting)

    def _check_whole(self, job: Job, folder: JobFolder) -> None:
        """A process of the run is gone. The others cannot go on: they are ended, if they do not by themselves."""
        key, now_s = (job.number, job.run), time.monotonic()
        since_s = self._broken_s.setdefault(key, now_s)
        code = read_json(folder.run / "0" / "exit.json").get("code", 1)
        if now_s - since_s > (_DONE_S if code == 0 else _FAILED_S):
            self.signal(job, signal.SIGKILL)


def _lock(folder: JobFolder, rank: int) -> Path:
    return folder.path / "locks" / str(rank)


def _exit_code(run: Path, count: int) -> int | None:
    """Of a run whose processes are gone: the first one's if it is 0, otherwise that of the first to fail."""
    ends: list[Mapping[str, Any]] = [read_json(run / str(rank) / "exit.json") for rank in range(count)]
    if not ends or any("code" not in end for end in ends):
        # Nobody saw one of them end: its node is lost, or it never began.
        return 0 if ends and ends[0].get("code") == 0 else None
    if ends[0]["code"] == 0:
        return 0
    failed = [end for end in ends if end["code"] != 0]
    return int(min(failed, key=lambda end: float(end["at"]))["code"])
