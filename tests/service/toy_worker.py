"""A training without jax: steps that take their pace, checkpoints, an event log and the scheduler hook's socket.

It keeps the contract of ``arena_jax.worker`` that the executor relies on, and writes down what must never
happen: two of it at once in one folder, or a start that is not from the last complete checkpoint.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import yaml

from arena_jax.control import ControlSocket
from arena_jax.errors import EXIT_RESUMABLE
from arena_jax.events import EventLog
from arena_jax.grid import GridShape, StepReport, parse_target

SAVE_EVERY = 10


def main(path: str) -> int:
    task = json.loads(Path(path).read_text())
    if int(os.environ.get("ARENA_JAX_PROCESS_ID", "0")):
        return follow()
    folder = Path(task["folder"]) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    alone = os.open(folder / "alone", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "VIOLATION").write_text("two at once")
        return 1
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    saved = folder / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    num_steps = yaml.safe_load(Path(task["recipe"]).read_text())["steps"]
    grid = parse_target(task["grid"])
    if not isinstance(grid, GridShape):
        grid = GridShape(grid, 1)
    done = threading.Event()
    friends = lead(done)
    hook = ControlSocket(folder)
    with EventLog(folder / "events.jsonl") as log, open(folder / "steps", "a") as steps:

        def save() -> None:
            temporary = folder / "saved.tmp"
            temporary.write_text(str(step))
            temporary.replace(saved)

        def plan(reason: str) -> None:
            log.emit("plan", step=step, grid=str(grid), reason=reason)

        log.emit("run_start", run_id="toy")
        steps.write(f"start {step}\n")
        steps.flush()
        plan("start")
        while step < num_steps and not stopped:
            time.sleep(task["pace_s"][str(grid.num_devices)] / 40)
            request = hook.poll(step)
            if request is not None:
                assert isinstance(request.target, GridShape)
                grid = request.target
                plan("swap")
                hook.report(_report(step, num_steps, grid, request.id))
            step += 1
            log.emit("step", step=step, loss=1.0 / step, step_time_s=0.01)
            if step % SAVE_EVERY == 0:
                save()
                steps.write(f"saved {step}\n")
                steps.flush()
        save()
        steps.write(f"saved {step}\n")
        log.emit("run_end", step=step, stop_reason="done" if step >= num_steps else "terminated")
    hook.close()
    done.set()
    for friend in friends:
        friend.sendall(b"bye")
    return 0 if step >= num_steps else EXIT_RESUMABLE


def lead(done: threading.Event) -> list[socket.socket]:
    """Wait for the other processes, and die with the first of them."""
    friends: list[socket.socket] = []
    count = int(os.environ.get("ARENA_JAX_NUM_PROCESSES", "1"))
    if count == 1:
        return friends
    host, port = os.environ["ARENA_JAX_COORDINATOR"].rsplit(":", 1)
    with socket.create_server((host, int(port))) as server:
        server.settimeout(60)
        while len(friends) < count - 1:
            friends.append(server.accept()[0])

    def watch(friend: socket.socket) -> None:
        if not friend.recv(1) and not done.is_set():
            os._exit(1)

    for friend in friends:
        threading.Thread(target=watch, args=(friend,), daemon=True).start()
    return friends


def follow() -> int:
    """Be there until the first process is not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host, port = os.environ["ARENA_JAX_COORDINATOR"].rsplit(":", 1)
    until = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((host, int(port))) as leader:
                return 0 if leader.recv(3) == b"bye" else 1
        except ConnectionRefusedError:
            if time.monotonic() > until:
                return 1
            time.sleep(0.05)


def _report(step: int, num_steps: int, grid: GridShape, name: str | None) -> StepReport:
    return StepReport(
        step=step, num_steps=num_steps, loss=1.0, step_time_s=0.01, estimated_step_time_s=None, samples_per_s=1.0,
        plan_id="p", grid=grid, request_id=name,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
