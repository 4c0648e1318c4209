"""The service's page and the simulator's report in a real browser: no errors, all there, nothing cut off."""

from arena_jax.grid import Allocation
from arena_jax.scheduler import JobSpec, ProfileSet, Scenario, TableProfile, simulate
from arena_jax.scheduler.report import render as render_report
from arena_jax.service.page import render
from arena_jax.service.service import Options
from tests.browser import check, needs_browser
from tests.service.stub import CLUSTER, Bench, recipe

pytestmark = needs_browser


def test_the_page_of_a_service_that_did_things(tmp_path):
    bench = Bench(tmp_path)
    jobs = [bench.submit(recipe(f"job{i}", steps=200 + 100 * i, queue="night" if i % 2 else "day")) for i in range(4)]
    bench.run(60)
    bench.requests.answer({"do": "resize", "job": jobs[0].id, "grid": "slow:2"})
    bench.run(60)
    page = render(bench.store, Options(state=tmp_path, cluster=CLUSTER, label="nominal"), bench.clock())
    check(page, tmp_path, num_tables=4, num_plots=4)


def test_the_report_of_a_simulation(tmp_path):
    jobs = (
        JobSpec(id="a", arrival_s=0.0, num_steps=500, model="m"),
        JobSpec(id="b", arrival_s=30.0, num_steps=800, model="m"),
    )
    times = {Allocation.parse(text, CLUSTER.catalogue): s for text, s in (("quick:4", 0.2), ("quick:2", 0.35))}
    scenario = Scenario(jobs=jobs, cluster=CLUSTER, profiles=ProfileSet({("m", None): TableProfile(times)}))
    results = {name: [simulate(scenario, name)] for name in ("arena", "fcfs")}
    page = render_report(results, title="two policies", bound_s=10.0)
    check(page, tmp_path, num_tables=1, num_plots=5)
