"""The device type that this process stands for, where the hardware does not say it.

Virtual CPU types (``threads = N`` in a cluster file) are how clusters of unlike nodes are tried out without
them: a process of such a type is kept on N cores per device, so that types really differ in speed. The
process is told its type by ``ARENA_JAX_DEVICE_TYPE``, and the types by ``ARENA_JAX_CLUSTER``. Needs no jax.
"""

import os
from contextlib import suppress
from pathlib import Path

from arena_jax.errors import UsageError
from arena_jax.grid import CATALOGUE, DeviceType
from arena_jax.node_rates import node_rates

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
    node_rates()  # of the whole node
    given = os.environ.setdefault(ENV_CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    cores = [int(core) for core in given.split(",")]
    for task in _tasks():
        with suppress(OSError):  # a thread that has ended
            os.sched_setaffinity(task, cores[: threads * num_devices])


def _tasks() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]
