"""The engines by name."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from arena_jax.compiler.engines import alpa, cuts, highs
from arena_jax.compiler.engines.alpa_process import alpa_process, installed
from arena_jax.compiler.engines.problem import StrategyProblem, StrategySolution
from arena_jax.compiler.engines.stages import StageProblem, StageSolution
from arena_jax.errors import UsageError, nearest
from arena_jax.solver_setup import ALPA_VERSION, alpa_folder

ENGINES = ("highs", "alpa", "both")

# Relative difference of two objectives that rounding explains: solvers' tolerances, and float32 sums.
_EQUAL = 1e-6


class Engine(Protocol):
    """Solves the two levels of the plan search."""

    @property
    def name(self) -> str: ...

    def solve_strategies(
        self, problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0
    ) -> StrategySolution | None:
        """One strategy per node; ``None`` when nothing fits."""
        ...

    def best_stages(self, problem: StageProblem) -> StageSolution | None:
        """The best cut into stages; ``None`` when nothing fits."""
        ...


class Highs:
    """Elimination, prices and HiGHS; our own dynamic program."""

    name = "highs"

    def solve_strategies(
        self, problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0
    ) -> StrategySolution | None:
        return highs.solve_strategies(problem, time_limit_s=time_limit_s, relative_gap=relative_gap)

    def best_stages(self, problem: StageProblem) -> StageSolution | None:
        return _named(self.name, cuts.best_stages(problem))


class Alpa:
    """Alpa's own ILP solve and dynamic program, in its process.

    Alpa cannot stop at a gap or early with its best so far: it goes on to the optimum, for ten minutes at most.
    """

    name = "alpa"

    def __init__(self) -> None:
        self._worker = alpa_process()
        # It imports while the caller still traces.
        self._worker.start()

    def solve_strategies(
        self, problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0
    ) -> StrategySolution | None:
        return alpa.solve_strategies(self._worker, problem)

    def best_stages(self, problem: StageProblem) -> StageSolution | None:
        return _named(self.name, alpa.best_stages(self._worker, problem))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One problem solved by both engines.

    Attributes:
        level: ``"strategies"`` or ``"stages"``.
        highs, alpa: objectives in seconds; infinite where the engine found nothing that fits.
        highs_gap: share of its objective that HiGHS had not proved when its time ran out.
        highs_solve_s, alpa_solve_s: wall time each took.
    """

    level: str
    highs: float
    alpa: float
    highs_gap: float
    highs_solve_s: float
    alpa_solve_s: float

    @property
    def relative_difference(self) -> float:
        """``|highs - alpa|`` as a share of the larger; 0 where both found nothing, infinite where one did."""
        if self.highs == self.alpa:
            return 0.0
        if math.isinf(self.highs) or math.isinf(self.alpa):
            return math.inf
        return abs(self.highs - self.alpa) / max(abs(self.highs), abs(self.alpa))

    @property
    def agree(self) -> bool:
        """Whether the objectives are equal up to the solvers' tolerances and the gap that was left."""
        return self.relative_difference <= _EQUAL + self.highs_gap


_Solution = TypeVar("_Solution", StrategySolution, StageSolution)


class Both:
    """Solves everything with both engines to optimality, keeps ``comparisons``, and answers with the better."""

    name = "both"

    def __init__(self) -> None:
        self._highs, self._alpa = Highs(), Alpa()
        self.comparisons: list[Comparison] = []

    def solve_strategies(
        self, problem: StrategyProblem, *, time_limit_s: float | None = None, relative_gap: float = 0.0
    ) -> StrategySolution | None:
        ours, theirs = self._compare(
            "strategies",
            lambda: self._highs.solve_strategies(problem, time_limit_s=time_limit_s),
            lambda: self._alpa.solve_strategies(problem),
        )
        return _better(ours, theirs)

    def best_stages(self, problem: StageProblem) -> StageSolution | None:
        ours, theirs = self._compare(
            "stages", lambda: self._highs.best_stages(problem), lambda: self._alpa.best_stages(problem)
        )
        better = _better(ours, theirs)
        if better is None:
            return None
        found = [solution.objectives for solution in (ours, theirs) if solution is not None]
        return replace(better, objectives={name: value for each in found for name, value in each.items()})

    def _compare(
        self, level: str, highs: Callable[[], _Solution | None], alpa: Callable[[], _Solution | None]
    ) -> tuple[_Solution | None, _Solution | None]:
        ours, ours_s = _timed(highs)
        theirs, theirs_s = _timed(alpa)
        self.comparisons.append(
            Comparison(
                level=level,
                highs=math.inf if ours is None else ours.objective,
                alpa=math.inf if theirs is None else theirs.objective,
                highs_gap=ours.gap if isinstance(ours, StrategySolution) else 0.0,
                highs_solve_s=ours_s,
                alpa_solve_s=theirs_s,
            )
        )
        return ours, theirs


def _better(ours: _Solution | None, theirs: _Solution | None) -> _Solution | None:
    if ours is None or (theirs is not None and theirs.objective < ours.objective):
        return theirs
    return ours


def _named(name: str, found: StageSolution | None) -> StageSolution | None:
    return None if found is None else replace(found, objectives={name: found.objective})


def _timed(solve: Callable[[], _Solution | None]) -> tuple[_Solution | None, float]:
    started = time.perf_counter()
    found = solve()
    return found, time.perf_counter() - started


def check_engine(name: str) -> None:
    """Say at once what :func:`engine` would say, without starting anything.

    Raises:
        UsageError: no such engine.
        ArenaError: alpa is asked for and not installed.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}{nearest(name, ENGINES)}", hint=f"use one of {', '.join(ENGINES)}")
    if name != "highs":
        installed()


def available_engine(name: str) -> str:
    """``highs`` for ``both`` where alpa is not installed, with a warning that says so; else ``name``."""
    if name != "both" or alpa_folder() is not None:
        return name
    hint = "arena-jax doctor --install-alpa"
    warnings.warn(f"alpa {ALPA_VERSION} is not installed: planned with highs alone ({hint})", stacklevel=2)
    return "highs"


def engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        UsageError: no such engine.
        ArenaError: alpa is asked for and not installed.
    """
    check_engine(name)
    kinds: dict[str, Callable[[], Engine]] = {"highs": Highs, "alpa": Alpa, "both": Both}
    return kinds[name]()
