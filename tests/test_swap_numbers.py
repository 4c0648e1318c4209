"""A run that changes its plan sees every sample once, in order, and loses what an unchanged one loses."""

import random

import numpy as np
import pytest

from arena_jax.grid import GridShape
from tests.problems import tower_batch, tower_program
from tests.swap_numbers import MODELS, NUM_SWAPS, random_cases, train_through
from tests.test_move import PLANS

BATCHES = [tower_batch(seed) for seed in range(5)]
GRIDS = {"cpu:2/s1": "dp2", "cpu:4/s1": "tp2", "cpu:4/s4": "four"}


@pytest.mark.parametrize("seed", range(2))
def test_losses_do_not_show_the_swaps(seed: int) -> None:
    """Dropout, a counter, frozen and trained leaves, through dp, tp and four stages; float32, few steps."""
    programs = {GridShape.parse(grid): tower_program(*PLANS[name]) for grid, name in GRIDS.items()}
    rng, num_steps = random.Random(seed), 14
    grids = list(programs)
    wanted, last = {}, grids[0]
    for step in sorted(rng.sample(range(1, num_steps), 6)):
        last = rng.choice([g for g in grids if g != last])
        wanted[step] = last
    first = programs[grids[0]]
    outcome, given = train_through(first, first.init(0), programs.__getitem__, wanted, BATCHES, num_steps=num_steps)
    assert given == list(range(num_steps))
    assert [(s.step, s.target) for s in outcome.swaps] == list(wanted.items())
    state, expected = first.init(0), []
    for i in range(num_steps):
        state, metrics = first.step(state, BATCHES[i % len(BATCHES)])
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose([r.loss for r in outcome.history], expected, rtol=1e-4)


def test_the_long_check_draws_unlike_plans() -> None:
    for model in MODELS:
        cases, steps = random_cases(model, "float64", 0)
        assert len(set(steps)) == NUM_SWAPS
        assert len({f"{case.grid}/s{len(case.stages)}" for case in cases}) == NUM_SWAPS + 1
        assert {len(case.stages) for case in cases} >= {1, 2}
