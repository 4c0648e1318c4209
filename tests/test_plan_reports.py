"""What ``plan`` says besides its table: comparisons by hand, explanations, the page, the trace."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import optax
import pytest

from arena_jax.cli import main
from arena_jax.cli.plan_explain import Named, explain_lines, explanation, find_other, named
from arena_jax.compiler import Constraints, Problem, make_problem, plan_problem
from arena_jax.compiler.analysis import analyse
from arena_jax.compiler.by_hand import NAMES, by_hand
from arena_jax.compiler.intra_op.binding import binding_constraints
from arena_jax.errors import UsageError
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, GridShape, PlanIndex
from tests.browser import check, needs_browser
from tests.doubles import Toy, ToyLoader, toy_loss
from tests.plans import row

RECIPE = """
summary: a gpt small enough for tests
model: {name: gpt, vocabulary: 256, sequence_length: 16, hidden: 16, num_layers: 2, num_heads: 2}
data: {kind: text, files: [text.txt]}
global_batch: 8
steps: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1000)
    return folder


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ARENA_JAX_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, dict[str, Any], list[str], str]:
        code = main(["plan", "tiny.yaml", *arguments, "--json"])
        captured = capsys.readouterr()
        *lines, last = captured.out.splitlines()
        return code, json.loads(last), lines, captured.err

    return run


# Plans by hand.


def test_what_people_write_by_hand() -> None:
    two_nodes = Allocation.parse("a100:2x4")
    assert by_hand("dp", two_nodes) == Constraints(stages=1, dp=8, tp=1, zero=0)
    assert by_hand("fsdp", two_nodes) == Constraints(stages=1, dp=8, tp=1, zero=3)
    assert by_hand("tp", two_nodes) == Constraints(stages=1, dp=2, tp=4, zero=0)
    assert by_hand("fsdp", Allocation.parse("a100:1")) == Constraints(stages=1, dp=1, tp=1, zero=0)


def test_plans_by_hand_stand_in_the_table_and_do_not_beat_the_search(plan) -> None:
    code, report, lines, _ = plan("--on", "a100:4", "--on", "cpu:2", "--compare", "dp,fsdp,tp")
    assert code == 0
    shown = [(plan["name"], plan["grid"]) for plan in report["compared"]]
    assert shown == [(name, grid) for grid in ("a100-40:4/s1", "cpu:2/s1") for name in NAMES]
    best = {g["plan_id"]: g["step_time_s"] for g in report["grids"] if g["plan_id"] in report["best"].values()}
    for hand in report["compared"]:
        allocation = hand["grid"].partition("/")[0]
        (stage,) = hand["stages"]
        devices = Allocation.parse(allocation).num_devices
        assert (stage["dp"], stage["tp"]) == ((1, devices) if hand["name"] == "tp" else (devices, 1))
        assert stage["zero"] == (3 if hand["name"] == "fsdp" else 0)
        assert hand["step_time_s"] >= best[report["best"][allocation]]
        assert sum(f"{allocation} {hand['name']} " in line for line in lines) == 1
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("*") for line in lines) == 2  # only of what was searched
    assert "compared" not in plan("--on", "cpu:2")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "ddp"], "no plan is called 'ddp' (did you mean 'dp'?)"),
        (["--against", "a100:4/s2"], "no such plan beside cpu:2/s1"),
        (["--against", "a100:99"], "--against: 'a100:99': a node of a100-40 has 8 devices"),
        (["--against", "ff"], "no such plan"),
        (["--report", "tiny.yaml/page.html"], "cannot write the report"),
    ],
)
def test_bad_input(plan, arguments: list[str], message: str) -> None:
    code, _, _, err = plan("--on", "cpu:2/s1", *arguments)
    assert code == 2
    assert message in err


# Explanations.


def test_an_explanation_adds_up_in_80_columns(plan) -> None:
    code, report, lines, _ = plan("--on", "a100:4", "--explain", "--against", "tp")
    assert code == 0
    (said,) = report["explanations"]
    grids = {grid["grid"]: grid for grid in report["grids"]}
    best, other = said["best"], said["other"]
    assert best["plan_id"] == report["best"]["a100-40:4"] == grids[best["name"]]["plan_id"]
    assert other["name"] == "a100-40:4 tp"
    for facts in (best, other):
        assert sum(facts["breakdown"].values()) == pytest.approx(facts["step_time_s"])
        assert sum(facts["memory"].values()) == facts["memory_bytes"]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert f"why {best['name']}, plan {best['plan_id']}" in text
    assert re.search(rf"{other['step_time_s'] / best['step_time_s']:.2f} times as fast as a100-40:4 tp", text)


def test_the_other_plan_by_name() -> None:
    rows = [row("a100:4/s1", 4.0), row("a100:4/s2", 3.0), row("a100:4/s4", None), row("v100:4/s1", 9.0)]
    plans = named(PlanIndex(rows), [])
    best = plans[1]

    def other(text: str | None) -> str | None:
        found = find_other(text, best, plans)
        return None if found is None else found.name

    assert other(None) == "a100-40:4/s1"
    assert other("a100:4/s4") == "a100-40:4/s4"
    assert other("v100:4") == "v100-32:4/s1"
    assert rows[0].plan is not None
    assert other(rows[0].plan.plan_id[:6]) == "a100-40:4/s1"
    with pytest.raises(UsageError, match="no such plan"):
        other("fsdp")
    assert find_other(None, plans[3], [plans[3]]) is None


def test_a_plan_against_one_that_does_not_run() -> None:
    best = Named("a100-40:4/s1", row("a100:4/s1", 4.0))
    said = explanation(
        Named(best.name, plan_problem(problem(), [GridShape.parse("a100:4")]).rows[0]),
        Named("a100-40:4/s4", row("a100:4/s4", None)),
        [],
    )
    assert "  a100-40:4/s4 does not run: too large" in list(explain_lines(said))


def problem(hidden: int = 64) -> Problem:
    return make_problem(lambda rngs: Toy(rngs, hidden), optax.adam(1e-2), toy_loss, next(ToyLoader()))


def with_memory(num_bytes: int) -> Catalogue:
    return CATALOGUE.extended({"a100-40": {"memory_bytes": num_bytes}})


def test_what_binds_is_found_by_lifting_it() -> None:
    """Whole, weights with gradients and moments take 1 MB of a device; 0.63 MB of 0.7 are usable."""
    analysis = analyse(problem(hidden=4096))
    (grid,) = [GridShape.parse("a100:2")]

    def bound(memory_bytes: int, pins: Constraints, m: int | None) -> list[str]:
        catalogue = with_memory(memory_bytes)
        index = plan_problem(
            analysis.problem, [grid], constraints=pins, num_microbatches=m, catalogue=catalogue, analysis=analysis
        )
        assert index.rows[0].feasible, index.rows[0].reason
        found = binding_constraints(analysis, index.rows[0], pins, m, catalogue)
        for binding in found:
            assert binding.freed.step_time_s < index.rows[0].step_time_s
        return [binding.constraint for binding in found]

    free = Constraints()
    assert bound(1 << 40, free, None) == []
    assert bound(700_000, free, None) == ["memory"]
    assert bound(1 << 40, Constraints(remat="on"), None) == ["plan.remat=on"]
    assert "plan.num_microbatches=8" in bound(1 << 40, free, 8)


# The page and the trace.


class Reader(HTMLParser):
    """Checks that tags match, and collects what would be loaded from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]
        self.loaded += [tag] if tag in ("script", "link", "iframe", "img", "object") else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_the_page_stands_alone_and_shows_everything(plan, folder: Path) -> None:
    code, report, _, err = plan(
        *("--on", "a100:4", "--on", "cpu:2/s2", "--compare", "fsdp,tp", "--explain"),
        *("--report", "out/page.html", "--trace", "out/trace.json"),
    )
    assert code == 0
    assert "wrote out/page.html" in err
    text = (folder / "out/page.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.loaded == []
    assert not re.search(r"https?://|@import|url\(", text)
    for grid in report["grids"]:
        assert grid["grid"] in reader.text
    for wanted in ("Time against memory", "Predicted 1F1B timeline", "Memory of a device", "blocks/*/", "a100-40:4 tp"):
        assert wanted in reader.text
    check_trace(json.loads((folder / "out/trace.json").read_text()), report)


@needs_browser
def test_the_page_in_a_browser(plan, folder: Path, tmp_path: Path) -> None:
    arguments = ("--on", "a100:4", "--on", "cpu:2/s2", "--compare", "fsdp,tp", "--explain")
    assert plan(*arguments, "--report", "seen.html")[0] == 0
    check((folder / "seen.html").read_text(), tmp_path, num_tables=5, num_plots=15)


def check_trace(trace: dict[str, Any], report: dict[str, Any]) -> None:
    """Every microbatch of every best plan goes forward and backward on every stage, one thing at a time."""
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    best = {g["plan_id"]: g for g in report["grids"] if g["plan_id"] in report["best"].values()}
    assert len(processes) == len(best) == 2
    for process, name in processes.items():
        grid = next(g for plan_id, g in best.items() if plan_id in name)
        events = [e for e in trace["traceEvents"] if e["pid"] == process and e["ph"] == "X"]
        for kind in ("forward", "backward"):
            assert sum(e["cat"] == kind for e in events) == len(grid["stages"]) * grid["num_microbatches"]
        threads = {e["tid"] for e in trace["traceEvents"] if e["pid"] == process and e["name"] == "thread_name"}
        assert {e["tid"] for e in events} <= threads
        for thread in threads:
            line = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(line))
        end = max(e["ts"] + e["dur"] for e in events) / 1e6
        assert 0.5 * grid["step_time_s"] < end <= 1.01 * grid["step_time_s"]


def test_a_page_where_nothing_fits(plan, folder: Path) -> None:
    code, _, _, _ = plan("plan.dp=8", "--on", "cpu:4/s1", "--report", "nothing.html", "--trace", "nothing.json")
    assert code == 3
    reader = Reader()
    reader.feed((folder / "nothing.html").read_text())
    assert "nothing to draw" in reader.text
    assert json.loads((folder / "nothing.json").read_text())["traceEvents"] == []
