"""What a Ray actor does on its node: keep one process of a job, and be gone when the process is.

All it is given is a folder of the service's state, which all nodes share: ``jobs/NUMBER/runs/N/RANK``. What is to
be started stands there in ``wanted.json``, and is started by the same keeper as on one machine. Nothing but the
folder's name crosses Ray. The actor's death, whatever the cause, is the end of the keeper's standard input, and
so of the job's process.

Two fences keep a job from running twice, and neither needs Ray. The keeper and the process inherit a lock on
``jobs/NUMBER/locks/RANK``. And the service, before it takes a run for ended, leaves the file ``closed`` in its folder:
an actor that comes late looks for it after taking the lock, and does nothing.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.processes.launch import WATCHED, free_port
from arena_jax.service.json_file import read_json, write_json
from arena_jax.service.own_processes import TOKEN, lock_now, processes_of, signal_all, worker_argv

CLOSED, COORDINATOR, ORDERS = "closed", "coordinator.json", "orders.json"
_KEEPER = Path(__file__).with_name("keeper.py")
# Starts the keeper by a process that is gone at once: Ray kills the children of its workers.
_ASIDE = """
import os, runpy, sys
if os.fork() == 0:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
_LOOK_S = 0.1
# For the lock: an actor that has found its run closed lets go of it in a moment.
_LOCK_S = 10.0
_MEET_S = 300.0
_TAIL_BYTES = 4096


class NodeProcess:
    """The actor. It has no methods to call: it works until its process is gone, and then ends itself."""

    def __init__(self, folder: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        me = ray.get_runtime_context().current_actor

        def work() -> None:
            try:
                keep(Path(folder), host)
            finally:
                ray.kill(me)

        threading.Thread(target=work, name="process", daemon=True).start()


class Refused(Exception):
    """The process is not to be started."""


def keep(folder: Path, host: str) -> None:
    """Start the process that is wanted in ``folder``, and return when nothing of it is left.

    Args:
        host: address at which other nodes reach this one.
    """
    wanted = read_json(folder / "wanted.json")
    try:
        keeper = _start(folder, wanted, host)
    except Refused as refused:
        with suppress(OSError):
            _append(Path(wanted["job_log"]), f"process {wanted['rank']} was not started: {refused}\n".encode())
        return
    assert keeper.stdout is not None
    keeper.stdout.read()  # the keeper holds the other end
    keeper.wait()
    while left := processes_of(wanted["env"][TOKEN]):  # the keeper itself was killed
        signal_all(left)
        time.sleep(_LOOK_S)
    with suppress(OSError):
        _last_words(folder, wanted)


def _start(folder: Path, wanted: dict[str, Any], host: str) -> "subprocess.Popen[bytes]":
    run = folder.parent
    lock_file = Path(wanted["lock"])
    lock_file.parent.mkdir(exist_ok=True)
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(lambda: lock_now(lock), _LOCK_S, run, f"a process of an earlier run has {lock_file.name!r}")
        _check_open(run)
        # What an earlier run may have left on this node, whose keeper and actor were killed at once.
        found = processes_of(wanted["token_of_job"], prefix=True)
        ours = processes_of(wanted["token_of_run"], prefix=True)  # after the others: this run is just beginning
        signal_all(pid for pid in found if pid not in ours)
        env = {**_own_environment(), **wanted["env"]}
        if wanted["num_processes"] > 1:
            env |= {
                "ARENA_JAX_PROCESS_ID": str(wanted["rank"]),
                "ARENA_JAX_NUM_PROCESSES": str(wanted["num_processes"]),
                "ARENA_JAX_COORDINATOR": _coordinator(run, wanted["rank"], host),
                WATCHED: "1",  # by the service
            }
        launch = {
            "argv": wanted["argv"] or [*worker_argv(), wanted["task"]],
            "cwd": next((path for path in wanted["folders"] if os.path.isdir(path)), str(folder)),
            "env": env,
            "log": wanted["log"],
            "orders": str(run / ORDERS),
            "rank": wanted["rank"],
        }
        write_json(folder / "launch.json", launch)
        with open(wanted["log"], "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ASIDE, str(_KEEPER), str(folder), str(lock)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                pass_fds=(lock,),
                start_new_session=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(str(error)) from error
    finally:
        os.close(lock)


def _check_open(run: Path) -> None:
    if (run / CLOSED).exists():
        raise Refused("its run is over")


def _wait(true: Callable[[], bool], most_s: float, run: Path, why: str) -> None:
    end_s = time.monotonic() + most_s
    while not true():
        _check_open(run)
        if time.monotonic() > end_s:
            raise Refused(why)
        time.sleep(_LOOK_S)


def _coordinator(run: Path, rank: int, host: str) -> str:
    """Where the processes of the run meet: chosen by the first, read by the others."""
    file = run / COORDINATOR
    if rank == 0:
        port = free_port("")
        write_json(file, {"address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"})
    _wait(file.exists, _MEET_S, run, "the first process did not say where to meet")
    return str(read_json(file)["address"])


def _own_environment() -> dict[str, str]:
    """This node's environment, without what Ray has set for its own worker, and Slurm for who started Ray."""
    foreign = ("RAY_", "SLURM_", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def _last_words(folder: Path, wanted: dict[str, Any]) -> None:
    """Where a process other than the first has failed, the job's output says how."""
    if wanted["rank"] == 0:
        return
    code = read_json(folder / "exit.json").get("code")
    if code in (0, 75, -signal.SIGKILL):
        return
    with open(wanted["log"], "rb") as file:
        file.seek(max(0, os.path.getsize(wanted["log"]) - _TAIL_BYTES))
        tail = file.read()
    _append(Path(wanted["job_log"]), f"--- process {wanted['rank']}, exit code {code} ---\n".encode() + tail)


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


if __name__ == "__main__":  # without Ray, for tests
    keep(Path(sys.argv[1]), "127.0.0.1")
