"""How long the service waits for jobs, and what it thinks of changes before any was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When to give up waiting. Seconds, but for ``most_crashes``.

    Attributes:
        stop_grace_s: to save and end; then it is killed.
        start_grace_s: from launch to the first step.
        hang_s: without a sign of life, or 20 steps if that is longer; then it is killed.
        change_grace_s: for a change inside the process; then it is stopped and launched anew.
        back_off_s: after the first crash, doubled with each one that follows without progress.
        most_crashes: without progress in between; then it has failed.
        round_s: between decisions; 0 decides at events.
        settle_s: events within so long are decided on together.
        change_cost_s: what a new process costs while none of its cause was measured.
        resize_cost_s: the same of a change inside the process.
    """

    stop_grace_s: float = 120.0
    start_grace_s: float = 900.0
    hang_s: float = 300.0
    change_grace_s: float = 300.0
    back_off_s: float = 5.0
    most_crashes: int = 4
    round_s: float = 0.0
    settle_s: float = 0.5
    change_cost_s: float = 20.0
    resize_cost_s: float = 5.0
