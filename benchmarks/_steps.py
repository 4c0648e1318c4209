"""Steps of every plan of a space, measured in turn and kept: several benchmarks compare with them.

What is kept lies under ``$ARENA_JAX_HOME``, one file for each recipe and allocation: the plans, the chosen
one first, with the estimate that ranked them and the seconds of every round. A plan once enumerated stays
in its file, so delete it after a change of the search or of the cost model.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from arena_jax.compiler import Problem, analyse
from arena_jax.grid import Allocation, Plan
from arena_jax.home import home
from arena_jax.runtime import Program, compile_program
from benchmarks._machine import describe
from benchmarks._plan_space import candidates, name_of, problem_of
from benchmarks._report import replace_text

STEPS_A_ROUND = 2


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """A plan of a space, with the seconds of its step: one number a round, none before it was measured."""

    plan: Plan
    estimate_s: float
    machine: str = ""
    steps_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.plan)

    @property
    def step_s(self) -> float:
        return float(np.median(self.steps_s))

    @property
    def spread(self) -> float:
        """Half the range of the rounds, as a share of their median."""
        return (max(self.steps_s) - min(self.steps_s)) / 2 / self.step_s


def _path(recipe: str, spec: str) -> Path:
    return home() / "measured_steps" / f"{recipe}-{spec.replace(':', '-')}.json"


def kept(recipe: str, spec: str) -> list[MeasuredPlan]:
    """The plans of an allocation as they were left, the chosen one first; empty before they were enumerated."""
    path = _path(recipe, spec)
    rows = json.loads(path.read_text()) if path.exists() else []
    return [
        MeasuredPlan(**row | {"plan": Plan.from_json(row["plan"]), "steps_s": tuple(row["steps_s"])}) for row in rows
    ]


def keep(recipe: str, spec: str, plans: Sequence[MeasuredPlan]) -> None:
    rows = [
        {"plan": p.plan.to_json(), "estimate_s": p.estimate_s, "machine": p.machine, "steps_s": p.steps_s}
        for p in plans
    ]
    path = _path(recipe, spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(rows))


def enumerated(recipe: str, spec: str, problem: Problem) -> list[MeasuredPlan]:
    """All plans of an allocation, the chosen one first."""
    found = candidates(analyse(problem), Allocation.parse(spec))
    return [MeasuredPlan(plan=plan, estimate_s=seconds) for plan, seconds in found]


@dataclass
class _Running:
    program: Program
    state: Any


def _step_s(one: _Running, batch: Any, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        one.state, metrics = one.program.step(one.state, batch)
        jax.block_until_ready(metrics)
    jax.block_until_ready(one.state.stages)
    return (time.perf_counter() - began) / steps


class Turns:
    """All plans of an allocation, compiled; what their steps take is kept after every round.

    A round that another machine measured is not counted.
    """

    def __init__(self, recipe: str, spec: str) -> None:
        self.recipe, self.spec = recipe, spec
        self.problem, self._batch = problem_of(recipe)
        self.plans = kept(recipe, spec) or enumerated(recipe, spec, self.problem)
        keep(recipe, spec, self.plans)
        self._running: list[_Running] = []

    @property
    def rounds(self) -> int:
        """Rounds that are known of this machine."""
        return min(len(p.steps_s) if p.machine == describe() else 0 for p in self.plans)

    def compile(self) -> None:
        """Make every plan ready, with the state of a training that has done a step."""
        if self._running:
            return
        for p in self.plans:
            program = compile_program(self.problem, p.plan)
            self._running.append(_Running(program, program.init()))
        for one in self._running:
            _step_s(one, self._batch, 1)

    def until(self, rounds: int) -> None:
        """Measure what is missing to so many rounds on this machine."""
        for known in range(self.rounds, rounds):
            self.compile()
            now = [_step_s(one, self._batch, STEPS_A_ROUND) for one in self._running]
            self.plans = [
                replace(p, steps_s=(*p.steps_s[:known], s), machine=describe())
                for p, s in zip(self.plans, now, strict=True)
            ]
            keep(self.recipe, self.spec, self.plans)


def measure(recipe: str, spec: str, rounds: int) -> list[MeasuredPlan]:
    """The plans of an allocation, measured in at least so many rounds on this machine, now if not before."""
    turns = Turns(recipe, spec)
    turns.until(rounds)
    print(f"{recipe} on {spec}: {len(turns.plans)} plans, {rounds} rounds", flush=True)
    return turns.plans
