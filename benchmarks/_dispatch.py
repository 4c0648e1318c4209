"""What issuing a step costs the host, which shows where a step is short."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from benchmarks._ours import Ours


@dataclass
class Spent:
    """Calls of one function, and the time in them."""

    calls: int = 0
    seconds: float = 0.0


@dataclass
class Issue:
    """What issuing one step consisted of.

    Attributes:
        programs: calls of programs compiled ahead of time. jax's CPU client runs a small program inside
            the call, so on CPU these seconds hold computation too.
        transfers: calls of ``device_put``.
    """

    programs: Spent = field(default_factory=Spent)
    transfers: Spent = field(default_factory=Spent)


def interleaved(ours: Any, theirs: Any, batch: Any, num_steps: int) -> dict[str, np.ndarray]:
    """(steps, 2) seconds until ``step`` returned and until its result was there, from idle devices."""
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "by_hand": []}
    for _ in range(num_steps):
        for name, stepper in (("ours", ours), ("by_hand", theirs)):
            began = time.perf_counter()
            loss = stepper.step(batch)
            issued = time.perf_counter() - began
            jax.block_until_ready((loss, stepper.state))
            times[name].append((issued, time.perf_counter() - began))
    return {name: np.array(rows) for name, rows in times.items()}


def taken_apart(ours: Ours, batch: Any, num_steps: int) -> dict[str, float]:
    """Medians over steps: programs and transfers issued, the time in each, and in the Python around them."""
    rows = []
    for _ in range(num_steps):
        with _watched() as issue:
            began = time.perf_counter()
            loss = ours.step(batch)
            total_s = time.perf_counter() - began
        jax.block_until_ready((loss, ours.state))
        inside_s = issue.programs.seconds + issue.transfers.seconds
        rows.append(
            (
                issue.programs.calls,
                issue.programs.seconds / issue.programs.calls,
                issue.transfers.calls,
                issue.transfers.seconds / issue.transfers.calls,
                (total_s - inside_s) / issue.programs.calls,
            )
        )
    names = ("num_programs", "call_per_program_s", "num_transfers", "per_transfer_s", "python_per_program_s")
    return dict(zip(names, np.median(rows, axis=0).tolist(), strict=True))


@contextmanager
def _watched() -> Iterator[Issue]:
    issue = Issue()
    call, put = jax.stages.Compiled.__call__, jax.device_put
    jax.stages.Compiled.__call__ = _timed(call, issue.programs)
    jax.device_put = _timed(put, issue.transfers)
    try:
        yield issue
    finally:
        jax.stages.Compiled.__call__, jax.device_put = call, put


def _timed(function: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.seconds += time.perf_counter() - began
            spent.calls += 1

    return run
