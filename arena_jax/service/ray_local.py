"""A Ray cluster on this machine alone, started for a service that was given none.

One head, which stands for all nodes of the cluster file. It outlives the service, as the jobs do; the next service
finds it by what is written in the state folder. It listens on 127.0.0.1 and lets in only who has its token.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from arena_jax.errors import UsageError
from arena_jax.processes.launch import free_port
from arena_jax.scheduler import Cluster
from arena_jax.service.json_file import read_json, write_json
from arena_jax.service.own_processes import TOKEN, processes_of, signal_all
from arena_jax.service.ray_nodes import resource_of

# Ray refuses less.
_OBJECT_STORE_BYTES = 80_000_000
_RESTART_S = 10.0


class LocalRay:
    """Starts Ray's head, and starts it anew when it dies; :class:`~arena_jax.service.ray_link.Where`.

    Args:
        state: the service's state folder.
    """

    def __init__(self, state: Path, cluster: Cluster) -> None:
        self._folder = state / "ray"
        self._mark = f"{self._folder}:ray"
        self._resources = {resource_of(g.device_type): g.num_devices for g in cluster.groups}
        self._head: subprocess.Popen[bytes] | None = None
        self._tried_s = -_RESTART_S
        try:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            self._token = self._folder / "token"
            if not self._token.exists():
                with open(os.open(self._token, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
                    file.write(secrets.token_hex(32))
        except OSError as error:
            raise UsageError(f"cannot write {str(self._folder)!r}: {error.strerror}") from error

    def address(self) -> str:
        if self._head is not None:
            self._head.poll()
        kept = read_json(self._folder / "head.json")
        if kept and _is_ours(kept["pid"], self._mark):
            return str(kept["address"])
        if time.monotonic() - self._tried_s < _RESTART_S:
            return ""
        self._tried_s = time.monotonic()
        self._end_all()
        return self._start()

    def environment(self) -> Mapping[str, str]:
        # By default, Ray gives its workers the least of a busy machine.
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token), "RAY_worker_niceness": "0"}

    def close(self, *, idle: bool) -> None:
        if not idle:
            return
        kept = read_json(self._folder / "head.json")
        if kept and _is_ours(kept["pid"], self._mark):
            signal_all([kept["pid"]], signal.SIGTERM)
            end_s = time.monotonic() + 15
            while processes_of(self._mark) and time.monotonic() < end_s:
                if self._head is not None:
                    self._head.poll()
                time.sleep(0.1)
        self._end_all()
        with suppress(OSError):
            (self._folder / "head.json").unlink()

    def _end_all(self) -> None:
        signal_all(processes_of(self._mark))
        kept = read_json(self._folder / "head.json")
        if kept:
            shutil.rmtree(kept["folder"], ignore_errors=True)

    def _start(self) -> str:
        # Ray's sockets lie below it, and their paths must be short.
        folder = tempfile.mkdtemp(prefix="arena-jax-ray-")
        port = free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard", "false"]
        command += ["--num-cpus", "0", "--num-gpus", "0", "--object-store-memory", str(_OBJECT_STORE_BYTES)]
        command += ["--resources", json.dumps(self._resources), "--temp-dir", folder]
        with open(self._folder / "log", "ab") as log:
            self._head = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment(), TOKEN: self._mark},
            )
        address = f"127.0.0.1:{port}"
        write_json(self._folder / "head.json", {"pid": self._head.pid, "address": address, "folder": folder})
        return address


def _is_ours(pid: int, mark: str) -> bool:
    """Whether the process is alive, and not another that has got its number."""
    return pid in processes_of(mark)
