"""Tracking: every event arrives exactly once, whatever the tracker or the process does meanwhile."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from arena_jax.cli.app import main
from arena_jax.errors import ArenaError
from arena_jax.events import EventLog, read_events
from arena_jax.tracking import STATE_FILE_NAME, MLflowTracker, Sink, stored_state, sync
from arena_jax.tracking.mlflow import end_status, metrics_of

PLAN = {"format_version": 1, "grid": "cpu:4/s2"}


class Recorder:
    """A tracker that keeps what it took, and fails on demand before or after taking it."""

    def __init__(self):
        self.state = {}
        self.opened, self.taken = [], []
        self.fail_before = self.fail_after = False
        self.arrived = threading.Event()

    def open(self, run_start):
        if self.fail_before:
            raise ConnectionError("server is down")
        self.opened.append(run_start["run_id"])

    def write(self, events):
        if self.fail_before:
            raise ConnectionError("server is down")
        self.taken += [event.get("step") for event in events if event["kind"] == "step"]
        self.state = {"seen": len(self.taken)}
        self.arrived.set()
        if self.fail_after:
            raise ConnectionError("answer lost")

    def close(self):
        pass


def emit_run(log, *, steps=range(5), run_id="r1", end="completed"):
    log.emit(
        "run_start",
        run_id=run_id,
        name="gpt_tiny",
        recipe="name: gpt_tiny\n",
        params={"global_batch": 16, "model": {"num_layers": 2}, "lr": 1e-3},
        command="arena-jax train gpt_tiny",
        versions={"jax": "0.10.2"},
        host={"cores": 2},
    )
    rows = [
        {"grid": "cpu:4/s1", "step_time_s": 0.2, "memory_bytes": 10, "feasible": True, "chosen": False},
        {"grid": "cpu:4/s2", "step_time_s": 0.1, "memory_bytes": 10, "feasible": True, "chosen": True},
        {"grid": "cpu:4/s4", "step_time_s": None, "memory_bytes": None, "feasible": False, "reason": "2 layers"},
    ]
    log.emit("candidates", rows=rows)
    log.emit("plan", step=0, plan_id="abc", grid="cpu:4/s2", plan=PLAN, engine="highs", reason="start")
    for step in steps:
        log.emit(
            "step",
            step=step,
            loss=5.0 - step,
            metrics={"accuracy": step / 10},
            step_time_s=0.1,
            rate=100.0,
            rate_unit="tokens",
            estimated_step_time_s=0.05,
        )
    if end:
        log.emit("eval", step=5, metrics={"loss": 2.0})
        log.emit("run_end", step=5, stop_reason=end, message="")


def test_sink_delivers_everything_by_close(tmp_path):
    recorder = Recorder()
    with EventLog(tmp_path / "events.jsonl") as log:
        sink = Sink(recorder, log)
        emit_run(log)
        assert sink.close()
    assert recorder.opened == ["r1"]
    assert recorder.taken == [0, 1, 2, 3, 4]
    stored = json.loads((tmp_path / STATE_FILE_NAME).read_text())
    assert stored == {"offset": log.path.stat().st_size, "tracker": {"seen": 5}}


def test_dead_tracker_warns_once_and_sync_replays_the_rest(tmp_path):
    recorder, warnings = Recorder(), []
    recorder.fail_before = True
    with EventLog(tmp_path / "events.jsonl") as log:
        sink = Sink(recorder, log, on_warning=warnings.append)
        emit_run(log)
        assert not sink.close()
    assert [w for w in warnings if "server is down" in w] == warnings[:1]
    assert "arena-jax track sync" in warnings[-1]
    recorder.fail_before = False
    assert sync(tmp_path, recorder) == 10
    assert sync(tmp_path, recorder) == 0
    assert recorder.taken == [0, 1, 2, 3, 4]


def test_outage_in_the_middle(tmp_path):
    recorder = Recorder()
    with EventLog(tmp_path / "events.jsonl") as log:
        sink = Sink(recorder, log, on_warning=lambda _: None)
        emit_run(log, steps=range(3), end="")
        assert recorder.arrived.wait(30)
        sink.close()
        recorder.fail_before = True
        sink = Sink(recorder, log, on_warning=lambda _: None)
        emit_run(log, steps=range(3, 6), run_id="r1")
        sink.close()
    recorder.fail_before = False
    fresh = Recorder()
    sync(tmp_path, fresh)
    assert fresh.state == {"seen": 3}
    assert recorder.taken + fresh.taken == [0, 1, 2, 3, 4, 5]


def test_taking_up_a_log_in_the_middle_opens_its_run_first(tmp_path):
    first = Recorder()
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log, steps=range(2), run_id="old")
        emit_run(log, steps=range(2), run_id="new", end="")
        sync(tmp_path, first)
        log.emit("step", step=2)
    second = Recorder()
    assert sync(tmp_path, second) == 1
    assert first.opened == ["old", "new"]
    assert second.opened == ["new"]
    assert second.taken == [2]


def test_only_one_process_sends(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        recorder = Recorder()
        sink = Sink(recorder, log)
        emit_run(log)
        assert recorder.arrived.wait(30)
        with pytest.raises(ArenaError, match="by another process"):
            sync(tmp_path, Recorder())
        sink.close()


def test_damaged_position_starts_over(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log)
    (tmp_path / STATE_FILE_NAME).write_text('{"offset": "far"')
    recorder = Recorder()
    assert sync(tmp_path, recorder) == 10


def test_sync_without_a_log_names_what_is_wanted(tmp_path):
    with pytest.raises(ArenaError, match=r"no event log"):
        sync(tmp_path, Recorder())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One SQLite store for the module: opening the first one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def fluent(store):
    """mlflow's own global state, pointing at the store for one test."""
    import mlflow

    mlflow.set_tracking_uri(store)
    yield mlflow
    mlflow.set_tracking_uri(None)


def runs_of(store, experiment):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store)
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return client, parents, [run for run in runs if "mlflow.parentRunId" in run.data.tags]


def test_mlflow_holds_the_run(tmp_path, store, fluent):
    tracker = MLflowTracker(store, experiment="whole")
    with EventLog(tmp_path / "events.jsonl") as log:
        sink = Sink(tracker, log)
        emit_run(log)
        assert sink.close(120)
    client, (parent,), (segment,) = runs_of(store, "whole")
    assert parent.data.params == {"global_batch": "16", "model.num_layers": "2", "lr": "0.001"}
    assert parent.info.status == segment.info.status == "FINISHED"
    assert segment.data.tags["mlflow.parentRunId"] == parent.info.run_id
    for run in (parent, segment):
        assert {run.data.tags[f"arena.{key}"] for key in ("plan_id", "grid", "engine")} == {"abc", "cpu:4/s2", "highs"}
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(m.step, m.value) for m in history] == [(step, 5.0 - step) for step in range(5)]
    assert parent.data.metrics["tokens_per_s"] == 100
    assert parent.data.metrics["estimated_step_time_s"] == 0.05
    assert parent.data.metrics["eval_loss"] == 2
    table = client.load_table(parent.info.experiment_id, "candidates.json", [parent.info.run_id])
    assert list(table["grid"]) == ["cpu:4/s1", "cpu:4/s2", "cpu:4/s4"]
    assert table["reason"][2] == "2 layers"
    artifacts = {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"recipe.yaml", "candidates.json", "plans"}
    assert tracker.how_to_open().endswith(f"mlflow ui --backend-store-uri {store}")


def test_mlflow_has_a_run_per_plan_with_what_the_change_cost(tmp_path, store):
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log, end="")
        log.emit(
            "swap",
            **{"step": 5, "from": "cpu:4/s2", "to": "cpu:2/s1", "reason": "night", "background_s": 7.5},
            stall_s=0.25,
            prepared=False,
            move_s=0.125,
            moved_bytes=64,
            difference="stages 2 -> 1",
        )
        log.emit("plan", step=5, plan_id="def", grid="cpu:2/s1", plan=PLAN, engine="highs", reason="swap")
        log.emit("step", step=6, loss=0.5, step_time_s=0.1)
        log.emit("run_end", step=6, stop_reason="done", message="")
    sync(tmp_path, MLflowTracker(store, experiment="swapped"))
    _, (parent,), segments = runs_of(store, "swapped")
    by_grid = {run.data.tags["arena.grid"]: run for run in segments}
    before, after = by_grid["cpu:4/s2"], by_grid["cpu:2/s1"]
    told = {k.removeprefix("arena.swap."): v for k, v in after.data.tags.items() if k.startswith("arena.swap.")}
    assert told == {
        "from": "cpu:4/s2",
        "to": "cpu:2/s1",
        "reason": "night",
        "background_s": "7.5",
        "stall_s": "0.25",
        "prepared": "false",
        "difference": "stages 2 -> 1",
    }
    assert not any(key.startswith("arena.swap.") for key in before.data.tags)
    assert parent.data.metrics["swap_stall_s"] == 0.25
    assert parent.data.metrics["swap_background_s"] == 7.5
    assert parent.data.metrics["swap_moved_bytes"] == 64
    assert after.data.metrics["loss"] == 0.5


def test_mlflow_leaves_stdout_alone(tmp_path, store, capfd):
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log)
    sync(tmp_path, MLflowTracker(store, experiment="quiet"))
    assert capfd.readouterr().out == ""


def test_mlflow_sees_every_event_once_though_calls_are_repeated(tmp_path, store):
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log)
    tracker = MLflowTracker(store, experiment="twice")
    sync(tmp_path, tracker)
    (tmp_path / STATE_FILE_NAME).unlink()  # as if the process died before it could note anything
    sync(tmp_path, MLflowTracker(store, experiment="twice"))
    client, (parent,), (segment,) = runs_of(store, "twice")
    for run in (parent, segment):
        assert len(client.get_metric_history(run.info.run_id, "loss")) == 5
    tables = json.loads(parent.data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": "candidates.json", "type": "table"}]


def test_mlflow_run_goes_on_after_resume_with_a_changed_param(tmp_path, store):
    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log, steps=range(3), end="interrupted")
        sync(tmp_path, MLflowTracker(store, experiment="resumed"))
        log.emit("run_start", run_id="r1", name="gpt_tiny", params={"global_batch": 16, "steps": 9, "lr": 5e-4})
        log.emit("plan", step=3, plan_id="def", grid="cpu:2/s1", plan=PLAN, engine="highs", reason="resume")
        log.emit("step", step=3, loss=float("nan"))
        log.emit("run_end", step=3, stop_reason="failed", message="loss became NaN at step 3")
    sync(tmp_path, MLflowTracker(store, experiment="resumed"))
    client, (parent,), segments = runs_of(store, "resumed")
    assert parent.info.status == "FAILED"
    assert parent.data.tags["arena.changed.lr"] == "0.0005"
    assert (parent.data.params["lr"], parent.data.params["steps"]) == ("0.001", "9")
    assert {run.data.tags["arena.grid"]: run.info.status for run in segments} == {
        "cpu:4/s2": "KILLED",
        "cpu:2/s1": "FAILED",
    }
    assert [m.step for m in client.get_metric_history(parent.info.run_id, "loss")] == [0, 1, 2, 3]


def test_mlflow_joins_the_active_run_and_leaves_it_open(tmp_path, store, fluent):
    fluent.set_experiment("joined")
    with fluent.start_run() as outer:
        tracker = MLflowTracker()
        with EventLog(tmp_path / "events.jsonl") as log:
            emit_run(log)
        sync(tmp_path, tracker)
        assert tracker.connect().get_run(outer.info.run_id).info.status == "RUNNING"
    _, (parent,), (segment,) = runs_of(store, "joined")
    assert parent.info.run_id == outer.info.run_id
    assert parent.data.metrics["loss"] == 1
    assert segment.data.tags["mlflow.parentRunId"] == outer.info.run_id


def test_sync_leaves_a_joined_run_to_its_owner(tmp_path, store, fluent):
    fluent.set_experiment("left")
    with fluent.start_run() as outer, EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log, end="")
        sync(tmp_path, MLflowTracker())
        log.emit("run_end", step=5, stop_reason="failed", message="")
    sync(tmp_path, MLflowTracker(store))
    _client, (parent,), _ = runs_of(store, "left")
    assert parent.info.run_id == outer.info.run_id
    assert parent.info.status == "FINISHED"


def test_track_sync_gives_another_store_the_whole_run(tmp_path, store):
    from arena_jax.cli import main

    with EventLog(tmp_path / "events.jsonl") as log:
        emit_run(log, steps=range(3), end="")
        sync(tmp_path, MLflowTracker(store, experiment="moved"))
        log.emit("step", step=3, loss=1.0)
    other = f"sqlite:///{tmp_path}/other.db"
    assert main(["track", "sync", str(tmp_path), "--uri", other]) == 0
    client, (parent,), _ = runs_of(other, "moved")
    assert len(client.get_metric_history(parent.info.run_id, "loss")) == 4


def test_dead_server_neither_stops_the_run_nor_loses_events(tmp_path, store):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    warnings = []
    with EventLog(tmp_path / "events.jsonl") as log:
        sink = Sink(MLflowTracker(uri, experiment="dead"), log, on_warning=warnings.append)
        emit_run(log)
        assert not sink.close(60)
    assert len([w for w in warnings if w.startswith("tracking failed")]) == 1
    assert len([e for e in read_events(tmp_path) if e["kind"] == "step"]) == 5
    assert stored_state(tmp_path) == {"uri": uri, "experiment": "dead"}
    assert sync(tmp_path, MLflowTracker(store, experiment="dead"), from_start=True) == 10
    client, (parent,), _ = runs_of(store, "dead")
    assert len(client.get_metric_history(parent.info.run_id, "loss")) == 5


def test_mlflow_is_not_imported_before_a_run_is_opened(tmp_path):
    code = (
        "import sys, arena_jax.tracking as t; t.MLflowTracker(); assert 'mlflow' not in sys.modules;"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("completed", "FINISHED"),
        ("done", "FINISHED"),
        ("steps", "FINISHED"),
        ("interrupted", "KILLED"),
        ("resumable", "KILLED"),
        ("failed", "FAILED"),
        ("nonfinite", "FAILED"),
    ],
)
def test_end_status(reason, status):
    assert end_status(reason) == status


def test_metrics_of_a_step_have_legal_names_and_numbers_only():
    event = {"kind": "step", "loss": "nan", "metrics": {"top 1 %": 0.5, "text": "no", "flag": True}, "rate": None}
    named = dict(metrics_of(event))
    assert set(named) == {"loss", "top 1 _"}


SIMULATED = {
    "cluster.toml": '[[nodes]]\ntype = "a100"\ncount = 1\ndevices = 4\n',
    "profiles.csv": "family,params,global_batch,gpu,nodes,gpus_per_node,seconds\nbert,1B,8,a100,1,4,1.0\n",
    "trace.csv": "id,arrival_s,num_steps,model,global_batch,device_type,num_devices\nA,0,60,bert__1B,8,a100,4\n",
}


def simulate_tracked(folder, uri):
    for name, text in SIMULATED.items():
        (folder / name).write_text(text)
    paths = [str(folder / name) for name in ("trace.csv", "cluster.toml", "profiles.csv")]
    args = ["--policy", "fcfs", "--policy", "srtf", "--report", str(folder / "r.html"), "--track", uri]
    return main(["simulate", paths[0], "--cluster", paths[1], "--profiles", paths[2], "--workers", "1", *args])


def test_simulations_are_tracked_one_run_each(tmp_path, store, capsys):
    assert simulate_tracked(tmp_path, store) == 0
    assert "mlflow ui --backend-store-uri" in capsys.readouterr().err
    client, runs, _ = runs_of(store, "arena-jax simulate")
    assert {run.info.run_name for run in runs} == {"fcfs seed 0", "srtf seed 0"}
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.metrics["mean_jct_s"] == 100.0
        assert run.data.metrics["decision_s_mean"] > 0
        assert run.data.params["policy"] == run.info.run_name.split()[0]
        assert run.data.params["restart_s"] == "40.0"
        assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["r.html"]


def test_a_tracker_that_is_down_is_an_error_of_one_line(tmp_path, capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: refused
        assert simulate_tracked(tmp_path, f"http://127.0.0.1:{held.getsockname()[1]}") == 1
    err = capsys.readouterr().err
    assert "did not take the simulations" in err
    assert "Traceback" not in err
