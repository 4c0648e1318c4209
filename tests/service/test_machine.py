"""Any order of requests, faults and kills of the service, between any two of its actions: nothing is lost."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from arena_jax.service.job import ENDED, LIVE, Phase, Submission
from arena_jax.service.rules import Rules
from tests.service.stub import CLUSTER, Bench, recipe

GRIDS = ["auto", "auto", "pause", "quick:1", "quick:2", "quick:4", "quick:2x4", "slow:2", "slow:4", "slow:2x4"]
NODES = ["quick/0", "quick/1", "slow/0", "slow/1"]


class Killed(BaseException):
    """The service is gone, here and now."""


class Service(RuleBasedStateMachine):
    """The service and its machine; the machine goes on when the service dies."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="arena-jax-test-"))

    @initialize(elastic=st.booleans(), policy=st.sampled_from(["arena", "fcfs-elastic-any", "srtf"]))
    def begin(self, elastic, policy):
        self.bench = Bench(self.folder, policy=policy, rules=Rules(change_cost_s=4.0, hang_s=30.0), elastic=elastic)
        self.executor = self.bench.executor
        self.submitted = []
        self.steps = {}

    @rule(
        steps=st.integers(1, 300),
        least=st.sampled_from([1, 2, 8]),
        types=st.sampled_from([(), ("quick",), ("slow",)]),
        queue=st.sampled_from(["default", "night"]),
    )
    def submit(self, steps, least, types, queue):
        spec = recipe(f"j{least}", steps=steps, min_devices=least, types=types, queue=queue)
        self.submitted.append(self.bench.submit(spec))

    @rule(on=st.sampled_from(["quick:1", "quick:4", "slow:2x4"]))
    def submit_command(self, on):
        spec = Submission(kind="command", name="cmd", command="true", on=on, expected_s=20.0)
        self.submitted.append(self.bench.submit(spec))

    @rule(seconds=st.sampled_from([1, 5, 40]))
    def wait(self, seconds):
        self.bench.run(seconds)

    @rule()
    def kill_service(self):
        self.bench.start()

    @rule(after=st.integers(0, 4), ticks=st.integers(1, 8))
    def kill_service_in_the_middle(self, after, ticks):
        """Dies just before, or just after, its n-th action on the machine."""
        left = [after]

        def before(what):
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        self.executor.before = before
        try:
            self.bench.run(ticks)
        except Killed:
            pass
        finally:
            self.executor.before = lambda what: None
        self.bench.start()

    @rule(which=st.integers(0, 30), hang=st.booleans())
    def harm_a_worker(self, which, hang):
        alive = [(number, p) for number, p in self.executor.runs.items() if p.alive]
        if alive:
            number, process = alive[which % len(alive)]
            if hang and not self.submitted[number - 1].spec.rigid:  # a command has no sign of life to miss
                process.hangs = True
            else:
                process.alive, process.exit_code = False, -9

    @rule(which=st.integers(0, 30), verb=st.sampled_from(["cancel", "resize"]), grid=st.sampled_from(GRIDS))
    def ask(self, which, verb, grid):
        if self.submitted:
            job = self.submitted[which % len(self.submitted)]
            self.bench.requests.answer({"do": verb, "job": job.id, "grid": grid})

    @rule(node=st.sampled_from(NODES), verb=st.sampled_from(["drain", "undrain"]))
    def drain(self, node, verb):
        self.bench.requests.answer({"do": verb, "node": node})

    @invariant()
    def what_is_alive_is_known_and_holds_its_devices(self):
        if not hasattr(self, "bench"):
            return
        jobs = {job.number: job for job in self.bench.store.jobs()}
        assert sorted(jobs) == sorted(job.number for job in self.submitted)
        held = set()
        for job in jobs.values():
            for node, numbers in job.held.devices if job.held is not None else ():
                mine = {(job.held.allocation.device_type, node, number) for number in numbers}
                assert len(mine) == len(numbers), "a device is counted twice"
                assert not held & mine, "a device is given twice"
                assert max(numbers) < 4
                held |= mine
            if job.phase in ENDED:
                assert job.held is None
        for number, process in self.executor.runs.items():
            if process.alive:
                job = jobs[number]
                assert job.phase in LIVE
                assert job.run == process.run
                assert sum(len(numbers) for _, numbers in job.held.devices) >= process.devices
        assert len(set(self.executor.launches)) == len(self.executor.launches), "a run is launched twice"

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        for node in NODES:
            self.bench.requests.answer({"do": "undrain", "node": node})
        for job in self.submitted:
            self.bench.requests.answer({"do": "resize", "job": job.id, "grid": "auto"})
        for _ in range(100):
            self.bench.run(400, 10.0)
            if all(job.phase in ENDED for job in self.bench.store.jobs()):
                break
        ended = self.bench.store.jobs()
        assert all(job.phase in ENDED for job in ended), [(j.id, j.phase, j.reason) for j in ended]
        for job in ended:
            if not job.spec.rigid and job.phase is not Phase.CANCELLED:
                assert (job.phase, job.step) == (Phase.FINISHED, job.spec.steps), (job.id, job.reason)
        assert not any(process.alive for process in self.executor.runs.values())
        shutil.rmtree(self.folder, ignore_errors=True)


TestService = Service.TestCase
TestService.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, phases=[Stage.explicit, Stage.reuse, Stage.generate]
)
assert CLUSTER.num_devices == 16
