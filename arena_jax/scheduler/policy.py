"""The one Protocol of all policies, and what they see of the running jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from arena_jax.scheduler.cluster import Cluster, Columns


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The active jobs (waiting or running) in arrival order, as parallel arrays.

    Attributes:
        key: number of the job in the workload; stable over a simulation.
        step_s: predicted seconds of a step, jobs x columns; infinite where infeasible.
        remaining_steps: steps left, known from progress.
        num_steps: steps in all.
        arrival_s: arrival times.
        column: column held now, -1 when not running.
        request: column a rigid policy uses.
        since_s: when the present allocation began, its charge included; ``now`` when not running.
        charge_until_s: when the present charge ends.
        started: has run before.
        num_restarts: changes and resumes so far.
        run_s: seconds on devices so far; ``device_s`` the device-seconds.
        weight: weight of a second of completion time.
        deadline_s: deadlines, infinite for none.
        batch: samples a step; 1 where unknown.
        restart_s: charge of a change by cause number (see :mod:`arena_jax.scheduler.costs`).
    """

    key: np.ndarray
    step_s: np.ndarray
    remaining_steps: np.ndarray
    num_steps: np.ndarray
    arrival_s: np.ndarray
    column: np.ndarray
    request: np.ndarray
    since_s: np.ndarray
    charge_until_s: np.ndarray
    started: np.ndarray
    num_restarts: np.ndarray
    run_s: np.ndarray
    device_s: np.ndarray
    weight: np.ndarray
    deadline_s: np.ndarray
    batch: np.ndarray
    restart_s: np.ndarray

    def __len__(self) -> int:
        return len(self.key)

    @property
    def remaining_s(self) -> np.ndarray:
        """Predicted productive seconds to the end, jobs x columns."""
        return self.step_s * self.remaining_steps[:, None]


@dataclass(frozen=True)
class View:
    """What a policy sees of the cluster: columns, and the devices of each type that are up."""

    cluster: Cluster
    columns: Columns
    capacity: np.ndarray


@dataclass(frozen=True)
class Decision:
    """A column (or -1) for each active job, and when to be woken without an event, if at all.

    ``rejected`` are positions of jobs that are turned away for good (strict ElasticFlow).
    """

    column: np.ndarray
    wake_s: float | None = None
    rejected: tuple[int, ...] = ()


class Policy(Protocol):
    """Decides who runs where. May keep state between calls; :meth:`reset` forgets it."""

    name: str

    def reset(self) -> None:
        """Forget everything: a new simulation begins."""

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        """Allocations for the active jobs at ``now``; must fit the capacity of every type."""

    def get_state(self) -> Mapping[str, Any]:
        """State between calls as JSON values, for snapshots."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`get_state` gave."""


class Stateless:
    """Base of policies that keep nothing between calls."""

    def reset(self) -> None:
        return None

    def get_state(self) -> Mapping[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        del state
