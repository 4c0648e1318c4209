"""What a tracker is."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from arena_jax.events import Event


@runtime_checkable
class Tracker(Protocol):
    """Receives the events of a run, in order, from one thread.

    Any method may raise; the sink then keeps the events and offers them again later, so a tracker
    must bear seeing the events of a failed call twice.
    """

    def open(self, run_start: Event) -> None:
        """Begin a run, or take it up again: called once per ``run_start`` event and after a restart."""

    def write(self, events: Sequence[Event]) -> None:
        """Take the next events of the open run."""

    def close(self) -> None:
        """Let go of what is held; no further events come."""


@runtime_checkable
class StatefulTracker(Tracker, Protocol):
    """A tracker with a memory: the sink stores ``state`` (JSON values) together with its position in
    the log, and sets it before :meth:`Tracker.open` when the run is taken up again.
    """

    state: dict[str, Any]
