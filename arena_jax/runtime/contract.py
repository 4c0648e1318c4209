"""What the training loop is given and what it gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax

from arena_jax.grid import Allocation, GridShape, Plan, Request
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.metrics import StepRecord
from arena_jax.runtime.move import Moved

StopReason = Literal["done", "data_ended", "interrupted", "terminated", "stopped", "relaunch", "paused"]


class Program(Protocol):
    """A compiled plan, as the loop uses it. Steps are dispatched, not waited for."""

    @property
    def plan(self) -> Plan: ...
    @property
    def rows(self) -> Any: ...
    def init(self, rngs: Any = None) -> Any: ...
    def step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]: ...
    def eval_values(self, state: Any, batch: Any) -> Mapping[str, Any]: ...
    def save_tree(self, state: Any) -> dict[str, Any]: ...
    def abstract_tree(self) -> dict[str, jax.ShapeDtypeStruct]: ...
    def load_tree(self, tree: dict[str, Any]) -> Any: ...
    def warm_up(self) -> None: ...
    def plan_move(self, other: Any) -> Any: ...
    def take_from(self, state: Any, other: Any) -> tuple[Any, Moved]: ...


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program and what was predicted of it."""

    program: Program
    estimated_step_time_s: float | None = None
    engine: str = ""

    @property
    def plan(self) -> Plan:
        """The plan that was compiled."""
        return self.program.plan


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A plan for devices that this process does not have; what can be compiled ahead for it is in the caches."""

    plan: Plan
    estimated_step_time_s: float | None = None
    engine: str = ""


@dataclass(frozen=True, kw_only=True)
class Relaunch:
    """A change of plan that other processes make, after ``step`` completed steps.

    Attributes:
        source: the grid that ran until then.
        why: why this process cannot make the change.
        background_s, prepared: as in :class:`Swap`.
    """

    step: int
    request: Request
    rehearsed: Rehearsed
    source: GridShape
    why: str
    background_s: float
    prepared: bool


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A training that comes from another process, at its first step boundary here.

    Attributes:
        request_id: of the request that led here.
        swap: the change of plan; ``None`` where it failed and the training is back where it was.
        target, failed: what could not be reached, and why.
    """

    request_id: str | None
    swap: "Swap | None"
    target: "GridShape | Allocation"
    failed: str = ""


class Elsewhere(Protocol):
    """What takes a training to devices that its process does not have: more of them, or another type."""

    def why(self, target: "GridShape | Allocation", devices: Sequence[int] | None) -> str:
        """Why a target cannot be reached in this process; empty where it can."""

    def rehearse(
        self,
        target: "GridShape | Allocation",
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> Rehearsed | None:
        """Plan and compile for a target, away from this process; ``None`` when it was cancelled.

        Raises:
            ArenaError: no plan fits, or the type cannot be had.
        """

    def hand_over(self, relaunch: Relaunch | None, tree: dict[str, Any], info: CheckpointInfo) -> None:
        """Keep the state where the next process finds it; after an exception the training goes on here.

        Args:
            relaunch: where it goes on; ``None`` for a pause, and in processes that follow another.
        """


@dataclass(frozen=True, kw_only=True)
class Swap:
    """A change of plan after ``step`` completed steps.

    Attributes:
        source, target: the grids.
        background_s: seconds of planning and compiling for it; 0 where that was done before it was asked for.
        stall_s: seconds from the end of the last step under the old plan until the next could begin.
        prepared: whether the plan was compiled before it was asked for.
        move_s: seconds of ``stall_s`` in which the state moved.
        moved_bytes: bytes written by the move, all devices together.
        difference: what the new plan does otherwise, in words.
    """

    step: int
    source: GridShape
    target: GridShape
    reason: str
    background_s: float
    stall_s: float
    prepared: bool = False
    move_s: float = 0.0
    moved_bytes: int = 0
    difference: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the event log and ``train --json`` write it."""
        return {
            "step": self.step,
            "from": str(self.source),
            "to": str(self.target),
            "reason": self.reason,
            "background_s": self.background_s,
            "stall_s": self.stall_s,
            "prepared": self.prepared,
            "move_s": self.move_s,
            "moved_bytes": self.moved_bytes,
            "difference": self.difference,
        }


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How long to train, and what to do on the way.

    Attributes:
        num_steps: completed steps at which the run is done, those before a resume included.
        items_per_step: how many ``item_unit`` one step trains on, for the rate.
        eval_every, checkpoint_every: steps between; 0 never.
        nonfinite: ``stop`` at a NaN or infinite loss, or ``skip``, which the program does itself.
        report_every_s: seconds between reports to the scheduler.
    """

    num_steps: int
    items_per_step: float
    item_unit: str = "samples"
    samples_per_step: int = 1
    eval_every: int = 0
    checkpoint_every: int = 0
    nonfinite: Literal["stop", "skip"] = "stop"
    report_every_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a loop ended. ``history`` has one record per step it ran.

    Attributes:
        relaunch: where it goes on, when ``stop_reason`` is ``relaunch``; ``state`` may then be ``None``.
    """

    state: Any
    program: Program
    estimated_step_time_s: float | None
    step: int
    stop_reason: StopReason
    history: tuple[StepRecord, ...]
    swaps: tuple[Swap, ...]
    relaunch: Relaunch | None = None


Recompile = Callable[[GridShape | Allocation, Sequence[int] | None], Compiled]
"""Plan and compile for a target, on the given device numbers or the first ones."""
