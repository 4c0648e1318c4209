"""The service's end of its connection to Ray: a process beside it speaks to Ray, and is started anew when it dies.

A process that is connected to Ray is ended by Ray when the head is lost, and its calls may block for minutes until
then. Neither may happen to the service.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arena_jax.errors import UsageError
from arena_jax.processes.line import Line

# What was seen longer ago says nothing any more; more often than so it is not looked for.
_FRESH_S, _LOOK_S = 10.0, 0.2
_RESTART_S = 5.0
_MODULE = "arena_jax.service.ray_bridge"


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the Ray cluster that is alive.

    Attributes:
        id: Ray's own.
        host: its name, for a person.
        resources: what it offers in all.
    """

    id: str
    host: str
    resources: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The Ray cluster a moment ago.

    Attributes:
        actors: names of those that are alive, or will be.
        answered: number of the last request that had been carried out before.
    """

    nodes: tuple[RayNode, ...]
    actors: frozenset[str]
    answered: int


class RayLink(Protocol):
    """What the executor knows of Ray. No call blocks; requests may be lost with the process that carries them out."""

    def look(self) -> Seen | None:
        """The latest that was seen; ``None`` while Ray does not answer."""

    def create(self, name: str, folder: Path, *, node: str, resource: str, amount: int) -> int:
        """Have an actor keep the process wanted in ``folder``; returns the request's number."""

    def kill(self, name: str) -> int:
        """End an actor, if there is one of that name; returns the request's number."""

    def close(self, *, idle: bool) -> None:
        """Let go of Ray. Actors go on; a cluster that was started for this service ends when it is ``idle``."""


class Where(Protocol):
    """Knows the address of a Ray cluster, and the environment for those who connect to it."""

    def address(self) -> str:
        """``host:port``; empty while there is none."""

    def environment(self) -> Mapping[str, str]:
        """What is added to the environment."""

    def close(self, *, idle: bool) -> None:
        """The service ends; ``idle`` says that nothing runs."""


@dataclass(frozen=True)
class Given:
    """A cluster that somebody else has started."""

    at: str

    def address(self) -> str:
        return self.at

    def environment(self) -> Mapping[str, str]:
        return {}

    def close(self, *, idle: bool) -> None:
        pass


class RayProcess:
    """A process that is connected to Ray; :class:`RayLink`.

    Args:
        where: the cluster.
        log: file for what the process says.
    """

    def __init__(self, where: Where, log: Path) -> None:
        self._where, self._log = where, log
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._at = ""
        self._started_s = -_RESTART_S
        self._count = 0
        self._seen: Seen | None = None
        self._seen_s = 0.0
        self._looked_s = -_LOOK_S

    def look(self) -> Seen | None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return self._seen
        self._looked_s = now_s
        self._keep_up()
        if self._line is not None:
            for message in self._line.drain():
                if message.get("say") == "seen":
                    self._seen, self._seen_s = _seen(message), time.monotonic()
        if time.monotonic() - self._seen_s > _FRESH_S:
            self._seen = None
        return self._seen

    def create(self, name: str, folder: Path, *, node: str, resource: str, amount: int) -> int:
        return self._ask(do="create", name=name, folder=str(folder), node=node, resource=resource, amount=amount)

    def kill(self, name: str) -> int:
        return self._ask(do="kill", name=name)

    def wait(self, most_s: float) -> None:
        """Wait until Ray answers; raise :class:`UsageError` where it does not."""
        end_s = time.monotonic() + most_s
        while self.look() is None:
            if time.monotonic() > end_s:
                raise UsageError(
                    f"no Ray cluster answers at {self._where.address() or 'its address'}",
                    hint=f"see {self._log}; without --ray-address, a cluster is started on this machine",
                )
            time.sleep(0.1)

    def close(self, *, idle: bool) -> None:
        self._end()
        self._where.close(idle=idle)

    def _end(self) -> None:
        self._seen = None
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, **request: Any) -> int:
        self._count += 1
        if self._line is not None:
            self._line.send(number=self._count, **request)
        return self._count

    def _keep_up(self) -> None:
        address = self._where.address()
        lost = self._process is None or self._process.poll() is not None or self._line is None or self._line.closed
        if not lost and address == self._at:
            return
        if time.monotonic() - self._started_s < _RESTART_S or not address:
            return
        self._end()
        self._started_s, self._at = time.monotonic(), address
        self._line, theirs = Line.pair()
        root = str(Path(__file__).resolve().parents[2])
        paths = (root, os.environ.get("PYTHONPATH"))
        environment = {
            **os.environ,
            **self._where.environment(),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), address, str(self._count)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )


def check_installed() -> None:
    """Raise :class:`UsageError` where Ray is not installed; does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "the ray executor needs Ray, which is not installed",
            hint="pip install 'arena-jax[ray]', or --executor local",
        )


def _seen(message: Mapping[str, Any]) -> Seen:
    nodes = tuple(RayNode(id=n["id"], host=n["host"], resources=n["resources"]) for n in message["nodes"])
    return Seen(nodes=nodes, actors=frozenset(message["actors"]), answered=message["answered"])
