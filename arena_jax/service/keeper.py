"""Keeps one run of a job: starts it, holds the job's lock while anything of it lives, and writes how it ended.

Run as a program of its own (``python -I -S keeper.py FOLDER LOCK_FD``), outside of the package, so that it is
small and outlives the service. In FOLDER it reads ``launch.json`` (argv, env, cwd, log) and writes
``keeper.json`` (pid, group) and, last, ``exit.json`` (code), each whole or not at all.

Where ``launch.json`` names a file of ``orders``, signals are read from there as they are added, so that one may be
given from another machine; and the job ends when standard input does: whoever started the keeper is gone.

The lock was taken by the service and is inherited: it is free exactly when the keeper and every process that
it started are gone. So nothing can be started twice, whoever was killed, and when.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Of a file of orders.
_LOOK_S = 0.2


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere a killed keeper leaves its job running, and the lock held."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
    except (OSError, AttributeError, ImportError):
        pass


def write(folder: str, name: str, value: object) -> None:
    temporary = os.path.join(folder, name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, os.path.join(folder, name))


def main(folder: str, lock: int) -> None:
    """Keep the run in ``folder``; on the lock's descriptor."""
    with open(os.path.join(folder, "launch.json"), encoding="utf-8") as file:
        launch = json.load(file)
    # The group is the job's; signals meant for it do not reach the keeper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()

    def child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)

    log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            launch["argv"],
            cwd=launch["cwd"],
            env=launch["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=child,
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.write(log, f"cannot start {launch['argv'][0]}: {error}\n".encode())
        write(folder, "exit.json", {"code": 127, "at": time.time()})
        return
    write(folder, "keeper.json", {"keeper": me, "pid": process.pid})
    if "orders" in launch:
        obey(process, launch["orders"], launch["rank"])
    code = process.wait()
    try:  # what it has left behind in its group
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    while True:  # and what has left the group became this process's children
        try:
            left, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if left == 0:
            kill_children(me)
            time.sleep(0.02)
    write(folder, "exit.json", {"code": code, "at": time.time()})


def obey(process: "subprocess.Popen[bytes]", orders: str, rank: int) -> None:
    """Pass on the signals in the file until the process has ended; kill it when nobody is there to care."""
    done = 0
    while process.poll() is None:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready and not os.read(0, 1):
            process.send_signal(signal.SIGKILL)
            return
        try:
            with open(orders, encoding="utf-8") as file:
                found = json.load(file)["signals"]
        except (OSError, ValueError, KeyError):
            continue
        for number, only in found[done:]:
            if only in (None, rank):
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
        done = max(done, len(found))


def kill_children(me: int) -> None:
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            if int(parent) == me:
                os.kill(int(entry), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
