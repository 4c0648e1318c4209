"""Faults against a real service with real processes: ``python -m tests.service.chaos [NUM_FAULTS] [SEED]``.

The service, its keepers and its workers are killed, workers are stopped, and the disk runs full, while jobs are
submitted, resized and cancelled. In the end every job must be done, none may have run twice at once, each
start must be from the last complete checkpoint, no process may be left, and the state must have been readable
all the time. Trainings are stand-ins without jax (``toy_worker``); everything else is the service's own.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from arena_jax.errors import ArenaError
from arena_jax.service.executor import Executor
from arena_jax.service.job import ENDED, Submission
from arena_jax.service.local import LocalExecutor
from arena_jax.service.own_processes import processes_of
from arena_jax.service.protocol import call
from arena_jax.service.rules import Rules
from arena_jax.service.service import Options, Service
from arena_jax.service.store import Store
from tests.service.stub import CLUSTER, StubIndexer

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("service", "worker", "worker", "keeper", "hang", "disk")
GRIDS = ("auto", "auto", "pause", "quick:2", "slow:4", "quick:2x4")
NUM_STEPS = 600


def serve(state: str) -> None:
    """The service's process."""
    folder = Path(state)
    run(folder, lambda: LocalExecutor(folder, CLUSTER, worker=[sys.executable, "-m", "tests.service.toy_worker"]))


def run(folder: Path, make: Callable[[], Executor], *, start_grace_s: float = 20.0) -> None:
    """Serve until SIGTERM, and lose patience soon."""
    options = Options(
        state=folder,
        cluster=CLUSTER,
        rules=Rules(
            hang_s=3.0, start_grace_s=start_grace_s, stop_grace_s=5.0, change_grace_s=10.0, back_off_s=0.5,
            most_crashes=1000, change_cost_s=1.0, settle_s=0.2,
        ),
    )  # fmt: skip
    service = Service(options, lambda store: (make(), StubIndexer()), note=lambda text: print(text, flush=True))
    service.start()
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    service.run()
    service.close()


class Chaos:
    """One run of it, in a folder of its own; on a small disk of its own where this user may mount one.

    Attributes:
        faults: what may happen; ``disk`` only where there is a small disk.
    """

    faults: Sequence[str] = FAULTS

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="arena-jax-chaos-"))
        self.small = self._mount()
        self.state = self.folder / "state"
        self.state.mkdir(mode=0o700)
        self.counts: dict[str, int] = {}
        self.service = self._start()
        self.stopped: dict[int, float] = {}

    def _mount(self) -> bool:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(self.folder)], capture_output=True
        )
        return done.returncode == 0

    def _serve(self) -> str:
        """What the service's process runs."""
        return f"from tests.service.chaos import serve; serve({str(self.state)!r})"

    def _start(self) -> "subprocess.Popen[bytes]":
        with open(f"{self.folder}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", self._serve()],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def ask(self, request: dict) -> dict | None:
        with suppress(ArenaError):
            return call(self.state, request, timeout_s=5)
        return None

    def fault(self) -> None:
        """One fault of a kind that is possible now."""
        pids = processes_of(f"{self.state}/jobs/", prefix=True)
        keepers, workers = [], []
        for pid in pids:
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                (keepers if b"keeper.py" in line else workers).append(pid)
        if not keepers or not workers:
            return
        kind = self.draw.choice([kind for kind in self.faults if kind != "disk" or self.small])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        with suppress(ProcessLookupError):
            self._do(kind, keepers, workers)

    def _do(self, kind: str, keepers: list[int], workers: list[int]) -> None:
        if kind == "service":
            self.service.kill()
            self.service.wait()
            time.sleep(self.draw.random())
            self.service = self._start()
        elif kind == "worker":
            os.kill(self.draw.choice(workers), signal.SIGKILL)
        elif kind == "keeper":
            os.kill(self.draw.choice(keepers), signal.SIGKILL)
        elif kind == "hang":
            os.kill(self.draw.choice(workers), signal.SIGSTOP)
        else:
            filler = self.folder / "filler"
            with suppress(OSError), open(filler, "wb") as file:
                while True:
                    file.write(b"\0" * 65536)
                    file.flush()
            time.sleep(0.5 + self.draw.random())
            filler.unlink()

    def run(self, num_faults: int) -> dict:
        """Everything; returns what happened, and raises for what must not."""
        jobs = 0
        while sum(self.counts.values()) < num_faults:
            if jobs < 5 + num_faults // 5 and self._waiting() < 4:
                spec = Submission(
                    kind="recipe", name="toy", recipe=json.dumps({"steps": NUM_STEPS}), steps=NUM_STEPS,
                    max_devices=self.draw.choice([2, 4, 8]),
                )  # fmt: skip
                jobs += self.ask({"do": "submit", "job": spec.to_json()}) is not None
            elif self.draw.random() < 0.4:
                self.ask({"do": "resize", "job": str(self.draw.randint(1, 20)), "grid": self.draw.choice(GRIDS)})
            self.fault()
            Store(self.state / "state.sqlite").jobs() if not self.small else self._read()
            if self.service.poll() is not None:  # it could not start on a full disk
                self.service = self._start()
            time.sleep(0.2 + self.draw.random())
        self._finish()
        return self._check()

    def _waiting(self) -> int:
        answer = self.ask({"do": "status", "ended": 0})
        return 99 if answer is None else len(answer["jobs"])

    def _read(self) -> None:
        """The state is readable while the disk is full, too."""
        import sqlite3

        path = self.state / "state.sqlite"
        if path.exists():
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
            with suppress(sqlite3.OperationalError):  # not yet made
                db.execute("SELECT COUNT(*) FROM jobs").fetchone()
            db.close()

    def _finish(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            if self.service.poll() is not None:
                self.service = self._start()
                time.sleep(2)
            answer = self.ask({"do": "status", "ended": 1000})
            if answer is not None:
                left = [job for job in answer["jobs"] if job["state"] not in ENDED]
                if not left:
                    break
                for job in left:
                    if job["pin"]:
                        self.ask({"do": "resize", "job": job["id"], "grid": "auto"})
            time.sleep(0.5)
        self.service.terminate()
        self.service.wait(30)

    def _check(self) -> dict:
        jobs = Store(self.state / "state.sqlite").jobs()
        starts = 0
        for job in jobs:
            assert job.phase == "finished", f"{job.id} is {job.phase}: {job.reason}"
            assert job.step == NUM_STEPS
            folder = self.state / f"jobs/{job.number}/train/run"
            assert not (folder / "VIOLATION").exists(), f"{job.id} ran twice at once"
            saved = 0
            for line in (folder / "steps").read_text().splitlines():
                what, step = line.split()
                if what == "start":
                    starts += 1
                    assert int(step) >= saved, f"{job.id} began at {step}, saved was {saved}"
                saved = max(saved, int(step))
        left = processes_of(f"{self.state}/jobs/", prefix=True)
        assert not left, f"left behind: {left}"
        return {"faults": self.counts, "jobs": len(jobs), "starts": starts, "small_disk": self.small}

    def clean(self) -> None:
        for pid in processes_of(f"{self.state}/jobs/", prefix=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.service.poll() is None:
            self.service.kill()
            self.service.wait()
        if self.small:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def main(make: Callable[[int], Chaos] = Chaos) -> None:
    """Run it as the command line says, and print what happened."""
    num_faults = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    chaos = make(seed)
    began = time.monotonic()
    try:
        said = chaos.run(num_faults)
    finally:
        chaos.clean()
    print(json.dumps({**said, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
