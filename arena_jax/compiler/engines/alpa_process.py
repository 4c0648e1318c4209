"""The process in which Alpa runs: started once, kept, and ended with the run."""

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

import arena_jax.compiler.engines.alpa_worker as program
from arena_jax.errors import ArenaError
from arena_jax.home import numba_cache
from arena_jax.solver_setup import ALPA_VERSION, alpa_folder

# Alpa gives CBC ten minutes; building and reading the program come on top.
_TIMEOUT_S = program.ALPA_TIME_LIMIT_S + 120
_STOP_S = 5.0


def installed() -> Path:
    """Where alpa is.

    Raises:
        ArenaError: nowhere.
    """
    folder = alpa_folder()
    if folder is None:
        raise ArenaError(
            f"the solver alpa {ALPA_VERSION} is not installed",
            hint="arena-jax doctor --install-alpa, or use plan.engine=highs",
        )
    return folder


class AlpaProcess:
    """One worker; calls from several threads take turns. After a crash or a time-out the next call starts anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if none runs, without waiting for it.

        Raises:
            ArenaError: alpa is not installed.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            folder = installed()
            self.close()
            # CBC's files and the worker's messages: gone with the process, however it ends.
            self._scratch = tempfile.TemporaryDirectory(prefix="arena-jax-alpa-")
            scratch = Path(self._scratch.name)
            numba_cache().mkdir(parents=True, exist_ok=True)
            environment = {
                **os.environ,
                "NUMBA_CACHE_DIR": str(numba_cache()),
                **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch)),
            }
            with (scratch / "stderr").open("wb") as stderr:
                # A group of its own, so that CBC goes with it and Ctrl-C reaches this process first.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(program.__file__), str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=scratch,
                    env=environment,
                    start_new_session=True,
                )

    def call(
        self,
        name: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        *,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Ask for one thing and wait for the answer.

        Raises:
            ArenaError: the process is missing, ended, took longer than ``timeout_s``, or Alpa raised.
        """
        timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
        with self._lock:
            self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            answer = None
            try:
                reader = cast(BinaryIO, _Timed(process.stdout.fileno(), time.monotonic() + timeout_s))
                program.write_message(cast(BinaryIO, process.stdin), {**fields, "call": name}, arrays)
                answer = program.read_message(reader)
            except TimeoutError as error:
                raise ArenaError(
                    f"alpa gave no answer within {timeout_s:g} s and was stopped",
                    hint="use plan.engine=highs, which stops with its best so far",
                ) from error
            except OSError:
                pass  # it is gone: said below
            finally:
                # Half an answer, a time-out or an interrupt leave nothing to go on with.
                if answer is None:
                    said = self._last_words()
                    self._kill()
            if answer is None:
                code = process.returncode
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise ArenaError(
                    f"the alpa process ended in the middle of a call ({how}){said}",
                    hint="arena-jax doctor --install-alpa installs it anew; plan.engine=highs does without it",
                )
        if "error" in answer[0]:
            raise ArenaError(f"alpa failed: {answer[0]['error']}", hint="use plan.engine=highs")
        return answer

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            process = self._process
            if process is not None and process.stdin is not None:
                try:
                    process.stdin.close()
                    process.wait(_STOP_S)
                except (OSError, subprocess.TimeoutExpired):
                    pass
            self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:
                    pass
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _last_words(self) -> str:
        if self._scratch is None:
            return ""
        text = (Path(self._scratch.name) / "stderr").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""


class _Timed:
    """Reads a pipe, and raises TimeoutError once the deadline has passed."""

    def __init__(self, fd: int, deadline: float) -> None:
        self._fd = fd
        self._deadline = deadline
        self._held = b""

    def _more(self) -> bool:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
            raise TimeoutError
        chunk = os.read(self._fd, 1 << 20)
        self._held += chunk
        return bool(chunk)

    def readline(self) -> bytes:
        while b"\n" not in self._held and self._more():
            pass
        line, newline, self._held = self._held.partition(b"\n")
        return line + newline

    def read(self, size: int) -> bytes:
        while len(self._held) < size and self._more():
            pass
        taken, self._held = self._held[:size], self._held[size:]
        return taken


@cache
def alpa_process() -> AlpaProcess:
    """The worker of this run."""
    return AlpaProcess()
