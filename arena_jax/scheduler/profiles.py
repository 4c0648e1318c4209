"""How fast a job runs where: the read-only view a scheduler has of plan indexes and tables.

A profile answers two questions, which allocations are known and how long a step takes on one
(``None``: infeasible). Everything a policy sees of a job's plans comes through it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from arena_jax.errors import UsageError, nearest
from arena_jax.grid import Allocation, PlanIndex


class Profile(Protocol):
    """Step times of one job by allocation."""

    def allocations(self) -> Iterable[Allocation]:
        """The allocations that have a feasible plan."""

    def step_time_s(self, allocation: Allocation) -> float | None:
        """Seconds of a step, ``None`` where no plan fits or none was made."""


class ProfileSource(Protocol):
    """Profiles by (model, global batch)."""

    def profile(self, model: str, global_batch: int | None) -> Profile:
        """Raise :class:`UsageError` for an unknown model or batch."""

    def pairs(self) -> Iterable[tuple[str, int | None]]:
        """All (model, global batch) pairs with a profile."""


@dataclass(frozen=True)
class TableProfile:
    """Measured or given step times."""

    times_s: Mapping[Allocation, float]

    def allocations(self) -> Iterable[Allocation]:
        return self.times_s.keys()

    def step_time_s(self, allocation: Allocation) -> float | None:
        return self.times_s.get(allocation)


@dataclass(frozen=True)
class IndexProfile:
    """The rows of a :class:`PlanIndex`; a measured step time beats its estimate."""

    index: PlanIndex

    def allocations(self) -> Iterable[Allocation]:
        return {row.grid.allocation for row in self.index if row.feasible}

    def step_time_s(self, allocation: Allocation) -> float | None:
        row = self.index.best(allocation)
        return None if row is None else row.step_time_s


@dataclass(frozen=True)
class LayeredProfile:
    """Several profiles of one job: the first that knows an allocation answers for it."""

    layers: tuple[Profile, ...]

    def allocations(self) -> Iterable[Allocation]:
        return {a for layer in self.layers for a in layer.allocations()}

    def step_time_s(self, allocation: Allocation) -> float | None:
        times = (layer.step_time_s(allocation) for layer in self.layers)
        return next((time for time in times if time is not None), None)


class ProfileSet:
    """A mapping of (model, global batch) to profiles.

    A batch of ``None`` in the key answers for every batch of its model that has no entry.
    """

    def __init__(self, profiles: Mapping[tuple[str, int | None], Profile]) -> None:
        self._profiles = dict(profiles)

    def pairs(self) -> Iterable[tuple[str, int | None]]:
        return self._profiles.keys()

    def profile(self, model: str, global_batch: int | None) -> Profile:
        found = self._profiles.get((model, global_batch)) or self._profiles.get((model, None))
        if found is None:
            known = {name for name, _ in self._profiles}
            if model in known:
                batches = sorted(str(batch) for name, batch in self._profiles if name == model)
                raise UsageError(
                    f"no profile of {model!r} at batch {global_batch}", hint=f"batches: {', '.join(batches)}"
                )
            raise UsageError(f"no profile of model {model!r}{nearest(model, known)}")
        return found

    def over(self, other: "ProfileSet") -> "ProfileSet":
        """This set first and ``other`` for allocations and jobs it lacks."""
        merged = {**other._profiles, **self._profiles}
        for key in self._profiles.keys() & other._profiles.keys():
            merged[key] = LayeredProfile((self._profiles[key], other._profiles[key]))
        return ProfileSet(merged)
