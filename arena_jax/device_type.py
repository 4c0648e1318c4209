"""The device type that this process stands for, where the hardware does not say it.

Virtual CPU types (``threads = N`` in a cluster file) are how clusters of unlike nodes are tried out without
them: a process of such a type is kept on N cores per device, so that types really differ in speed. The
process is told its type by ``ARENA_JAX_DEVICE_TYPE``, and the types by ``ARENA_JAX_CLUSTER``. Needs no jax.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from arena_jax import home
from arena_jax.errors import UsageError
from arena_jax.grid import CATALOGUE, DeviceType

ENV_TYPE = "ARENA_JAX_DEVICE_TYPE"
# The cores that the process was started with, kept for the processes that it starts.
ENV_CORES = "ARENA_JAX_CORES"


def cpu_type() -> DeviceType:
    """The type that this process's CPU devices stand for.

    Raises:
        UsageError: the environment names a type that is unknown or no CPU.
    """
    name = os.environ.get(ENV_TYPE)
    if not name:
        return CATALOGUE["cpu"]
    row = CATALOGUE[name]
    if row.platform != "cpu":
        raise UsageError(f"{ENV_TYPE} is {name!r}, which is no CPU type", hint=f"unset {ENV_TYPE}")
    return row


def environment_for(device_type: str) -> dict[str, str | None]:
    """What a process of a type needs in its environment; ``None`` is to be absent."""
    row = CATALOGUE[device_type]
    platforms = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}[row.platform]
    named = row.name if row.platform == "cpu" and row.name != "cpu" else None
    return {ENV_TYPE: named, "JAX_PLATFORMS": platforms, "JAX_NUM_CPU_DEVICES": None}


def take_cores(num_devices: int) -> None:
    """Keep every thread of this process on the cores that its devices have, where its type has a number of them.

    Where the machine has fewer cores than that, all of them are taken.
    """
    threads = cpu_type().threads
    if threads is None or not hasattr(os, "sched_setaffinity"):
        return
    ensure_node_rates()
    given = os.environ.setdefault(ENV_CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    cores = [int(core) for core in given.split(",")]
    for task in _tasks():
        with suppress(OSError):  # a thread that has ended
            os.sched_setaffinity(task, cores[: threads * num_devices])


def ensure_node_rates() -> None:
    """Measure what the whole node does, if nobody has, before this process is kept on some of its cores."""
    if not (home.home() / "cpu.json").exists():
        script = "from arena_jax.compiler.cpu import node_rates; node_rates()"
        subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def _tasks() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]
