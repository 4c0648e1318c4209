"""Who started this process, and which of how many it is, read from the environment.

Two dialects are known, tried in this order:

- ``ARENA_JAX_PROCESS_ID``, ``ARENA_JAX_NUM_PROCESSES`` and ``ARENA_JAX_COORDINATOR`` (``host:port``), or the same
  three as jax names them: ``JAX_PROCESS_ID``, ``JAX_NUM_PROCESSES`` and ``JAX_COORDINATOR_ADDRESS``;
- Slurm: a task that ``srun`` started. A batch script or an ``salloc`` shell is none, though some of the
  variables are set in it.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from arena_jax.errors import UsageError

# Slurm job numbers are mapped to the last ports, as jax does it, so that two jobs rarely meet on a node.
_NUM_PORTS = 1 << 12
_FIRST_PORT = (1 << 16) - _NUM_PORTS

# Set to 1 by who ends all processes when one dies.
WATCHED = "ARENA_JAX_WATCHED"

_DIALECTS = {
    "ARENA_JAX": ("ARENA_JAX_PROCESS_ID", "ARENA_JAX_NUM_PROCESSES", "ARENA_JAX_COORDINATOR"),
    "JAX": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those that one job was started with.

    Attributes:
        rank: its number, from 0.
        num_processes: how many there are.
        coordinator: ``host:port`` at which process 0 lets the others find each other.
        source: who started them, in words.
        watched: whether who started them ends all when one dies. Otherwise they look after each other, and one that
            gives no sign of life for some seconds, as on a machine that is very busy, ends all.
    """

    rank: int
    num_processes: int
    coordinator: str
    source: str
    watched: bool = False


def detect_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that the environment describes; ``None`` where this process is alone.

    Raises:
        UsageError: the variables are incomplete or contradict each other.
    """
    env = os.environ if environment is None else environment
    for names in _DIALECTS.values():
        # The address alone says nothing: jax reads it where the rest comes from elsewhere.
        if names[0] in env or names[1] in env:
            return _from_names(env, names)
    if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return _from_slurm(env)
    return None


def _from_names(env: Mapping[str, str], names: tuple[str, str, str]) -> Launch | None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(n for n in names if env.get(n))} is set without {', '.join(missing)}",
            hint="set all three, or none to train in one process",
        )
    rank, count = _number(env, names[0]), _number(env, names[1])
    return _launch(rank, count, env[names[2]], names[1], watched=env.get(WATCHED) == "1")


def _from_slurm(env: Mapping[str, str]) -> Launch | None:
    rank, count = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    job = env.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdecimal():
        raise UsageError(
            "SLURM_PROCID is set without SLURM_STEP_NODELIST and SLURM_JOB_ID",
            hint="start the job with srun, or set ARENA_JAX_PROCESS_ID, _NUM_PROCESSES and _COORDINATOR",
        )
    port = _FIRST_PORT + int(job) % _NUM_PORTS
    return _launch(rank, count, f"{first_host(nodes)}:{port}", "srun")


def _launch(rank: int, count: int, coordinator: str, source: str, *, watched: bool = False) -> Launch | None:
    if not 0 <= rank < count:
        raise UsageError(f"process {rank} of {count} ({source})", hint="processes are numbered from 0")
    if not re.fullmatch(r"[^\s:]+:\d+|\[[^\s\]]+\]:\d+", coordinator):
        raise UsageError(f"the coordinator's address is {coordinator!r}", hint="write host:port")
    if count == 1:
        return None
    return Launch(rank=rank, num_processes=count, coordinator=coordinator, source=source, watched=watched)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``a[03-05,9]-x,b`` begins with ``a03-x``."""
    host = ""
    rest = nodes.strip()
    while rest and rest[0] != ",":
        if rest[0] == "[":
            inside, closed, rest = rest[1:].partition("]")
            if not closed:
                raise UsageError(f"the node list {nodes!r} has an open bracket")
            host += re.split(r"[-,]", inside)[0]
        else:
            host, rest = host + rest[0], rest[1:]
    if not host:
        raise UsageError(f"the node list {nodes!r} names no host")
    return host


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise UsageError(f"{name} is {env[name]!r}", hint="give a number")
    return int(env[name])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at now, to meet at; ``host`` is empty for all of this machine's addresses."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
