"""The service's verbs, in one process with a stub machine behind the socket."""

import json
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from arena_jax.cli import main
from arena_jax.service.queues import Queues
from arena_jax.service.server import Server
from arena_jax.service.service import Options, Service
from arena_jax.service.web import Web
from tests.service.stub import CLUSTER, Bench, Clock, StubExecutor, StubIndexer, recipe


@pytest.fixture
def bench(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    monkeypatch.setenv("ARENA_JAX_SERVICE", str(tmp_path / "state"))
    server = Server(tmp_path / "state", bench.requests.answer)
    yield bench
    server.close()


@pytest.fixture
def run(capfd):
    def call(*args):
        code = main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_submit_status_logs_cancel(run, bench):
    assert run("submit", "gpt_tiny", "steps=50", "--max", "4", "--types", "quick,slow", "--queue", "night")[:2] == (
        0,
        "gpt_tiny-1\n",
    )
    assert run("submit", "--cmd", "sleep 5", "--on", "slow:2", "--expect", "50")[1] == "sleep-2\n"
    bench.run(8)
    code, out, _ = run("status")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["job", "state", "on"]
    assert lines[1].split()[:3] == ["gpt_tiny-1", "running", "quick:4"]
    assert lines[2].split()[:3] == ["sleep-2", "running", "slow:2"]
    assert max(map(len, lines)) <= 80
    code, out, _ = run("status", "--json")
    (first, _) = json.loads(out.splitlines()[-1])["jobs"]
    assert (first["id"], first["recipe"], first["state"], first["grid"]) == (
        "gpt_tiny-1",
        "gpt_tiny",
        "running",
        "cpu:4/s1",
    )
    assert run("logs", "sleep-2")[1] == "first line\nlast line\n"
    out = run("top")[1]
    assert "quick/0  ####  gpt_tiny-1" in out
    assert "6 of 16 devices held" in out
    assert run("cancel", "sleep-2")[0] == 0
    assert run("resize", "gpt_tiny-1", "quick:2")[0] == 0
    assert run("drain", "quick/1")[0] == 0
    bench.run(6)
    assert [job.phase for job in bench.store.jobs()] == ["running", "cancelled"]
    assert bench.store.jobs()[0].held.allocation.num_devices == 2
    assert bench.store.nodes() == {"quick/1": "drained"}
    assert run("drain", "quick/1", "--undo")[0] == 0
    assert run("logs", "-f", "sleep-2")[0] == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["submit"], "name a recipe or give a command"),
        (["submit", "gpt_tiny", "plan.grid=cpu:4"], "the scheduler chooses the grid"),
        (["submit", "gpt_tin"], "did you mean 'gpt_tiny'"),
        (["submit", "gpt_tiny", "--min", "64"], "no allocation of at least 64"),
        (["submit", "gpt_tiny", "--types", "quikc"], "did you mean 'quick'"),
        (["submit", "--cmd", "true"], "a command needs an allocation"),
        (["submit", "--cmd", "true", "--on", "quick:3x4"], "more than the cluster has"),
        (["status", "nobody"], "no job 'nobody'"),
        (["drain", "quick/9"], "no node 'quick/9'"),
        (["resize", "nobody", "quick:2"], "no job 'nobody'"),
    ],
)
def test_what_cannot_be_meant_is_said(run, bench, args, says):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert says in err


def test_without_a_service(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ARENA_JAX_SERVICE", str(tmp_path / "none"))
    code, _, err = run("status")
    assert code == 1
    assert "arena-jax serve --cluster" in err


@pytest.fixture
def service(tmp_path):
    clock = Clock()
    executor = StubExecutor(clock)
    options = Options(state=tmp_path / "s", cluster=CLUSTER, port=0, label="nominal <speeds>")
    made = Service(options, lambda store: (executor, StubIndexer()), clock=clock)
    made.start()
    yield made, clock
    made.close()


def fetch(url: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_and_the_metrics_tell_what_happened(service):
    made, clock = service
    job = made.store.submit(recipe("<b>gpt", steps=120), clock())
    for _ in range(30):
        made.tick()
        clock.now += 1
    made.store.wish({"do": "resize", "job": job.number, "grid": "slow:4"})
    for _ in range(20):
        made.tick()
        clock.now += 1
    code, page = fetch(made.url)
    assert code == 200
    assert "nominal &lt;speeds&gt;" in page
    assert "<b>gpt" not in page
    assert "&lt;b&gt;gpt-1" in page
    for heading in ("Jobs", "Allocations", "Loss and step time", "Estimated and measured", "Changes", "Decisions"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<svg") >= 4
    assert "resize &lt;b&gt;gpt-1" in page
    code, text = fetch(made.url + "metrics")
    assert code == 200
    assert 'arena_jax_jobs{state="running"} 1\n' in text
    assert 'arena_jax_devices_held{type="slow"} 4\n' in text
    assert 'arena_jax_events_total{kind="move"} 1\n' in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.rpartition(" ")[2]) > 0
    assert fetch(made.url + "status.json")[0] == 200
    assert fetch(made.url + "state.sqlite")[0] == 404
    assert fetch(made.url, host="evil.example:80")[0] == 403


def test_the_page_is_on_loopback_only(service):
    made, _ = service
    assert made.url.startswith("http://127.0.0.1:")
    port = int(made.url.rstrip("/").rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    of_ours = [row[1] for row in listening if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port]
    assert of_ours == [f"0100007F:{port:04X}"]


def test_one_service_per_state_folder(service, tmp_path):
    made, clock = service
    from arena_jax.errors import UsageError

    with pytest.raises(UsageError, match="another service runs"):
        Service(made.options, lambda store: (StubExecutor(clock), StubIndexer()), clock=clock).start()
    with pytest.raises(UsageError, match="cannot serve the page"):
        Web(made.store, made.options, port=int(made.url.rstrip("/").rpartition(":")[2]))


def test_queues_have_shares_weighed_by_worth():
    from arena_jax.errors import UsageError
    from arena_jax.service.queues import Usage, worth_of

    queues = Queues.from_tables({"day": {"share": 3}, "night": {}}, source="c.toml")
    assert (queues.share("day"), queues.share("night"), queues.share("other")) == (3.0, 1.0, 1.0)
    assert worth_of(CLUSTER) == {"quick": 8e9, "slow": 2e9}
    usage = Usage()
    usage.advance(100.0, [])
    usage.advance(160.0, [("day", 8e9), ("night", 8e9)])  # both had the same; 3 to 1 is due
    factors = usage.factors(queues, ["day", "night"])
    assert factors == pytest.approx({"day": 1.5, "night": 0.5})
    assert usage.factors(queues, ["day"]) == {"day": 1.0}
    usage.advance(160.0 + 600.0, [])
    assert sum(usage.used.values()) == pytest.approx(60 * 16e9 / 2)  # halved in ten minutes
    usage.used = {"day": 1.0}
    assert usage.factors(queues, ["day", "night"]) == pytest.approx({"day": 0.75, "night": 4.0})
    for bad in ({"a": {"share": 0}}, {"a": {"shar": 1}}, {"a": {"share": True}}):
        with pytest.raises(UsageError, match=r"queues\.a"):
            Queues.from_tables(bad, source="c.toml")
