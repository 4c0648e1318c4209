"""A run that changes its plan at random steps, against one that does not. Shared by tests and ``make verify``."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from arena_jax.data import as_loader
from arena_jax.grid import GridShape, Request, StepReport
from arena_jax.runtime import compile_program
from arena_jax.runtime.contract import Compiled, LoopOptions, Outcome
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.program import Program
from arena_jax.runtime.trainer import Trainer
from tests.same_numbers.cases import GRIDS, SMALL, Case, layouts
from tests.same_numbers.run import make_plan, perturbed_tree, setup

NUM_STEPS = 24
NUM_SWAPS = 10


class Recorder:
    """A loader that keeps the numbers of the batches it gave out."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._inner = as_loader(list(batches))
        self.given: list[int] = []

    def __next__(self) -> Any:
        self.given.append(len(self.given))
        return next(self._inner)

    def get_state(self) -> Any:
        return self._inner.get_state()

    def set_state(self, state: Any) -> None:
        self._inner.set_state(state)


class AtSteps:
    """A hook that asks for a grid at each of some steps, and stands still for it."""

    def __init__(self, wanted: Mapping[int, GridShape]) -> None:
        self._wanted = dict(wanted)

    def poll(self, step: int) -> Request | None:
        grid = self._wanted.pop(step, None)
        return None if grid is None else Request(target=grid, wait=True, reason=f"step {step}")

    def report(self, report: StepReport) -> None:
        assert not report.errors, report.errors

    def prepare(self) -> list[GridShape]:
        return []


def train_through(
    first: Program,
    state: Any,
    make: Callable[[GridShape], Program],
    wanted: Mapping[int, GridShape],
    batches: Sequence[Any],
    *,
    num_steps: int,
) -> tuple[Outcome, list[int]]:
    """Train with the real loop through changes of plan; the outcome, and the numbers of the batches drawn."""
    loader = Recorder(batches)
    trainer = Trainer(
        compiled=Compiled(program=first),
        feed=Feed(loader),
        options=LoopOptions(num_steps=num_steps, items_per_step=1),
        journal=Journal(),
        describe=lambda *_: None,  # type: ignore[arg-type, return-value]
        hook=AtSteps(wanted),
        recompile=lambda target, devices: Compiled(program=make(target)),  # type: ignore[arg-type]
    )
    return trainer.run(state), loader.given


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of one run.

    Attributes:
        losses: largest relative difference of a loss from the unswapped run.
        swaps: the grids run through.
        exact: whether each move was bit for bit.
        restored: largest relative difference of the three losses after a swap from those of a run
            restored from the same state.
    """

    losses: float
    swaps: tuple[str, ...]
    exact: bool
    restored: float


def random_cases(model: str, precision: str, seed: int) -> tuple[list[Case], list[int]]:
    """One plan more than there are swaps, each on another grid, and the steps of the swaps."""
    rng = random.Random(f"{model} {precision} {seed}")
    variation = "" if model == "wide_resnet" else "dropout"  # the ResNet has running statistics instead
    by_grid: dict[str, list[Case]] = {}
    for grid in GRIDS:
        for stages in layouts(grid):
            case = Case(model=model, grid=grid, stages=stages, variation=variation, precision=precision)
            by_grid.setdefault(f"{grid}/s{len(stages)}", []).append(case)
    grids = rng.sample(sorted(by_grid), NUM_SWAPS + 1)
    return [rng.choice(by_grid[grid]) for grid in grids], sorted(rng.sample(range(1, NUM_STEPS), NUM_SWAPS))


def check(model: str, precision: str, seed: int) -> Checked:
    """Swap a tiny recipe through ten random grids at random steps."""
    cases, steps = random_cases(model, precision, seed)
    s = setup(model, cases[0].variation, precision)
    tree = perturbed_tree(model, cases[0].variation, precision)
    plans = {plan.grid: plan for plan in map(make_plan, cases)}
    first_plan, *later = plans.values()
    programs: dict[GridShape, Program] = {}
    exact: list[bool] = []
    restored: list[float] = []

    def make(grid: GridShape) -> Program:
        if grid not in programs:
            programs[grid] = Watched(compile_program(s.problem, plans[grid]), exact, restored, s.batches)
        return programs[grid]

    first = make(first_plan.grid)
    wanted = {step: plan.grid for step, plan in zip(steps, later, strict=True)}
    outcome, given = train_through(first, first.load_tree(tree), make, wanted, s.batches, num_steps=NUM_STEPS)
    assert given == list(range(NUM_STEPS)), "each sample once, in order"
    assert [r.step for r in outcome.history] == list(range(1, NUM_STEPS + 1))
    assert [(swap.step, swap.target) for swap in outcome.swaps] == sorted(wanted.items())
    state, expected = first.load_tree(tree), []
    for i in range(NUM_STEPS):
        state, metrics = first.step(state, s.batches[i % len(s.batches)])
        expected.append(float(metrics["loss"]))
    errors = [abs(r.loss - e) / max(abs(e), 1e-30) for r, e in zip(outcome.history, expected, strict=True)]
    return Checked(
        losses=max(errors),
        swaps=tuple(str(swap.target) for swap in outcome.swaps),
        exact=all(exact) and len(exact) == NUM_SWAPS,
        restored=max(restored),
    )


class Watched:
    """A program that compares every move to it with a restore from the same state."""

    def __init__(self, inner: Program, exact: list[bool], restored: list[float], batches: Sequence[Any]) -> None:
        self._inner = inner
        self._exact, self._restored, self._batches = exact, restored, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan_move(self, other: Any) -> Any:
        return self._inner.plan_move(other._inner)

    def take_from(self, state: Any, other: Any) -> Any:
        before = {name: np.array(leaf) for name, leaf in other.save_tree(state).items()}
        moved_state, moved = self._inner.take_from(state, other._inner)
        after = {name: np.array(leaf) for name, leaf in self.save_tree(moved_state).items()}
        self._exact.append(
            before.keys() == after.keys() and all(np.array_equal(before[n], after[n], equal_nan=True) for n in before)
        )
        # The moved arrays themselves train on, in copies, for three steps, beside a restored state.
        mine, restored = self._inner.reshard_from(moved_state, self._inner), self.load_tree(before)
        for batch in self._batches[:3]:
            mine, one = self._inner.step(mine, batch)
            restored, two = self._inner.step(restored, batch)
            self._restored.append(abs(float(one["loss"]) - float(two["loss"])) / max(abs(float(two["loss"])), 1e-30))
        jax.block_until_ready(moved_state.arrays)
        return moved_state, moved


MODELS = tuple(SMALL)
