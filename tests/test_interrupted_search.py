"""Ctrl-C in the middle of a search: what was found is kept, and how good it can be is said."""

import json
from pathlib import Path
from typing import Any

import optax
import pytest

from arena_jax.compiler import Problem, make_problem, plan_problem, search
from arena_jax.compiler.stored import StoredSearch
from arena_jax.grid import Allocation, GridShape, PlanStore, SearchInterrupted
from tests.doubles import Toy, ToyLoader, toy_loss

ON = [Allocation.parse("a100:4")]


@pytest.fixture
def problem() -> Problem:
    return make_problem(Toy, optax.adam(1e-2), toy_loss, next(ToyLoader()))


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    plan_grid, calls = search.plan_grid, iter(range(1, 10**9))

    def stopped(*arguments: Any) -> Any:
        if next(calls) == num_programs + 1:
            raise KeyboardInterrupt
        return plan_grid(*arguments)

    monkeypatch.setattr(search, "plan_grid", stopped)


def test_what_was_found_comes_with_the_interrupt(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_problem(problem, ON)
    per_grid = whole.num_programs_solved // len(whole)
    interrupt_after(monkeypatch, per_grid + 1)
    with pytest.raises(KeyboardInterrupt) as caught:  # as whoever calls this from Python expects
        plan_problem(problem, ON)
    assert isinstance(caught.value, SearchInterrupted)
    part = caught.value.index
    assert list(part) == list(whole)[:1]
    unfinished = [row for row in whole if row.grid not in {r.grid for r in part}]
    assert list(part.lower_bounds_s) == [row.grid for row in unfinished]
    for row in unfinished:
        assert row.step_time_s is None or part.lower_bounds_s[row.grid] <= row.step_time_s


def test_the_bound_is_one_device_s_work_shared_out(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = plan_problem(problem, [GridShape.parse("a100:1")], num_microbatches=1)
    assert alone.estimate is not None
    plan_grid = search.plan_grid
    calls = iter(range(2))

    def stopped(*arguments: Any) -> Any:  # once; the bounds are searched after that
        if next(calls, None) == 0:
            raise KeyboardInterrupt
        return plan_grid(*arguments)

    monkeypatch.setattr(search, "plan_grid", stopped)
    with pytest.raises(SearchInterrupted) as caught:
        plan_problem(problem, ON)
    bounds = caught.value.index.lower_bounds_s
    assert list(bounds) == [GridShape.parse(f"a100:4/s{n}") for n in range(1, 5)]
    assert list(bounds.values()) == [pytest.approx(alone.estimate.breakdown["compute_s"] / 4)] * 4


def test_finished_grids_are_kept(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PlanStore(tmp_path / "plans")
    whole = plan_problem(problem, ON)
    per_grid = whole.num_programs_solved // len(whole)
    with monkeypatch.context() as context:
        interrupt_after(context, per_grid + 1)
        with pytest.raises(SearchInterrupted):
            StoredSearch(problem, store).plan(ON)
    again = StoredSearch(problem, store).plan(ON)
    assert again.num_programs_solved == whole.num_programs_solved - per_grid
    assert list(again) == list(whole)


RECIPE = """
model: {name: gpt, vocabulary: 256, sequence_length: 16, hidden: 16, num_layers: 2, num_heads: 2}
data: {kind: text, files: [text.txt]}
global_batch: 8
steps: 2
"""


@pytest.mark.parametrize("finished", [0, 1])
def test_the_command_line_shows_the_best_so_far_and_its_gap(
    finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from arena_jax.cli import main

    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 1000)
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    interrupt_after(monkeypatch, finished)
    code = main(["plan", "tiny.yaml", "plan.num_microbatches=1", "--on", "a100:4", "--json"])
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert code == 130
    assert len(report["grids"]) == finished
    assert report["interrupted"] == {
        "unfinished": [f"a100-40:4/s{n}" for n in range(finished + 1, 5)],
        "gap": {"a100-40:4": pytest.approx(report["interrupted"]["gap"]["a100-40:4"])} if finished else {},
    }
    assert f"interrupted after {finished} of 4 grids" in captured.err
    if finished:
        gap = report["interrupted"]["gap"]["a100-40:4"]
        assert gap > 0
        assert f"a100-40:4/s1 takes at most {1 + gap:.2f} times as long as the best of a100-40:4" in captured.err
        assert any(line.startswith("*") for line in captured.out.splitlines())


def test_interrupted_while_comparing_the_grids_still_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from arena_jax.cli import main

    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 1000)
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    interrupt_after(monkeypatch, 2)
    arguments = ["plan.num_microbatches=1", "--on", "a100:2", "--compare", "dp,fsdp", "--json"]
    code = main(["plan", "tiny.yaml", *arguments])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 130
    assert [grid["grid"] for grid in report["grids"]] == ["a100-40:2/s1", "a100-40:2/s2"]
    assert report["interrupted"] == {"unfinished": [], "gap": {"a100-40:2": 0.0}}
