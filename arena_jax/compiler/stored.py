"""Plans served from a store where it holds them, searched and stored where it does not."""

import time
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property

from arena_jax.compiler.analysis import Analysis, Constraints, analyse
from arena_jax.compiler.coupling import couples_samples
from arena_jax.compiler.job_key import job_key
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.search import check_pins, grids_of_targets, plan_problem
from arena_jax.compiler.trace import trace_loss
from arena_jax.compiler.tracing import quick_tracing
from arena_jax.errors import ArenaError
from arena_jax.grid import (
    CATALOGUE,
    Allocation,
    Catalogue,
    GridShape,
    IndexRow,
    JobKey,
    PlanIndex,
    PlanStore,
    SearchInterrupted,
)


class StoredSearch:
    """Plans one problem again and again; what a store holds is not searched.

    The trace is always taken, for its fingerprint is part of the key. Layers and shardings are found
    when something has to be searched, once.

    Args:
        problem: what is trained.
        store: where rows are kept; ``None`` searches every time.
        name: what people call the model, for who reads the store.

    Attributes:
        trace: of the problem at the global batch.
    """

    def __init__(
        self, problem: Problem, store: PlanStore | None, *, name: str = "", catalogue: Catalogue = CATALOGUE
    ) -> None:
        self.problem = problem
        self._store = store
        self._name = name
        self._catalogue = catalogue
        self.trace = trace_loss(problem, 1)

    @cached_property
    def analysis(self) -> Analysis:
        """Layers and shardings, found on first use."""
        return analyse(self.problem, self.trace, self.coupling)

    @cached_property
    def coupling(self) -> str:
        """What couples samples of a batch in the loss; empty where nothing does."""
        return couples_samples(self.trace)

    @property
    def coupled(self) -> bool:
        """Whether the loss couples samples of a batch."""
        return bool(self.coupling)

    def plan(
        self,
        targets: Iterable[Allocation | GridShape],
        *,
        constraints: Constraints | None = None,
        num_microbatches: int | None = None,
    ) -> PlanIndex:
        """As :func:`~arena_jax.compiler.search.plan_problem`; ``num_programs_solved`` counts what was searched now.

        An interrupted search keeps what it finished, and raises ``SearchInterrupted``.
        """
        started = time.perf_counter()
        constraints = constraints or Constraints()
        check_pins(self.problem, constraints, num_microbatches)
        grids = grids_of_targets(targets, constraints)
        # Where one number of microbatches serves all grids, no grid can be planned without the others.
        with quick_tracing():
            together = num_microbatches is None and self.coupled
            known: dict[GridShape, IndexRow] = {}
            if self._store is not None:
                for group in [grids] if together else _by_type(grids):
                    key = self._key(group, constraints, num_microbatches)
                    known |= {row.grid: row for row in self._store.index(key) if row.grid in group}
        missing = [grid for grid in grids if grid not in known]
        found: PlanIndex | None = None
        interrupted = False
        if missing:
            try:
                found = plan_problem(
                    self.problem,
                    grids if together else missing,
                    constraints=constraints,
                    num_microbatches=num_microbatches,
                    catalogue=self._catalogue,
                    analysis=self.analysis,
                )
            except SearchInterrupted as stopped:
                found, interrupted = stopped.index, True
            known |= {row.grid: row for row in found}
            if not together:
                groups = _by_type([row.grid for row in found])
            else:  # rows that share a number of microbatches mean nothing without the others
                groups = [] if interrupted else [grids]
            for group in groups:
                self._keep(self._key(group, constraints, num_microbatches), [known[grid] for grid in group])
        index = PlanIndex(
            [known[grid] for grid in grids if grid in known],
            key=self._key(grids, constraints, num_microbatches),
            search_s=time.perf_counter() - started,
            num_programs_solved=0 if found is None else found.num_programs_solved,
            lower_bounds_s=None if found is None else found.lower_bounds_s,
        )
        if interrupted:
            raise SearchInterrupted(index)
        return index

    def _keep(self, key: JobKey, rows: Sequence[IndexRow]) -> None:
        """Store rows; a store that cannot be written costs the next call time, and this one nothing."""
        if self._store is None:
            return
        try:
            self._store.put(key, rows)
        except ArenaError as error:
            warnings.warn(f"plans are not kept: {error.message}", stacklevel=3)

    def _key(self, grids: Sequence[GridShape], constraints: Constraints, num_microbatches: int | None) -> JobKey:
        return job_key(
            self.problem,
            self.trace,
            grids,
            constraints=constraints,
            num_microbatches=num_microbatches,
            coupled=num_microbatches is None and self.coupled,
            catalogue=self._catalogue,
            name=self._name,
        )


def _by_type(grids: Sequence[GridShape]) -> list[list[GridShape]]:
    """Rows of one device type share a key, so that another type's new facts leave them alone."""
    groups: dict[str, list[GridShape]] = {}
    for grid in grids:
        groups.setdefault(grid.allocation.device_type, []).append(grid)
    return list(groups.values())
