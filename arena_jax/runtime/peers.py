"""How the processes of one job stay together: they do the same at the same step, or nothing at all.

Process 0 leads: it alone hears signals and the scheduler, and writes logs. What it decides must come into
effect at the same step everywhere, although steps are dispatched ahead and processes are never quite at the same
place. So it gives out *leases*: "up to step N, go on without asking". A decision takes effect where the lease
that is out ends. A lease covers about a quarter of a second of steps, which bounds both the delay of a decision
and the traffic.
"""

import json
import math
import time
from contextlib import suppress
from typing import Any, Protocol

from arena_jax.errors import EXIT_RESUMABLE, ArenaError

# Seconds of steps that a lease covers, and the most steps.
_LEASE_S = 0.25
_MOST_STEPS = 16
# Seconds without a word of a peer, when it may be evaluating or compiling, before it counts as lost.
_SILENCE_S = 900.0
_SLICE_S = 10.0
_MEETING_POLL_S = 0.02
# What is so many words old has been heard by all: nobody is more than a few steps behind.
_KEPT_WORDS = 32


class PeerLostError(ArenaError):
    """Another process of the job is gone; the job can go on from its last checkpoint."""

    exit_code = EXIT_RESUMABLE


class Board(Protocol):
    """Key-value store that all processes share; values are short strings, written once."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str, timeout_s: float) -> str | None: ...
    def peek(self, key: str) -> str | None: ...
    def delete(self, key: str) -> None: ...


class Peers:
    """The processes of one job, as one of them sees the others.

    Every method but :attr:`leads` must be called by all of them in the same order.

    Args:
        board: see :class:`Board`.
        rank: this process.
        count: how many there are.
        one_runtime: whether jax sees the devices of all of them (one stage), rather than each its own.
        silence_s: how long a peer may be silent.

    Attributes:
        step: the boundary this process last came to, for who watches it.
    """

    def __init__(
        self, board: Board, rank: int, count: int, *, one_runtime: bool, silence_s: float = _SILENCE_S
    ) -> None:
        self.rank, self.count, self.one_runtime = rank, count, one_runtime
        self.step = -1
        self._board = board
        self._silence_s = silence_s
        self._num_shared = 0
        self._num_meetings = 0
        self._until = 0
        self._lease = 0
        self._decision: str | None = None

    @property
    def leads(self) -> bool:
        """Whether this process decides and logs."""
        return self.rank == 0

    @property
    def deciding(self) -> bool:
        """Whether a decision is out that has not taken effect here."""
        return self._decision is not None

    def share(self, value: Any = None) -> Any:
        """What the leader gives, a JSON value, to all."""
        key = f"share/{self._num_shared}"
        self._num_shared += 1
        if self.leads:
            self._board.set(key, json.dumps(value))
            if self._num_shared > _KEPT_WORDS:
                self._board.delete(f"share/{self._num_shared - _KEPT_WORDS - 1}")
            return value
        return json.loads(self._wait(key))

    def unanimous(self, agreed: bool) -> bool:
        """Whether all agreed."""
        vote = f"vote/{self._num_shared}"
        if not self.leads:
            self._board.set(f"{vote}/{self.rank}", "yes" if agreed else "no")
            return bool(self.share())
        votes = [self._wait(f"{vote}/{rank}") for rank in range(1, self.count)]
        for rank in range(1, self.count):
            self._board.delete(f"{vote}/{rank}")
        return bool(self.share(agreed and all(v == "yes" for v in votes)))

    def meeting(self) -> "Meeting":
        """For one piece of work that all do at once on threads of their own."""
        self._num_meetings += 1
        return Meeting(self._board, f"meeting/{self._num_meetings}", self.rank, self.count)

    def at_boundary(self, step: int, wish: str | None = None, *, step_time_s: float = 0.0) -> str | None:
        """What all do after ``step`` completed steps: ``None`` for going on, or the leader's wish of a few steps ago.

        Args:
            wish: the leader's; a second one before the first is met is dropped.
            step_time_s: the leader's recent time of a step.
        """
        self.step = step
        return self._lead(step, wish, step_time_s) if self.leads else self._follow(step)

    def _lead(self, step: int, wish: str | None, step_time_s: float) -> str | None:
        if self._decision is None and wish is not None:
            self._decision, self._until = wish, max(self._until, step)
            self._give({"until": self._until, "then": wish})
        if self._decision is not None:
            if step < self._until:
                return None
            decision, self._decision = self._decision, None
            return decision
        num_steps = min(_MOST_STEPS, max(1, math.ceil(_LEASE_S / step_time_s))) if step_time_s > 0 else 1
        if step >= self._until or self._until - step <= num_steps // 2:
            self._until = step + num_steps
            self._give({"until": self._until})
        return None

    def _follow(self, step: int) -> str | None:
        while step >= self._until:
            lease = json.loads(self._wait(f"lease/{self._lease}"))
            self._lease += 1
            self._until = lease["until"]
            self._decision = lease.get("then")
            if self._decision is not None:
                break
        if self._decision is None or step < self._until:
            return None
        decision, self._decision = self._decision, None
        return decision

    def _give(self, lease: dict[str, Any]) -> None:
        self._board.set(f"lease/{self._lease}", json.dumps(lease))
        self._lease += 1
        if self._lease > _KEPT_WORDS:
            self._board.delete(f"lease/{self._lease - _KEPT_WORDS - 1}")

    def _wait(self, key: str) -> str:
        waited_s = 0.0
        while waited_s < self._silence_s:
            slice_s = min(_SLICE_S, self._silence_s - waited_s)
            value = self._board.get(key, slice_s)
            if value is not None:
                return value
            waited_s += slice_s
        raise PeerLostError(
            f"process {self.rank} heard nothing of its peers for {self._silence_s:.0f} s (waiting for {key})",
            hint="the job goes on from its last checkpoint when it is started again",
        )


class Meeting:
    """Barriers of one piece of work, which a failure in any process ends for all.

    Args:
        board: see :class:`Board`.
        name: of this work, the same in all processes.
        rank, count: this process, and how many there are.
    """

    def __init__(self, board: Board, name: str, rank: int, count: int) -> None:
        self._board, self._name, self._rank, self._count = board, name, rank, count
        self._failed = False

    def wait(self, place: str, timeout_s: float) -> None:
        """Wait until all have come to ``place``.

        Raises:
            PeerLostError: one of them failed, or the time is over.
        """
        here = f"{self._name}/{place}"
        self._board.set(f"{here}/{self._rank}", "here")
        end_s = time.monotonic() + timeout_s
        missing = set(range(self._count)) - {self._rank}
        while missing:
            missing -= {rank for rank in missing if self._board.peek(f"{here}/{rank}") is not None}
            failure = self._board.peek(f"{self._name}/failed")
            if failure is not None:
                raise PeerLostError(failure)
            if time.monotonic() > end_s:
                raise PeerLostError(f"process {min(missing)} did not come to {place} in {timeout_s:.0f} s")
            if missing:
                time.sleep(_MEETING_POLL_S)

    def fail(self, why: str) -> None:
        """Tell the others that this process cannot do its part; the first failure counts."""
        if self._failed:
            return
        self._failed = True
        with suppress(Exception):  # another process was first
            self._board.set(f"{self._name}/failed", f"process {self._rank}: {why}")
