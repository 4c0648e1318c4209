"""Processes of jobs on this machine: how one is started, how all of them are found, and what they hold."""

import fcntl
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# In the environment of every process of a run, so that none is overlooked.
TOKEN = "ARENA_JAX_RUN"


def worker_argv() -> list[str]:
    """How a process of this package is started: the same code, installed or not, whatever folder it runs in."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from arena_jax.worker import main; main(sys.argv[1])"
    return [sys.executable, "-c", code]


def processes_of(token: str, *, prefix: bool = False) -> list[int]:
    """Processes of this user with the token in their environment, whoever their parents are (Linux)."""
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


def signal_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes, of which some may be gone."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def lock_now(lock: int) -> bool:
    """Take the lock of an open file, unless another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not lock_now(lock)
    finally:
        os.close(lock)
