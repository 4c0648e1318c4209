"""Metrics that arrive late, so that no step waits for a number to be printed."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from arena_jax.errors import DataError
from arena_jax.values import Last, Sum, Weighted


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step gave.

    Attributes:
        step: number of the step, counted from 1.
        loss: the loss before its update.
        metrics: the loss function's other metrics; arrays as nested lists.
        step_time_s: seconds since the step before it was complete.
    """

    step: int
    loss: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    step_time_s: float


@dataclass
class _Dispatched:
    step: int
    metrics: Mapping[str, Any]
    step_time_s: float | None = None  # known once it was seen to be complete


class InFlight:
    """Steps that were dispatched and whose metrics have not been looked at.

    Fetching the metrics of step k waits until step k is complete. Doing so only once step k +
    ``depth`` is dispatched keeps the devices busy and bounds how far the host runs ahead of them.

    A step's time ends when it is first seen to be complete, not when it is fetched: by then the steps
    after it may be complete, too, and would seem to have taken no time. Steps that complete between
    two looks share the time between them.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._waiting: deque[_Dispatched] = deque()
        self._last_s = time.perf_counter()

    def restart_clock(self) -> None:
        """Let the next step's time begin now: something other than a step took the time before."""
        self._last_s = time.perf_counter()

    def since_last_s(self) -> float:
        """Seconds since a step was last seen to complete, or since the clock was restarted."""
        return time.perf_counter() - self._last_s

    def push(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a dispatched step."""
        for leaf in jax.tree.leaves(metrics):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        self._waiting.append(_Dispatched(step, metrics))
        self._look()

    def due(self) -> Iterator[StepRecord]:
        """The records of the steps that are more than ``depth`` behind."""
        return self._take(self._depth)

    def drain(self) -> Iterator[StepRecord]:
        """The records of all steps; afterwards the devices are idle."""
        return self._take(0)

    def _take(self, leave: int) -> Iterator[StepRecord]:
        while len(self._waiting) > leave:
            self._look()
            first = self._waiting[0]
            values = {name: plain(value) for name, value in jax.device_get(dict(first.metrics)).items()}
            self._look(at_least=1)
            self._waiting.popleft()
            assert first.step_time_s is not None
            yield StepRecord(
                step=first.step, loss=float(values.pop("loss")), metrics=values, step_time_s=first.step_time_s
            )

    def _look(self, at_least: int = 0) -> None:
        """Share the time since a step was last seen to complete among those that did since then.

        The first ``at_least`` steps are known to be complete. Devices take steps in order.
        """
        complete = []
        for number, dispatched in enumerate(self._waiting):
            if dispatched.step_time_s is not None:
                continue
            if number >= at_least and not _is_ready(dispatched.metrics):
                break
            complete.append(dispatched)
        if not complete:
            return
        now = time.perf_counter()
        for dispatched in complete:
            dispatched.step_time_s = (now - self._last_s) / len(complete)
        self._last_s = now


def _is_ready(metrics: Mapping[str, Any]) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
    return all(leaf.is_ready() for leaf in leaves)  # type: ignore[attr-defined]  # not in jax's stubs


class EvalMean:
    """Metrics over batches of unlike size, as if they had been one batch.

    ``Weighted`` and ``Sum`` are added up, ``Last`` is the last; a plain value is a mean over the rows
    of its batch and weighs as many rows.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[int, Mapping[str, Any]]] = []

    def add(self, num_rows: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a batch without waiting for them, but for those of long ago."""
        self._batches.append((num_rows, metrics))
        if len(self._batches) > 2:  # as in training, the host stays at most two batches ahead
            rows, earlier = self._batches[-3]
            self._batches[-3] = (rows, jax.device_get(dict(earlier)))

    def result(self) -> dict[str, Any]:
        """Wait for all batches; raise :class:`DataError` when there was none."""
        if not self._batches:
            raise DataError(
                "the evaluation data yields no batch",
                hint="pass something that can be iterated again and again, such as a list, not an iterator",
            )
        batches = [(rows, jax.device_get(dict(metrics))) for rows, metrics in self._batches]
        return {name: plain(_combine([(rows, m[name]) for rows, m in batches])) for name in batches[0][1]}


def _combine(values: list[tuple[int, Any]]) -> Any:
    first = values[0][1]
    if isinstance(first, Weighted):
        return sum(np.asarray(v.sum) for _, v in values) / sum(np.asarray(v.weight) for _, v in values)
    if isinstance(first, Sum):
        return sum(np.asarray(v.value) for _, v in values)
    if isinstance(first, Last):
        return values[-1][1].value
    num_rows = sum(rows for rows, _ in values)
    return sum(rows * np.asarray(value, np.float64) for rows, value in values) / num_rows


def plain(value: Any) -> Any:
    """A host value as JSON would have it: numbers, nested lists of them."""
    if isinstance(value, Weighted):
        return plain(np.asarray(value.sum) / np.asarray(value.weight))
    if isinstance(value, Sum | Last):
        return plain(value.value)
    return np.asarray(value).tolist()


def is_bad(record: StepRecord) -> bool:
    """Whether a step's loss, or the norm of its gradient where it is known, is NaN or infinite."""
    norm = record.metrics.get("grad_norm", 0.0)
    return not math.isfinite(record.loss) or (isinstance(norm, float) and not math.isfinite(norm))


def num_rows(batch: Any) -> int:
    """Rows of a batch: the leading dim of its first array that has one."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)), 1)
