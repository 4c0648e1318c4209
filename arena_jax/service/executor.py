"""What starts, stops and watches the processes of jobs: one small Protocol, so that the loop knows no more."""

from dataclasses import dataclass, field
from typing import Protocol

from arena_jax.errors import ArenaError
from arena_jax.service.devices import Node
from arena_jax.service.job import Job, Submission
from arena_jax.service.store import Point


class LaunchError(ArenaError):
    """A process could not be started; nothing runs."""


class StillAlive(LaunchError):
    """Nothing was started, as a process of an earlier launch is alive."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has said of itself since it was launched.

    Attributes:
        step, loss, step_time_s: of the latest step; the time is a median over the last few.
        grid: what its process runs on, in the process's own words (``cpu:4/s2``).
        num_devices: of that grid.
        seen_at: unix time of its latest event.
        stall_s: how long its latest change inside the process made it stand still; ``None`` before there was one.
        points: steps since the last heartbeat.
    """

    step: int
    loss: float | None
    step_time_s: float | None
    grid: str
    num_devices: int
    seen_at: float
    stall_s: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How a run is.

    Attributes:
        alive: whether any process of it is alive. Its devices are free only once this is false.
        exit_code: of a run that has ended; ``None`` where nobody saw it end (killed, or never begun).
        progress: ``None`` before its first step.
        told: what became of the latest :meth:`Executor.tell`: ``pending``, ``done``, ``refused``, or empty.
        why: the reason of a refusal.
    """

    alive: bool
    exit_code: int | None = None
    progress: Progress | None = None
    told: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a run is to do: which plan grid on how many devices, and how fast at most.

    Attributes:
        num_stages: pipeline stages of the index's best plan there.
        pace_s: seconds that a step takes at least, by number of devices: the nominal speed of a virtual type.
        most_devices: what it may grow to without a new process.
    """

    num_stages: int = 1
    pace_s: dict[int, float] = field(default_factory=dict)
    most_devices: int = 1


class Executor(Protocol):
    """Runs jobs. A call for a job names it; its ``run``, ``held`` and ``told`` say which launch and where.

    All calls may come again after a restart of the service and must then do no harm; none may block for
    more than a second or so.
    """

    name: str
    """What the user calls it."""

    elastic: bool
    """Whether a run can change its number of devices without a new process."""

    def launch(self, job: Job, orders: Orders) -> None:
        """Start run ``job.run`` on ``job.held``; raise :class:`LaunchError` where it could not be started.

        Raises :class:`StillAlive` when any process of an earlier run is alive.
        """

    def tell(self, job: Job, orders: Orders) -> None:
        """Ask the run, through its scheduler hook, to go on on the allocation ``job.told``."""

    def stop(self, job: Job) -> None:
        """Ask the run to save and end; once is enough."""

    def signal(self, job: Job, number: int) -> None:
        """Send a signal to every process of the run."""

    def heartbeat(self, job: Job) -> Heartbeat:
        """How the run is; raises :class:`ArenaError` while that cannot be known."""

    def logs(self, job: Job, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """What the job has printed from byte ``offset`` on, over all its runs, and where to go on."""

    def lost_nodes(self) -> frozenset[Node]:
        """Nodes of the cluster file that are not there now; nothing is placed on them."""

    def spans_nodes(self, spec: Submission) -> bool:
        """Whether such a job may get an allocation of several nodes."""

    def close(self, *, idle: bool) -> None:
        """The service ends. Jobs go on; ``idle`` says that there are none."""
