"""What a worker adds to a training: the pace of a virtual device type, and an experiment per queue."""

import importlib
from types import SimpleNamespace

import pytest

from arena_jax import worker
from arena_jax.recipe import load_recipe
from arena_jax.worker import Pace, experiment_of


class Time:
    """A clock that passes when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Time()
    monkeypatch.setattr(worker, "time", clock)
    return clock


def test_steps_take_at_least_the_nominal_time_of_their_devices(clock):
    pace = Pace({4: 0.5, 2: 1.0})
    pace({"kind": "plan", "grid": "cpu:4/s1"})
    for work_s in (0.1, 0.2, 0.7, 0.1):  # the third is slower than nominal: nothing is waited for, or caught up
        clock.now += work_s
        pace({"kind": "step"})
    assert clock.slept == [0.4, 0.3, 0.4]
    clock.now += 3.0
    pace({"kind": "eval"})  # not a step: its time is its own
    pace({"kind": "plan", "grid": "cpu:2/s2"})
    clock.now += 0.25
    pace({"kind": "step"})
    assert clock.slept[-1] == 0.75
    pace({"kind": "plan", "grid": "cpu:8/s1"})  # no nominal speed
    pace({"kind": "step"})
    assert len(clock.slept) == 4


def test_an_experiment_per_queue_unless_the_recipe_names_one():
    assert experiment_of("arena-jax", {"queue": "night"}) == "arena-jax night"
    assert experiment_of("mine", {"queue": "night"}) == "mine"


def test_the_pace_hears_each_event_once(monkeypatch, tmp_path):
    fit_module = importlib.import_module("arena_jax.fit")  # first: it takes `run_training` by name
    training_module = importlib.import_module("arena_jax.training")
    from arena_jax.cli.train import train_job
    from arena_jax.grid import GridShape
    from arena_jax.job import build
    from arena_jax.runtime.signals import StopSignals

    heard = []

    def stop(training):
        heard.extend(training.callbacks)
        raise InterruptedError

    monkeypatch.setattr(training_module, "run_training", stop)
    monkeypatch.setattr(fit_module, "model_leaves", lambda problem: ())
    small = ["model.num_layers=1", "model.hidden=16", "model.num_heads=2", "tracking.enabled=false"]
    job, pace = build(load_recipe("gpt_tiny", small)), Pace({})
    run, planner = SimpleNamespace(path=tmp_path, resume_step=None, run_id="r"), SimpleNamespace(problem=None)
    with pytest.raises(InterruptedError):
        train_job(job, planner, GridShape.parse("cpu:1/s1"), None, run, 1, StopSignals(), None, None, callbacks=(pace,))
    assert heard.count(pace) == 1


def test_a_training_that_made_all_its_steps_is_not_made_again(monkeypatch, tmp_path, capsys):
    def run(recipe, *rest, **more):
        raise InterruptedError

    monkeypatch.setattr(importlib.import_module("arena_jax.cli.train"), "train", run)
    monkeypatch.setattr(importlib.import_module("arena_jax.cli.train"), "start_jax", lambda number: None)
    (tmp_path / "recipe.yaml").write_text(load_recipe("gpt_tiny", ["steps=40"]).to_yaml())
    task = {"kind": "recipe", "recipe": str(tmp_path / "recipe.yaml"), "folder": str(tmp_path / "train")}
    task |= {"grid": "cpu:2/s1", "most_devices": 2, "pace_s": {}, "queue": "default"}
    checkpoints = tmp_path / "train/20260101-000000/checkpoints"
    (checkpoints / "35").mkdir(parents=True)
    (checkpoints.parent / "run.json").write_text("{}")
    with pytest.raises(InterruptedError):  # it goes on
        worker.train(task)
    (checkpoints / "40").mkdir()
    assert worker.train(task) == 0
    assert capsys.readouterr().out == "all 40 steps are made already\n"
