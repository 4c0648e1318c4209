"""What a program's two forms (one stage, pipeline) share: inputs, sums over microbatches, metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from arena_jax.compiler.problem import Problem
from arena_jax.compiler.trace import LAST, MEAN, SUM, WEIGHTED, Trace
from arena_jax.errors import UsageError
from arena_jax.runtime.layout import State
from arena_jax.values import Last, Sum, Weighted

Metrics = dict[str, Any]

Compile = Callable[[str, Any], Any]
"""Compiles a lowered program, given what it is called (``"stage 0 forward"``)."""


def compile_here(name: str, lowered: Any) -> Any:
    """Compile for the devices at hand."""
    return lowered.compile()


class Engine(Protocol):
    """Runs the steps of one plan.

    Attributes:
        rows: numbers of the rows of a global batch that this process gives; ``None`` for all of them.
    """

    @property
    def rows(self) -> np.ndarray | None: ...

    def step(self, state: State, batch: Sequence[np.ndarray]) -> tuple[State, Metrics]:
        """One optimizer step on the flat leaves of a global batch; consumes ``state``."""

    def gradients(self, state: State, batch: Sequence[np.ndarray]) -> tuple[list[list[Any]], Any, Metrics]:
        """Gradient sums by stage, the weight to divide them by, and metrics; changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """How the outputs of a trace are combined over microbatches."""

    trace: Trace

    @property
    def num_outputs(self) -> int:
        """Loss sum, weight and the metrics' numbers; the state outputs come after them."""
        return 2 + sum(m.num_values for m in self.trace.metrics)

    def add(self, position: int, total: Any, value: Any) -> Any:
        """Fold one microbatch's number into the running total."""
        return value if self.kind(position) == LAST else total + value

    def kind(self, position: int) -> str:
        at = 2
        for metric in self.trace.metrics:
            if at <= position < at + metric.num_values:
                return metric.kind
            at += metric.num_values
        return WEIGHTED

    def values(self, totals: Sequence[Any]) -> Metrics:
        """Totals of one pass as values that can still be combined with those of other batches."""
        loss = Weighted(totals[0], totals[1]) if self.trace.weighted else totals[0]
        metrics: Metrics = {"loss": loss}
        at = 2
        for metric in self.trace.metrics:
            parts = totals[at : at + metric.num_values]
            kinds: dict[str, Any] = {WEIGHTED: Weighted, SUM: Sum, LAST: Last}
            metrics[metric.name] = kinds[metric.kind](*parts) if metric.kind in kinds else parts[0]
            at += metric.num_values
        return metrics

    def finish(self, totals: Sequence[Any], num_microbatches: int) -> Metrics:
        """The step's metrics: ``loss`` and the user's own."""
        metrics: Metrics = {"loss": totals[0] / totals[1]}
        at = 2
        for metric in self.trace.metrics:
            value = totals[at]
            if metric.kind == MEAN:
                value = value / num_microbatches
            elif metric.kind == WEIGHTED:
                value = value / totals[at + 1]
            metrics[metric.name] = value
            at += metric.num_values
        return metrics


def finished(value: Any) -> Any:
    """The number a metric's value stands for."""
    if isinstance(value, Weighted):
        return value.sum / value.weight
    return value.value if isinstance(value, Sum | Last) else value


def flatten_batch(
    problem: Problem, batch: Any, *, num_rows: int | None = None, ragged: bool = False
) -> tuple[list[Any], int]:
    """The batch's leaves in the problem's order, checked by name, and its number of rows.

    Args:
        num_rows: how many there must be; by default the global batch.
        ragged: whether there may be any number.

    Raises:
        UsageError: another structure, row count, shape or dtype than the problem was made with.
    """
    leaves, treedef = jax.tree.flatten(batch)
    if treedef != problem.batch_treedef:
        raise UsageError(f"the batch has structure {treedef}, the program was compiled for {problem.batch_treedef}")
    rows: int | None = None
    arrays = []
    for leaf, value in zip(problem.batch, leaves, strict=True):
        array = value if isinstance(value, np.ndarray | jax.Array) else np.asarray(value)
        expected = tuple(leaf.row_shape)
        received = tuple(array.shape[1:]) if leaf.has_rows else tuple(array.shape)
        if received != expected or (leaf.has_rows and array.ndim == 0):
            raise UsageError(f"batch leaf {leaf.name!r} has shape {array.shape}, expected (rows, {expected})")
        if leaf.has_rows:
            if rows is not None and array.shape[0] != rows:
                raise UsageError(f"batch leaf {leaf.name!r} has {array.shape[0]} rows, the others {rows}")
            rows = array.shape[0]
        if array.dtype != leaf.dtype:
            if not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
                raise UsageError(f"batch leaf {leaf.name!r} is {array.dtype}, expected {leaf.dtype}")
            array = array.astype(leaf.dtype)
        arrays.append(array)
    assert rows is not None
    num_rows = problem.global_batch if num_rows is None else num_rows
    if rows != num_rows and not ragged:
        of = "" if num_rows == problem.global_batch else f", of which this process gives {num_rows}"
        raise UsageError(
            f"the batch has {rows} rows, the global batch is {problem.global_batch}{of}",
            hint="drop the last incomplete batch in training; eval_step takes any number of rows",
        )
    return arrays, rows
