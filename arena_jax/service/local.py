"""The local executor: each job a group of processes on this machine, kept by a small keeper.

A training runs on virtual CPU devices, one process for its whole allocation; the nodes of the cluster file are
names. It is driven through the scheduler hook of ``arena-jax train`` (its control socket), and what it says of
itself is read from its event log. In the job's folder there is a ``lock`` besides.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from arena_jax.control import ask
from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.devices import Node
from arena_jax.service.executor import Heartbeat, LaunchError, Orders, StillAlive
from arena_jax.service.job import Job, Submission
from arena_jax.service.job_folder import JobFolder, check_virtual, environment_of
from arena_jax.service.json_file import read_json, write_json
from arena_jax.service.own_processes import TOKEN, is_locked, lock_now, processes_of, signal_all, worker_argv
from arena_jax.service.progress import RunReader, RunReaders

_KEEPER = Path(__file__).with_name("keeper.py")
_ASK_TIMEOUT_S = 1.0
# An event log that says nothing for so long may be on a full disk: the training is asked itself.
_QUIET_S = 10.0
# A process that was launched must have its keeper's word for it within so long.
_BEGIN_S = 20.0


class LocalExecutor:
    """Runs jobs on this machine; :class:`~arena_jax.service.executor.Executor`.

    Args:
        state: the service's state folder.
        worker: how the process of a training is started; a file with its task is appended.

    Raises:
        UsageError: the cluster has device types that are not virtual CPU devices.
    """

    name = "local"
    elastic = True

    def __init__(self, state: Path, cluster: Cluster, *, worker: Sequence[str] | None = None) -> None:
        check_virtual(cluster, "local")
        self._folder = state / "jobs"
        self._worker = list(worker or worker_argv())
        self._readers = RunReaders()
        self._keepers: dict[int, subprocess.Popen[bytes]] = {}
        self._asked: dict[int, tuple[int, str, str]] = {}

    def launch(self, job: Job, orders: Orders) -> None:
        folder = self._of(job)
        try:
            folder.run.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"cannot write {str(folder.path)!r}: {error.strerror}") from error
        try:
            if not lock_now(lock):
                raise StillAlive(f"a process of an earlier run of {job.id} is alive")
            argv, cwd = self._command(job, orders, folder)
            env = {**os.environ, **environment_of(job), TOKEN: folder.token}
            write_json(folder.run / "launch.json", {"argv": argv, "cwd": cwd, "env": env, "log": str(folder.log)})
            with open(folder.log, "ab") as log:
                log.write(folder.head_line())
                self._keepers[job.number] = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_KEEPER), str(folder.run), str(lock)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"cannot start {job.id}: {error.strerror or error}") from error
        finally:
            os.close(lock)
        self._readers.forget(job)

    def tell(self, job: Job, orders: Orders) -> None:
        if self._asked.get(job.number, (0, "", ""))[:2] == (job.run, job.told):
            return
        reader = self._readers.of(job, self._of(job).train)
        reader.read()
        if reader.folder is None:
            return
        target = Allocation.parse(job.told, None)
        grid = f"cpu:{target.num_devices}/s{orders.num_stages}"
        with suppress(ArenaError):  # it is asked again with the next tick
            answer = ask(reader.folder, {"target": grid, "reason": f"service: {job.cause}"}, timeout_s=_ASK_TIMEOUT_S)
            self._asked[job.number] = (job.run, job.told, str(answer["id"]))

    def stop(self, job: Job) -> None:
        run = self._of(job).run
        mark = run / "stopped"  # a second SIGTERM would make a training leave without saving
        if mark.exists():
            return
        pid = read_json(run / "keeper.json").get("pid")
        if pid is None:
            return  # not there yet; asked again with the next tick
        with suppress(OSError):
            mark.touch()
            os.killpg(int(pid), signal.SIGTERM)

    def signal(self, job: Job, number: int) -> None:
        signal_all(processes_of(self._of(job).token), number)

    def heartbeat(self, job: Job) -> Heartbeat:
        folder = self._of(job)
        keeper = self._keepers.get(job.number)
        if keeper is not None:
            keeper.poll()
        alive = is_locked(folder.path / "lock")
        reader = self._readers.of(job, self._of(job).train)
        if not job.spec.rigid:
            reader.read()
        if not alive:
            self._asked.pop(job.number, None)
            self._keepers.pop(job.number, None)
            code = read_json(folder.run / "exit.json").get("code")
            if code is None and reader.done:
                code = 0
            return Heartbeat(alive=False, exit_code=code, progress=reader.progress())
        self._check_keeper(job, folder)
        if not job.spec.rigid:
            self._check_quiet(reader)
        told, why = self._told(job, reader)
        return Heartbeat(alive=True, progress=reader.progress(), told=told, why=why)

    def logs(self, job: Job, offset: int, max_bytes: int) -> tuple[bytes, int]:
        return self._of(job).output(offset, max_bytes)

    def lost_nodes(self) -> frozenset[Node]:
        return frozenset()

    def spans_nodes(self, spec: Submission) -> bool:
        return True

    def close(self, *, idle: bool) -> None:
        pass

    def _of(self, job: Job) -> JobFolder:
        return JobFolder(self._folder, job)

    def _told(self, job: Job, reader: RunReader) -> tuple[str, str]:
        run, told, name = self._asked.get(job.number, (0, "", ""))
        if not job.told or (run, told) != (job.run, job.told) or reader.folder is None:
            return "", ""
        try:
            said = ask(reader.folder, {"state": name}, timeout_s=_ASK_TIMEOUT_S)
        except ArenaError:
            return "pending", ""
        outcome = str(said.get("outcome"))
        return ("refused" if outcome == "replaced" else outcome), "; ".join(map(str, said.get("errors") or []))

    @staticmethod
    def _check_quiet(reader: RunReader) -> None:
        now = time.time()
        if reader.folder is None or now - max(reader.seen_at, reader.asked_at) < _QUIET_S:
            return
        reader.asked_at = now
        with suppress(ArenaError):
            step = ask(reader.folder, {"state": None}, timeout_s=_ASK_TIMEOUT_S).get("step")
            if step is not None and step != reader.asked_step:
                reader.asked_step, reader.seen_at = step, now

    def _check_keeper(self, job: Job, folder: JobFolder) -> None:
        """What a killed keeper has left behind is killed as well."""
        keeper = read_json(folder.run / "keeper.json").get("keeper")
        if keeper is None:
            late = time.time() - job.launched_at > _BEGIN_S
            if late and not processes_of(folder.token):
                # Only an earlier run can hold the lock now.
                signal_all(processes_of(f"{folder.path}:", prefix=True))
            return
        with suppress(OSError, ValueError):
            os.kill(int(keeper), 0)
            state = Path(f"/proc/{keeper}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state != "Z":
                return
        self.signal(job, signal.SIGKILL)

    def _command(self, job: Job, orders: Orders, folder: JobFolder) -> tuple[list[str], str]:
        spec = job.spec
        if spec.rigid:
            return ["/bin/sh", "-c", spec.command], spec.folder or str(folder.path)
        assert job.held is not None
        grid = f"cpu:{job.held.allocation.num_devices}/s{orders.num_stages}"
        task = folder.run / "task.json"
        write_json(task, folder.training(orders, grid=grid, most_devices=orders.most_devices))
        return [*self._worker, str(task)], spec.folder if os.path.isdir(spec.folder) else str(folder.path)
