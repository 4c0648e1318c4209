"""``arena-jax simulate``: promised keys, several clusters, objectives, errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from arena_jax.cli import simulate_table
from arena_jax.cli.app import main

PROMISED = {
    "num_jobs", "finished", "running", "waiting", "mean_jct_s", "max_jct_s", "mean_slowdown", "rho", "deadline_misses",
    "max_restarts", "median_jct_s", "p99_jct_s", "makespan_s", "mean_queue_s", "device_hours", "restarts_per_job",
    "samples_per_s", "worst_slowdown", "decision_s",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "now.toml").write_text('[[nodes]]\ntype = "a100"\ncount = 1\ndevices = 4\n')
    (tmp_path / "plus4.toml").write_text(
        '[[nodes]]\ntype = "a100"\ncount = 1\ndevices = 4\n[[nodes]]\ntype = "a10"\ncount = 2\ndevices = 2\n'
    )
    rows = ["bert,1B,8,a100,1,1,2.0", "bert,1B,8,a100,1,2,1.25", "bert,1B,8,a100,1,4,1.0", "bert,1B,8,a10,1,2,4.0"]
    (tmp_path / "profiles.csv").write_text(
        "family,params,global_batch,gpu,nodes,gpus_per_node,seconds\n" + "\n".join(rows)
    )
    lines = [f"J{i},{10 * i},100,bert__1B,8,a100-40,2" for i in range(6)]
    header = "id,arrival_s,num_steps,model,global_batch,device_type,num_devices\n"
    (tmp_path / "trace.csv").write_text(header + "\n".join(lines))
    (tmp_path / "log.csv").write_text("job_id,submission_time,duration,num_gpu\na,0,100,1\nb,5,100,4\n")
    return tmp_path


def call(
    files: Path, capsys: pytest.CaptureFixture[str], *args: str, trace: str = "trace.csv"
) -> tuple[int, dict[str, object]]:
    base = ["simulate", str(files / trace), "--profiles", str(files / "profiles.csv"), "--workers", "1", "--json"]
    if "--cluster" not in args:
        base += ["--cluster", str(files / "now.toml")]
    code = main([*base, *args])
    return code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_promised_keys(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = call(files, capsys, "--policy", "arena", "--policy", "fcfs", "--policy", "sia@paper")
    assert code == 0
    assert set(answer) == {"policies", "lower_bound_s"}
    assert set(answer["policies"]) == {"arena", "fcfs", "sia@paper"}  # type: ignore[arg-type]
    for metrics in answer["policies"].values():  # type: ignore[attr-defined]
        assert set(metrics) >= PROMISED
        assert metrics["finished"] == metrics["num_jobs"] == 6
        assert metrics["mean_jct_s"] >= answer["lower_bound_s"] == 140.0


def test_what_if_with_more_devices(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = str(files / "plus4.toml")
    code, answer = call(
        files, capsys, "--cluster", str(files / "now.toml"), "--cluster", more, "--report", str(files / "r.html")
    )
    assert code == 0
    clusters = answer["clusters"]
    assert clusters["plus4"]["policies"]["arena"]["mean_jct_s"] < clusters["now"]["policies"]["arena"]["mean_jct_s"]  # type: ignore[index]
    assert answer["policies"] == clusters["now"]["policies"]  # type: ignore[index]
    assert sorted(p.name for p in files.glob("*.html")) == ["r-now.html", "r-plus4.html"]


def test_objectives_trade_time_for_money(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = str(files / "plus4.toml")
    dollars = {}
    for objective in ("time", "cost"):
        code, answer = call(files, capsys, "--cluster", more, "--objective", objective)
        assert code == 0
        dollars[objective] = answer["policies"]["arena"]["cost_dollars"]  # type: ignore[index]
    assert dollars["cost"] < dollars["time"]


def test_charges_by_cause(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = call(files, capsys, "--policy", "fcfs", "--restart-s", "7", "--restart-cost", "start=100")
    assert answer["lower_bound_s"] == 200.0
    # Two at a time, 100 + 125 s each, three times over; the second begins at 10.
    assert answer["policies"]["fcfs"]["makespan_s"] == pytest.approx(685.0)  # type: ignore[index]


def test_node_events_are_replayed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = files / "events.csv"
    # J0 and J1 have done 48 and 40 steps when the only node is drained at 100. At 1000 they resume, for 40 + 65 and
    # 40 + 75 s; behind them come J2 and J4, J3 and J5, of 165 s each: the last ends at 1115 + 330.
    events.write_text("time_s,device_type,node,kind\n100,a100,0,drain\n1000,a100,0,up\n")
    _, answer = call(files, capsys, "--policy", "fcfs", "--node-events", str(events))
    assert answer["policies"]["fcfs"]["makespan_s"] == pytest.approx(1445.0)  # type: ignore[index]
    events.write_text("time_s,device_type,node,kind\n-1,a100,0,fail\n1,v100,0,up\n1,a100,1,up\n1,a100,0,fial\n")
    code, answer = call(files, capsys, "--node-events", str(events))
    assert code == 2
    assert all(f"line {n}" in answer["error"]["message"] for n in (2, 3, 4, 5))  # type: ignore[index]


def test_seeds_are_merged_and_kept(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = call(files, capsys, "--seed", "0", "--seed", "1", "--arrival-scale", "2")
    assert set(answer["policies"]["arena"]["seeds"]) == {"0", "1"}  # type: ignore[index]


def test_a_log_without_models_has_them_drawn(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = call(
        files, capsys, "--bound", "interval", "--horizon-s", "1e6", "--stragglers", "0.1", trace="log.csv"
    )
    assert code == 0
    assert answer["policies"]["arena"]["finished"] == 2  # type: ignore[index]


def test_the_table_is_for_people(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--cluster", str(files / "now.toml"), "--profiles", str(files / "profiles.csv"), "--policy", "fcfs"]
    assert main(["simulate", str(files / "trace.csv"), *args]) == 0
    head, titles, fcfs = capsys.readouterr().out.splitlines()
    assert head == "now.toml: 6 jobs; lower bound on the mean JCT 140 s"
    # Two jobs of two devices at a time, 40 + 125 s each: they end at 165, 175, 330, 340, 495 and 505 s.
    cells = dict(zip(titles.replace("JCT s", "JCT").replace(" s ", " ").split()[1:], fcfs.split()[1:], strict=False))
    assert cells["mean"] == f"{(165 + 175 + 330 + 340 + 495 + 505) / 6 - 25:.0f}"
    assert "misses" not in titles
    assert "waiting" not in titles


def test_both_clusters_are_shown_and_what_did_not_end(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--cluster", str(files / "now.toml"), "--cluster", str(files / "plus4.toml"), "--workers", "2"]
    args += ["--profiles", str(files / "profiles.csv"), "--seed", "0", "--seed", "1", "--horizon-s", "200"]
    assert main(["simulate", str(files / "trace.csv"), *args]) == 0
    out = capsys.readouterr().out
    assert "now.toml: 6 jobs, means over 2 seeds" in out
    assert "plus4.toml: 6 jobs, means over 2 seeds" in out
    assert out.count("finished") == 2


METRICS = {key: 12345.678 for key, _ in simulate_table._SHOWN} | {"finished": 3, "num_jobs": 3, "mean_queue_s": 1e-13}


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    policies = {"arena": METRICS, "gavel-throughput@paper": METRICS | {"cost_dollars": None, "running": 0}}
    shown = list(simulate_table.lines(policies))
    assert max(map(len, shown)) <= columns
    blocks = "\n".join(shown).split("\n\n")
    assert all(len(block.splitlines()) == 3 for block in blocks)
    assert (len(blocks) == 1) == (columns == 200)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    whole = list(simulate_table.lines(policies))
    assert len(whole) == 3
    # Whatever the width, the same cells in the same order.
    assert [cell for row in (0, 1, 2) for block in blocks for cell in block.splitlines()[row].split()[1:]] == [
        cell for line in whole for cell in line.split()[1:]
    ]
    assert whole[1].split()[4] == "0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "siaa"], "did you mean 'sia'"),
        (["--policy", "srtf@paper"], "no such form"),
        (["--restart-s", "-1"], "restart cost"),
        (["--round-s", "-1"], "round_s"),
        (["--restart-cost", "grwo=3"], "did you mean 'grow'"),
        (["--restart-cost", "grow"], "'' is not a number"),
        (["--restart-cost", "grow=-3"], "restart cost 'grow'"),
        (["--seed", "-1"], "-1"),
        (["--horizon-s", "nan"], "horizon_s"),
        (["--error", "-1"], "error of estimates"),
        (["--arrival-scale", "0"], "arrival scale"),
        (["--objective", "fame"], "fame"),
        (["--cluster", "none.toml"], "cannot read cluster file"),
    ],
)
def test_bad_usage_exits_with_two(
    files: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    code, answer = call(files, capsys, *args)
    assert code == 2
    assert message in answer["error"]["message"]  # type: ignore[index]


def test_the_scheduler_needs_no_jax() -> None:
    code = "import sys, arena_jax.scheduler, arena_jax.cli.simulate; sys.exit(bool({'jax', 'mlflow'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
