"""Metrics by hand, and the report page."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from arena_jax.errors import UsageError
from arena_jax.page import svg
from arena_jax.scheduler import summary, write_report
from arena_jax.scheduler.metrics import confidence, devices_in_use, finish_time_fairness, over_seeds, throughput
from arena_jax.scheduler.policies import Arena, Fcfs, Srtf
from tests.scheduler.build import A100, cluster, job, profiles, run, workload


def test_summary_of_two_jobs_in_a_row() -> None:
    # A 0-110, B arrives at 10 and runs 110-220.
    metrics = summary(run(workload([job("A", global_batch=8), job("B", 10, global_batch=8, deadline_s=200.0)]), Fcfs()))
    assert (metrics["num_jobs"], metrics["finished"], metrics["running"], metrics["waiting"]) == (2, 2, 0, 0)
    assert metrics["mean_jct_s"] == metrics["median_jct_s"] == 160.0
    assert metrics["max_jct_s"] == 210.0
    assert metrics["p99_jct_s"] == pytest.approx(110 + 0.99 * 100)
    assert metrics["makespan_s"] == 220.0
    assert metrics["mean_queue_s"] == 50.0
    assert metrics["device_hours"] == pytest.approx(2 * 110 * 4 / 3600)
    assert metrics["cost_dollars"] == pytest.approx(2 * 110 * 4 / 3600 * 4.10)
    # Fastest alone: 100 s and a start charge of 10 s.
    assert metrics["worst_slowdown"] == pytest.approx(210 / 110)
    assert metrics["mean_slowdown"] == pytest.approx((1 + 210 / 110) / 2)
    assert metrics["deadline_misses"] == 1
    assert metrics["restarts_per_job"] == metrics["max_restarts"] == 0
    # Two times 800 samples in 220 s; 8 a second while training.
    assert metrics["samples_per_s"] == pytest.approx(1600 / 220)
    assert metrics["peak_samples_per_s"] == 8.0
    assert metrics["num_decisions"] == 3
    assert set(metrics["decision_s"]) == {"mean", "p50", "p99", "max"}


def test_restarts_count_changes_and_resumes_but_not_the_start() -> None:
    result = run(workload([job("A"), job("B", 50, 20)]), Srtf())
    assert result.num_restarts.tolist() == [1, 0]
    assert summary(result)["restarts_per_job"] == 0.5


def test_rho_uses_the_share_of_the_time_averaged_number_of_jobs() -> None:
    # A: 110 s, of which 100 beside B: n = (10 + 2 x 100) / 110. Its share of 4 / n devices is 2.1: two, 125 + 10 s.
    # B: 210 s, 100 of them beside A: n = 310 / 210, share 2.7: two as well.
    rho = finish_time_fairness(run(workload([job("A"), job("B", 10)]), Fcfs()))
    assert rho.tolist() == pytest.approx([110 / 135, 210 / 135])


def test_rho_where_the_share_holds_no_allocation() -> None:
    # Two jobs that only run on all four devices: half of the time each.
    built = workload([job("A"), job("B")], cluster(a100=(1, 4)), profiles(m={"a100:4": 1.0}))
    result = run(built, Fcfs())
    n_b = (110 * 2 + 110) / 220
    assert finish_time_fairness(result).tolist() == pytest.approx([110 / 210, 220 / (100 * n_b + 10)])


def test_timelines() -> None:
    result = run(workload([job("A", global_batch=2), job("B", 10, global_batch=2)]), Fcfs())
    times, rate = throughput(result)
    assert times.tolist() == [10.0, 110.0, 120.0, 220.0]
    assert rate.tolist() == [2.0, 0.0, 2.0, 0.0]
    marks, held = devices_in_use(result)
    assert marks.tolist() == [0.0, 110.0, 220.0]
    assert held[:, 0].tolist() == [4.0, 4.0, 0.0]


def test_over_seeds() -> None:
    runs = [summary(run(workload([job("A", num_steps=n)]), Fcfs())) for n in (100, 200)]
    merged = over_seeds(runs)
    assert merged["mean_jct_s"] == 160.0
    assert merged["num_jobs"] == 1
    assert merged["decision_s"]["max"] == max(r["decision_s"]["max"] for r in runs)
    assert confidence([1.0, 3.0]) == pytest.approx(12.706, abs=0.01)
    assert np.isnan(confidence([1.0]))


class Balanced(HTMLParser):
    """Checks that tags close, and collects what points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "rect", "polyline", "polygon", "br"):
            self.stack.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            while self.stack and self.stack[-1] in ("polyline", "polygon"):
                self.stack.pop()
            if tag in ("polyline", "polygon"):
                return
            assert self.stack.pop() == tag


def test_the_report_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    on, times = cluster(a100=(1, 4), a10=(1, 2)), profiles(m=A100 | {"a10:2": 2.0})
    jobs = [job("<A&B>"), job("B", 10), job("C", 60)]
    results = {
        "arena": [run(workload(jobs, on, times), Arena()) for _ in range(2)],
        "fcfs": [run(workload(jobs, on, times), Fcfs()) for _ in range(2)],
    }
    path = tmp_path / "sub" / "report.html"
    write_report(path, results, title="now & <then>", bound_s=110.0)
    text = path.read_text(encoding="utf-8")
    page = Balanced()
    page.feed(text)
    assert page.stack == []
    assert page.outside == []
    assert "http" not in text
    assert "&lt;A&amp;B&gt;" in text
    assert "<A&B>" not in text
    for part in ("Completion times", "Jobs waiting", "Utilisation", "Decision time", "Devices held", "a100-40", "±"):
        assert part in text
    assert len(re.findall("<svg", text)) == 8
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_time_axes_have_round_ticks() -> None:
    assert svg._time_ticks(0.0, 30 * 3600.0) == [0.0, 6 * 3600.0, 12 * 3600.0, 18 * 3600.0, 86400.0, 30 * 3600.0]
    assert [svg.duration(t) for t in svg._time_ticks(100.0, 8000.0)] == ["30 min", "1 h", "1.5 h", "2 h"]
    assert len(svg._time_ticks(0.0, 4e8)) <= 8
    assert svg._time_ticks(5.0, 5.0) == [5.0]
    written = [svg._clock(t) for t in (0.0, 0.002, 1.5, 60.0, 80.0, 90.0, 4800.0, 5400.0, 86400.0)]
    assert written == ["0", "2 ms", "1.5 s", "1 min", "80 s", "1.5 min", "80 min", "1.5 h", "1 d"]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(
            tmp_path / "file" / "r.html", {"fcfs": [run(workload([job("A")]), Fcfs())]}, title="t", bound_s=None
        )
