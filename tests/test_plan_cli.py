"""``arena-jax plan`` and ``plan ls``: what they print, keep, serve again and refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from arena_jax.cli import main
from arena_jax.cli.plan_ls import _table, _tables, stored_rows
from arena_jax.grid import GridShape, IndexRow, JobKey, Plan, PlanStore
from arena_jax.home import numba_cache
from arena_jax.solver_setup import alpa_folder

RECIPE = """
summary: a gpt small enough for tests
model: {name: gpt, vocabulary: 256, sequence_length: 16, hidden: 16, num_layers: 2, num_heads: 2}
data: {kind: text, files: [text.txt]}
optimizer: {name: adamw, learning_rate: 1e-2, schedule: constant}
global_batch: 8
steps: 2
cpu_devices: 2
tracking: {enabled: false}
"""
KEYS = {"model", "num_parameters", "global_batch", "grids", "best", "search_s", "num_programs_solved"}
GRID_KEYS = {
    *("grid", "feasible", "reason", "step_time_s", "tokens_or_samples_per_s", "mfu", "memory_bytes"),
    *("device_memory_bytes", "num_microbatches", "stages", "imbalance", "measured_share", "plan_id"),
    *("engine", "objectives"),
}
STAGE_KEYS = {
    *("layers", "devices", "dp", "tp", "zero", "remat", "compute_s", "communication_s", "memory_bytes"),
}
# One embedding table of a billion parameters: more than one 16 GB device holds with its optimizer state.
HUGE = ("model.vocabulary=262144", "model.hidden=4096")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny recipe, text to train on, and a plan store of its own."""
    assert len(jax.devices()) == 8  # jax runs before any verb could set another number for the whole test run
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1000)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "numba").symlink_to(numba_cache())  # compiled code is no plan
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str]):
    """``plan(*arguments)``: exit code, the JSON of the last line, the lines before it, stderr."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], list[str], str]:
        code = main(["plan", *arguments, "--json"])
        captured = capsys.readouterr()
        *lines, last = captured.out.splitlines()
        return code, json.loads(last), lines, captured.err

    return run


def test_every_grid_of_every_allocation(plan) -> None:
    code, report, lines, _ = plan("tiny.yaml", "--on", "cpu:2", "--on", "a100:4")
    assert code == 0
    assert report.keys() == KEYS
    assert (report["model"], report["global_batch"]) == ("tiny", 8)
    grids = {grid["grid"]: grid for grid in report["grids"]}
    assert list(grids) == ["cpu:2/s1", "cpu:2/s2", *(f"a100-40:4/s{n}" for n in (1, 2, 3, 4))]
    for name, grid in grids.items():
        assert grid.keys() == GRID_KEYS
        assert grid["feasible"] != bool(grid["reason"])
        if not grid["feasible"]:
            assert grid["plan_id"] is None
            assert grid["step_time_s"] is None
            continue
        assert grid["memory_bytes"] <= grid["device_memory_bytes"]
        assert grid["tokens_or_samples_per_s"] * grid["step_time_s"] == pytest.approx(8 * 16)
        assert 0 < grid["mfu"] < 1
        assert len(grid["stages"]) == int(name.rpartition("/s")[2])
        assert sum(stage["devices"] for stage in grid["stages"]) == (2 if name.startswith("cpu") else 4)
        for stage in grid["stages"]:
            assert stage.keys() == STAGE_KEYS
            assert stage["dp"] * stage["tp"] == stage["devices"]
    # The best of an allocation is the fastest of its grids, and the only one that is marked.
    for allocation, plan_id in report["best"].items():
        feasible = [g for g in report["grids"] if g["grid"].startswith(f"{allocation}/") and g["feasible"]]
        fastest = min(feasible, key=lambda grid: grid["step_time_s"])
        assert plan_id == fastest["plan_id"]
        assert any(line.startswith("*") and f" {fastest['grid']} " in line for line in lines)
    assert sum(line.startswith("*") for line in lines) == len(report["best"]) == 2
    assert all(len(line) <= 80 for line in lines)


def test_what_to_plan_without_on(plan) -> None:
    """The recipe's grid, else its CPU devices."""
    assert [g["grid"] for g in plan("tiny.yaml")[1]["grids"]] == ["cpu:2/s1", "cpu:2/s2"]
    assert [g["grid"] for g in plan("tiny.yaml", "plan.grid=cpu:4/s2")[1]["grids"]] == ["cpu:4/s2"]
    assert [g["grid"] for g in plan("tiny.yaml", "plan.stages=1")[1]["grids"]] == ["cpu:2/s1"]


def test_stages_and_grids_narrow(plan) -> None:
    report = plan("tiny.yaml", "--on", "cpu:4", "--on", "cpu:2/s2", "--stages", "1", "--stages", "2")[1]
    assert [g["grid"] for g in report["grids"]] == ["cpu:4/s1", "cpu:4/s2", "cpu:2/s2"]


CLUSTER = """
[[nodes]]
type = "a100"
count = 4
devices = 2
[types.mine]
like = "a100"
memory_bytes = 4294967296
[networks.slow]
types = ["a100"]
bandwidth = 1e6
"""


def test_a_cluster_file_adds_types_networks_and_sizes_of_nodes(
    plan, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cluster.toml").write_text(CLUSTER)
    targets = ("--on", "a100:2x2", "--stages", "1", "plan.dp=4")
    _, usual, _, _ = plan("tiny.yaml", *targets)
    code, slow, _, _ = plan("tiny.yaml", *targets, "--cluster", "cluster.toml", "--on", "mine:2")
    assert code == 0
    here, mine = slow["grids"]
    assert usual["grids"][0]["plan_id"] == here["plan_id"]  # what is executed is the same ...
    assert here["step_time_s"] > 10 * usual["grids"][0]["step_time_s"]  # ... over a network of 8 Mbit/s
    assert mine["device_memory_bytes"] == int(0.9 * 2**32)
    # A node of this cluster has two devices, whatever the usual one has.
    assert main(["plan", "tiny.yaml", "--on", "a100:4", "--cluster", "cluster.toml"]) == 2
    assert "2x2" in capsys.readouterr().err
    # The store tells them apart.
    assert plan("tiny.yaml", *targets)[1]["grids"][0]["step_time_s"] == usual["grids"][0]["step_time_s"]


def test_a_cluster_file_without_nodes_describes_types(plan, folder: Path) -> None:
    (folder / "cluster.toml").write_text('[types.mine]\nlike = "a100"\n')
    code, report, _, _ = plan("tiny.yaml", "--on", "mine:2", "--cluster", "cluster.toml", "--explain")
    assert (code, list(report["best"])) == (0, ["mine:2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[typs.mine]", "unknown table 'typs' (did you mean 'types'?)"),
        ('[types.mine]\nlike = "a100"\nmemory = 1', "types.mine: unknown key 'memory'"),
        ("nodes = ", "is not TOML"),
        (None, "cannot read cluster file"),
    ],
)
def test_a_bad_cluster_file(folder: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str) -> None:
    if text is not None:
        (folder / "cluster.toml").write_text(text)
    assert main(["plan", "tiny.yaml", "--on", "a100:2", "--cluster", "cluster.toml"]) == 2
    assert message in capsys.readouterr().err


def test_second_call_is_served_from_the_store(plan) -> None:
    first = plan("tiny.yaml", "--on", "cpu:4", "--stages", "1")[1]
    assert first["num_programs_solved"] > 0
    again = plan("tiny.yaml", "--on", "cpu:4", "--stages", "1")[1]
    assert again["num_programs_solved"] == 0
    assert (again["grids"], again["best"]) == (first["grids"], first["best"])
    more = plan("tiny.yaml", "--on", "cpu:4", "--stages", "1", "--stages", "2")[1]
    assert more["num_programs_solved"] == first["num_programs_solved"]  # only the new grid
    assert more["grids"][0] == first["grids"][0]


@pytest.mark.parametrize(
    "change",
    ["global_batch=16", "plan.zero=0", "precision.compute=bfloat16", "model.num_layers=3", "optimizer.name=sgd"],
)
def test_a_change_is_planned_anew(plan, change: str) -> None:
    plan("tiny.yaml", "--on", "a100:2/s1")
    assert plan("tiny.yaml", change, "--on", "a100:2/s1")[1]["num_programs_solved"] > 0


def test_what_changes_no_plan_is_not_planned_anew(plan) -> None:
    plan("tiny.yaml", "--on", "a100:2/s1")
    report = plan("tiny.yaml", "steps=7", "optimizer.learning_rate=0.5", "--on", "a100:2/s1")[1]
    assert report["num_programs_solved"] == 0


def test_remeasured_cpu_is_planned_anew(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from arena_jax.compiler import cpu

    def measured(speed: float) -> dict[str, Any]:
        known = {"float32": 5e10, "float64": 2e10, "convolution": 2e10, "pass_bytes_per_s": 4e9, "bytes_per_s": 1e10}
        rates = {name: rate * speed for name, rate in known.items()}
        monkeypatch.setattr(cpu, "node_rates", lambda: rates)
        return plan("tiny.yaml", "--on", "cpu:2/s1")[1]

    fast, slow, again = measured(1), measured(0.1), measured(1)
    assert slow["num_programs_solved"] > 0
    assert slow["grids"][0]["step_time_s"] > 2 * fast["grids"][0]["step_time_s"]
    assert again["num_programs_solved"] == 0
    assert again["grids"] == fast["grids"]


def test_coupled_samples_share_one_number_of_microbatches(plan) -> None:
    """Dropout gives each microbatch its own numbers, so what a run computes must not change with its allocation."""
    arguments = ("tiny.yaml", "model.dropout=0.1", "--on", "cpu:2", "--on", "a100:4")
    report = plan(*arguments)[1]
    assert len({grid["num_microbatches"] for grid in report["grids"]}) == 1
    assert plan(*arguments)[1]["num_programs_solved"] == 0
    # Planned apart it may be another number, so it is not served from there.
    assert plan("tiny.yaml", "model.dropout=0.1", "--on", "cpu:2")[1]["num_programs_solved"] > 0


def test_saved_plans_train(plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report, _, _ = plan("tiny.yaml", "--on", "cpu:2", "--save", "plans")
    saved = {path.name: Plan.load(path) for path in sorted((folder / "plans").iterdir())}
    assert list(saved) == ["tiny-cpu-1x2-s1.json", "tiny-cpu-1x2-s2.json"]
    assert [p.plan_id for p in saved.values()] == [grid["plan_id"] for grid in report["grids"]]
    code = main(["train", "tiny.yaml", "--plan", "plans/tiny-cpu-1x2-s2.json", "--json"])
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert trained["steps"] == 2
    assert (trained["grid"], trained["plan_id"]) == ("cpu:2/s2", saved["tiny-cpu-1x2-s2.json"].plan_id)


def test_nothing_fits(plan) -> None:
    """Exit code 3, the bytes that are missing, and a change that really fits."""
    code, report, lines, err = plan("tiny.yaml", *HUGE, "plan.zero=0", "--on", "t4:1")
    assert code == 3
    assert report["best"] == {}
    assert report.keys() == KEYS | {"error"}
    (grid,) = report["grids"]
    assert not grid["feasible"]
    assert "GiB too much" in grid["reason"]
    assert all(len(line) <= 80 for line in lines)
    missing = grid["memory_bytes"] - grid["device_memory_bytes"]
    assert missing > 0
    assert f"t4:1/s1 comes closest and misses {missing:,} bytes a device" in err
    (named,) = re.findall(r"t4:[\dx]+", report["error"]["hint"])
    assert plan("tiny.yaml", *HUGE, "plan.zero=0", "--on", named)[0] == 0


def test_pins_that_nothing_satisfies(plan) -> None:
    code, report, _, _ = plan("tiny.yaml", "plan.dp=8", "--on", "cpu:4")
    assert code == 3
    assert "pinned dp 8 forms no submesh" in report["error"]["message"]
    assert report["error"]["hint"] == "it fits with no plan.dp"
    assert plan("tiny.yaml", "--on", "cpu:4")[0] == 0


def test_one_allocation_that_fits_is_enough(plan) -> None:
    code, report, _, _ = plan("tiny.yaml", *HUGE, "--on", "t4:1", "--on", "h100:1")
    assert code == 0
    assert list(report["best"]) == ["h100-sxm:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "a100:16"], "write a100-40:2x8"),
        (["--on", "z9:4"], "unknown device type"),
        (["--on", "cpu:2", "--stages", "3"], "cannot be cut into 3 stages"),
        (["--on", "cpu:8/s9"], "9 stages on 8 devices"),
        (["plan.num_microbatches=3", "--on", "cpu:2"], "does not split into 3 microbatches"),
        (["plan.stges=1"], "stges"),
    ],
)
def test_bad_input(plan, arguments: list[str], message: str) -> None:
    code, report, _, err = plan("tiny.yaml", *arguments)
    assert code == 2
    assert message in err or message in str(report["error"])


@pytest.mark.skipif(alpa_folder() is None, reason="alpa is not installed (make setup)")
def test_the_engines_are_compared(plan) -> None:
    code, report, lines, _ = plan("tiny.yaml", "--engine", "both", "--on", "cpu:4")
    assert code == 0
    table = lines[next(i for i, line in enumerate(lines) if "alpa finds" in line) + 1 :]
    assert len(table) == len(report["grids"])
    for row, line in zip(report["grids"], table, strict=True):
        assert row["engine"] == "both"
        assert row["objectives"]["alpa"] == pytest.approx(row["objectives"]["highs"], rel=1e-6)
        assert line.split()[0] == row["grid"]
    # What alone would be chosen is no other plan, and it is not taken for what both have found.
    _, alone, lines, _ = plan("tiny.yaml", "--engine", "highs", "--on", "cpu:4")
    assert alone["best"] == report["best"]
    assert {row["engine"] for row in alone["grids"]} == {"highs"}
    assert not any("alpa" in line for line in lines)


def test_an_engine_that_is_not_installed_is_said_at_once(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena_jax.compiler.engines.alpa_process.alpa_folder", lambda: None)
    code, report, _, _ = plan("tiny.yaml", "--engine", "alpa", "--on", "cpu:4")
    assert code == 1
    assert "alpa 0.2.3 is not installed" in report["error"]["message"]
    assert "--install-alpa" in report["error"]["hint"]


@pytest.mark.filterwarnings("default:alpa")
def test_both_engines_are_the_ones_that_are_there(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena_jax.solver_setup._candidates", list)
    code, report, _, err = plan("tiny.yaml", "--engine", "both", "--on", "cpu:4")
    assert code == 0
    assert {row["engine"] for row in report["grids"]} == {"highs"}
    assert "planned with highs alone (arena-jax doctor --install-alpa)" in " ".join(err.split())


def test_planning_materialises_nothing(plan) -> None:
    """760 M parameters, on hardware that is not here."""
    before = sum(array.nbytes for array in jax.live_arrays())
    code, report, _, _ = plan("bert_760m", "plan.tp=1", "--on", "a100:2x8/s2")
    assert code == 0
    assert report["num_parameters"] > 7e8
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6


def test_a_store_that_cannot_be_used_costs_only_time(plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("a file where the folder of caches should be")
    monkeypatch.setenv("ARENA_JAX_HOME", str(folder / "file"))
    code, report, _, _ = plan("tiny.yaml", "--on", "a100:2/s1")
    assert code == 0
    assert report["num_programs_solved"] > 0


def test_plan_ls(plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("ls")[1] == {"rows": []}
    plan("tiny.yaml", "--on", "cpu:2", "--on", "a100:4/s2")
    plan("tiny.yaml", "plan.zero=0", "--on", "cpu:2/s1")
    _, report, _, _ = plan("ls")
    shown = [(row["pins"], row["grid"], row["num_stages"], row["num_devices"]) for row in report["rows"]]
    assert shown == [
        ("", "a100-40:4/s2", 2, 4),
        ("", "cpu:2/s1", 1, 2),
        ("", "cpu:2/s2", 2, 2),
        ("plan.zero=0", "cpu:2/s1", 1, 2),
    ]
    assert plan("ls", "another")[1] == {"rows": []}
    main(["plan", "ls", "tiny"])
    text = capsys.readouterr().out
    assert re.search(r"^tiny, global batch 8, planned \d{4}-\d\d-\d\d \d\d:\d\d$", text, re.M)
    assert re.search(r"^tiny, global batch 8, plan.zero=0, planned ", text, re.M)
    assert re.search(r"^a100-40:4 +\d", text, re.M)


def test_plan_ls_of_many_stages_stays_narrow() -> None:
    rows = [
        {"grid": f"h100-sxm:16x8/s{n}", "num_stages": n, "feasible": True, "step_time_s": 0.0123} for n in range(1, 9)
    ]
    lines = list(_table(rows))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == [
        *(f"s{n}" for n in range(1, 7)), "h100-sxm:16x8", *["12.3", "ms"] * 6,
        *("s7", "s8"), "h100-sxm:16x8", *["12.3", "ms"] * 2,
    ]  # fmt: skip


def test_plan_ls_of_many_pins_stays_narrow() -> None:
    pins = " ".join(f"plan.{name}=16" for name in ("dp", "num_microbatches", "remat", "space", "tp", "zero"))
    row = {"grid": "cpu:2/s1", "num_stages": 1, "feasible": True, "step_time_s": 0.01, "stored_at": 0.0}
    lines = list(_tables([row | {"model": "gpt_1_3b", "global_batch": 256, "pins": pins}]))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).count("=16") == 6


def test_models_of_fit_have_names_and_do_not_hide_each_other(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans.sqlite")
    for fingerprint in ("0123456789ab", "ba9876543210"):
        key = JobKey({"model": "fit:Net", "model_fingerprint": fingerprint, "global_batch": 8})
        grid = GridShape.parse("cpu:2")
        store.put(key, [IndexRow(grid=grid, num_microbatches=1, plan=None, estimate=None, reason="does not fit")])
    rows = stored_rows(store, None)
    assert [row["model"] for row in rows] == ["fit:Net@01234567", "fit:Net@ba987654"]
    assert all(row["stored_at"] > 0 for row in rows)


def test_plan_ls_imports_no_jax(folder: Path) -> None:
    script = "import sys; from arena_jax.cli import main; main(['plan', 'ls']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=folder).returncode == 0
