"""What runs teach: few factors, near 1 until there is reason, and only of what was measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.grid import Profile, ProfileStore
from arena_jax.grid.feedback import Run, learn

RUN = Profile(
    device_type="cpu",
    kind="run",
    piece={"plan": "a", "grid": "cpu:2/s1"},
    environment={"estimate": "measured"},
    seconds=1.2,
    computed_s=1.0,
    parts={"compute_s": 1.0},
)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_runs_of_one_part_teach_n_in_n_plus_one(count: int) -> None:
    # With share a = 1/1.2 of the measured step: d = n a (1 - a) / (n a^2 + 1), by hand from the normal equation.
    a = 1 / 1.2
    expected = 1 + count * a * (1 - a) / (count * a * a + 1)
    assert learn([Run({"compute_s": 1.0}, 1.2)] * count)["compute_s"] == pytest.approx(expected, abs=0.0101)


def test_the_part_that_errs_is_found() -> None:
    # Communication takes twice what is estimated; its share differs between runs.
    runs = [Run({"compute_s": 1.0, "communication_s": c}, 1.0 + 2 * c) for c in (0.05, 0.3, 0.6, 0.9)] * 100
    found = learn(runs)
    assert found["communication_s"] == pytest.approx(2.0, abs=0.2)
    assert found.get("compute_s", 1.0) == pytest.approx(1.0, abs=0.05)


def test_what_is_far_off_or_tiny_teaches_nothing() -> None:
    assert learn([]) == {}
    assert learn([Run({"compute_s": 1.0}, 5.0)]) == {}
    assert "boundary_s" not in learn([Run({"compute_s": 1.0, "boundary_s": 1e-3}, 1.2)])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0.01, 100)), max_size=8))
def test_factors_are_finite_and_bounded(rows: list) -> None:
    found = learn([Run({"compute_s": a, "boundary_s": b}, m) for a, b, m in rows])
    assert all(np.isfinite(b) and 0.5 <= b <= 2 for b in found.values())


def test_the_store_keeps_one_record_a_plan_and_changes_plans_only_when_it_learns(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    empty = store.generation("cpu")
    store.put([replace(RUN, seconds=1.01)])  # as estimated
    assert (store.bias("cpu"), store.generation("cpu")) == ({}, empty)
    store.put([RUN, replace(RUN, piece={"plan": "b"})])
    learnt = store.bias("cpu")
    assert learnt["measured"]["compute_s"] == pytest.approx(1.12, abs=0.03)
    assert store.generation("cpu") != empty
    assert store.corrections("cpu") == {}
    assert len(store.profiles("cpu")) == 2
    assert store.bias("a10") == {}
