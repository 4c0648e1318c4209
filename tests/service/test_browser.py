"""The service's page and the simulator's report in a real browser: no errors, all there, nothing cut off."""

import shutil
import subprocess

import pytest

from arena_jax.grid import Allocation
from arena_jax.scheduler import JobSpec, ProfileSet, Scenario, TableProfile, simulate
from arena_jax.scheduler.report import render as render_report
from arena_jax.service.page import render
from arena_jax.service.service import Options
from tests.service.stub import CLUSTER, Bench, recipe

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
# Put at the end of a page by the test only: what is laid out, as the title.
MEASURE = """<script>document.title = [document.documentElement.scrollWidth, innerWidth,
 document.querySelectorAll("table").length, document.querySelectorAll("svg").length,
 [...document.querySelectorAll("h2")].every(h => h.getBoundingClientRect().right <= innerWidth)].join(" ")</script>"""


def look(page: str, folder, width: int) -> tuple[list[str], str]:
    """What a browser of this width makes of a page: the measures, and what its console says."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", MEASURE + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
    # The window of a headless browser is at least 500 wide: a narrower page is shown in a frame.
    frame = f'<iframe src="page.html" width="{width}" height="900" onload="setTimeout(() => document.title = '
    frame += 'document.querySelector(`iframe`).contentDocument.title, 100)"></iframe>'
    (folder / "frame.html").write_text(f"<!doctype html><title>-</title>{frame}")
    done = subprocess.run(
        [
            *(CHROMIUM, *flags, "--allow-file-access-from-files", f"--window-size={width + 60},1000"),
            *("--virtual-time-budget=3000", "--dump-dom", (folder / "frame.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return title.split(), console


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_of_a_service_that_did_things(tmp_path, width):
    bench = Bench(tmp_path)
    jobs = [bench.submit(recipe(f"job{i}", steps=200 + 100 * i, queue="night" if i % 2 else "day")) for i in range(4)]
    bench.run(60)
    bench.requests.answer({"do": "resize", "job": jobs[0].id, "grid": "slow:2"})
    bench.run(60)
    page = render(bench.store, Options(state=tmp_path, cluster=CLUSTER, label="nominal"), bench.clock())
    (scrolled, inner, tables, plots, headings), console = look(page, tmp_path, width)
    assert console == ""
    assert int(inner) == width
    assert int(scrolled) <= width
    assert int(tables) >= 4
    assert int(plots) >= 4
    assert headings == "true"


def test_the_report_of_a_simulation(tmp_path):
    jobs = (
        JobSpec(id="a", arrival_s=0.0, num_steps=500, model="m"),
        JobSpec(id="b", arrival_s=30.0, num_steps=800, model="m"),
    )
    times = {Allocation.parse(text, CLUSTER.catalogue): s for text, s in (("quick:4", 0.2), ("quick:2", 0.35))}
    scenario = Scenario(jobs=jobs, cluster=CLUSTER, profiles=ProfileSet({("m", None): TableProfile(times)}))
    results = {name: [simulate(scenario, name)] for name in ("arena", "fcfs")}
    page = render_report(results, title="two policies", bound_s=10.0)
    (scrolled, inner, tables, plots, _), console = look(page, tmp_path, 400)
    assert console == ""
    assert int(scrolled) <= int(inner)
    assert int(tables) >= 1
    assert int(plots) >= 5
