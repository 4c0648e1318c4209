"""The local executor: each job a group of processes on this machine, kept by a small keeper.

A training runs on virtual CPU devices, one process for its whole allocation; the nodes of the cluster file are
names. It is driven through the scheduler hook of ``arena-jax train`` (its control socket), and what it says of
itself is read from its event log. On disk, under the service's state: ``jobs/NUMBER/`` with ``lock``, ``log``,
``recipe.yaml``, ``train/`` (run directories) and ``runs/N/`` (one per launch).
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.control import ask
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.executor import Heartbeat, LaunchError, Orders
from arena_jax.service.job import Job
from arena_jax.service.progress import RunReader

_KEEPER = Path(__file__).with_name("keeper.py")
# In the environment of every process of a run, so that none is overlooked.
TOKEN = "ARENA_JAX_RUN"
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

    elastic = True

    def __init__(self, state: Path, cluster: Cluster, *, worker: Sequence[str] | None = None) -> None:
        for name in cluster.types:
            if cluster.catalogue[name].platform != "cpu":
                raise UsageError(
                    f"the local executor runs virtual CPU devices, and the cluster has {name}",
                    hint="give the type threads = 1 and a nominal peak_flops in a [types.NAME] table",
                )
        self._folder = state / "jobs"
        self._worker = list(worker or worker_argv())
        self._readers: dict[int, RunReader] = {}
        self._keepers: dict[int, subprocess.Popen[bytes]] = {}
        self._asked: dict[int, tuple[int, str, str]] = {}

    def launch(self, job: Job, orders: Orders) -> None:
        folder = self._of(job)
        run = folder / "runs" / str(job.run)
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"cannot write {str(folder)!r}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            argv, cwd = self._command(job, orders, folder, run)
            env = {**os.environ, **self._environment(job, folder)}
            launch = {"argv": argv, "cwd": cwd, "env": env, "log": str(folder / "log")}
            _write(run / "launch.json", launch)
            with open(folder / "log", "ab") as log:
                assert job.held is not None
                log.write(f"--- run {job.run} on {job.held.allocation} ---\n".encode())
                self._keepers[job.number] = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_KEEPER), str(run), str(lock)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        except BlockingIOError:
            raise LaunchError(f"a process of an earlier run of {job.id} is alive") from None
        except OSError as error:
            raise LaunchError(f"cannot start {job.id}: {error.strerror or error}") from error
        finally:
            os.close(lock)
        self._readers.pop(job.number, None)

    def tell(self, job: Job, orders: Orders) -> None:
        if self._asked.get(job.number, (0, "", ""))[:2] == (job.run, job.told):
            return
        reader = self._reader(job)
        reader.read()
        if reader.folder is None:
            return
        target = Allocation.parse(job.told, None)
        grid = f"cpu:{target.num_devices}/s{orders.num_stages}"
        with suppress(ArenaError):  # it is asked again with the next tick
            answer = ask(reader.folder, {"target": grid, "reason": f"service: {job.cause}"}, timeout_s=_ASK_TIMEOUT_S)
            self._asked[job.number] = (job.run, job.told, str(answer["id"]))

    def stop(self, job: Job) -> None:
        run = self._of(job) / "runs" / str(job.run)
        mark = run / "stopped"  # a second SIGTERM would make a training leave without saving
        if mark.exists():
            return
        pid = _read(run / "keeper.json").get("pid")
        if pid is None:
            return  # not there yet; asked again with the next tick
        with suppress(OSError):
            mark.touch()
            os.killpg(int(pid), signal.SIGTERM)

    def signal(self, job: Job, number: int) -> None:
        for pid in processes_of(self._token(job)):
            with suppress(OSError):
                os.kill(pid, number)

    def heartbeat(self, job: Job) -> Heartbeat:
        folder = self._of(job)
        run = folder / "runs" / str(job.run)
        keeper = self._keepers.get(job.number)
        if keeper is not None:
            keeper.poll()
        alive = _held(folder / "lock")
        reader = self._reader(job)
        if not job.spec.rigid:
            reader.read()
        if not alive:
            self._asked.pop(job.number, None)
            self._keepers.pop(job.number, None)
            code = _read(run / "exit.json").get("code")
            if code is None and reader.done:
                code = 0
            return Heartbeat(alive=False, exit_code=code, progress=reader.progress())
        self._check_keeper(job, run)
        if not job.spec.rigid:
            self._check_quiet(reader)
        told, why = self._told(job, reader)
        return Heartbeat(alive=True, progress=reader.progress(), told=told, why=why)

    def logs(self, job: Job, offset: int, max_bytes: int) -> tuple[bytes, int]:
        try:
            with open(self._of(job) / "log", "rb") as file:
                file.seek(offset)
                data = file.read(max_bytes)
        except FileNotFoundError:
            return b"", offset
        except OSError as error:
            raise ArenaError(f"cannot read the output of {job.id}: {error.strerror}") from error
        return data, offset + len(data)

    def _of(self, job: Job) -> Path:
        return self._folder / str(job.number)

    def _token(self, job: Job) -> str:
        return f"{self._folder}/{job.number}:{job.run}"

    def _reader(self, job: Job) -> RunReader:
        reader = self._readers.get(job.number)
        if reader is None or reader.run != job.run:
            reader = RunReader(self._of(job) / "train", run=job.run, since=job.launched_at)
            self._readers[job.number] = reader
        return reader

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

    def _check_keeper(self, job: Job, run: Path) -> None:
        """What a killed keeper has left behind is killed as well."""
        keeper = _read(run / "keeper.json").get("keeper")
        if keeper is None:
            late = time.time() - job.launched_at > _BEGIN_S
            if late and not processes_of(self._token(job)):
                # Only an earlier run can hold the lock now.
                for pid in processes_of(f"{self._folder}/{job.number}:", prefix=True):
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            return
        with suppress(OSError, ValueError):
            os.kill(int(keeper), 0)
            state = Path(f"/proc/{keeper}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state != "Z":
                return
        self.signal(job, signal.SIGKILL)

    def _environment(self, job: Job, folder: Path) -> dict[str, str]:
        assert job.held is not None
        kind = job.held.allocation.device_type
        return {
            TOKEN: self._token(job),
            "ARENA_JAX_JOB": job.id,
            "ARENA_JAX_ALLOCATION": str(job.held.allocation),
            "ARENA_JAX_DEVICES": " ".join(
                f"{kind}/{node}:{','.join(map(str, numbers))}" for node, numbers in job.held.devices
            ),
        }

    def _command(self, job: Job, orders: Orders, folder: Path, run: Path) -> tuple[list[str], str]:
        spec = job.spec
        if spec.rigid:
            return ["/bin/sh", "-c", spec.command], spec.folder or str(folder)
        assert job.held is not None
        task = {
            "do": "train",
            "kind": spec.kind,
            "recipe": spec.recipe if spec.kind == "closure" else str(write_recipe(folder, job)),
            "folder": str(folder / "train"),
            "grid": f"cpu:{job.held.allocation.num_devices}/s{orders.num_stages}",
            "most_devices": orders.most_devices,
            "pace_s": {str(number): seconds for number, seconds in orders.pace_s.items()},
            "queue": spec.queue,
        }
        _write(run / "task.json", task)
        return [*self._worker, str(run / "task.json")], spec.folder if os.path.isdir(spec.folder) else str(folder)


def worker_argv() -> list[str]:
    """How a process of this package is started: the same code, installed or not, whatever folder it runs in."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from arena_jax.worker import main; main(sys.argv[1])"
    return [sys.executable, "-c", code]


def write_recipe(folder: Path, job: Job) -> Path:
    """The job's recipe as a file, named so that what is made from it is called after the job's recipe."""
    path = folder / "recipe.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(job.spec.recipe, encoding="utf-8")
        temporary.replace(path)
    return path


def processes_of(token: str, *, prefix: bool = False) -> list[int]:
    """Processes of this user with the token in their environment (Linux)."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if not entry.isdecimal():
                continue
            with suppress(OSError):
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if any(part == wanted or (prefix and part.startswith(wanted)) for part in environment):
                    found.append(int(entry))
    return found


def _held(path: Path) -> bool:
    """Whether a process holds the lock file."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(dict(value), file)
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
