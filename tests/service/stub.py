"""A machine that is not there: processes that step by a clock of the test, and an index that needs no compiler."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster, make_policy
from arena_jax.service.devices import Node
from arena_jax.service.estimates import IndexedStep
from arena_jax.service.executor import Heartbeat, Orders, Progress, StillAlive
from arena_jax.service.indexing import Indexing
from arena_jax.service.job import Held, Job, Submission
from arena_jax.service.reconcile import Reconciler
from arena_jax.service.requests import Requests
from arena_jax.service.rules import Rules
from arena_jax.service.steering import left_after
from arena_jax.service.store import Store

TABLES = {
    "types": {"quick": {"threads": 1, "peak_flops": 8e9}, "slow": {"threads": 1, "peak_flops": 2e9}},
    "nodes": [{"type": "quick", "count": 2, "devices": 4}, {"type": "slow", "count": 2, "devices": 4}],
}
CLUSTER = Cluster.from_tables(TABLES)
SPEED = {"quick": 4.0, "slow": 1.0}


def step_time_s(allocation: Allocation) -> float:
    """Four times as fast on quick devices; concave in their number."""
    return 8.0 / (SPEED[allocation.device_type] * allocation.num_devices**0.8)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Process:
    """One run of a job."""

    run: int
    held: Held
    devices: int
    step: float
    saved: int
    updated: float
    begins: float
    told: str = ""
    alive: bool = True
    exit_code: int | None = None
    stops_at: float | None = None
    changes_at: float | None = None
    hangs: bool = False


@dataclass
class StubExecutor:
    """Keeps what it was asked for across restarts of the service, as a real machine does.

    Attributes:
        before: called with the name of each action before it; may raise, to kill the service there.
        crash: called at each launch; an exit code makes the process crash at once.
    """

    clock: Clock
    elastic: bool = True
    name: str = "stub"
    start_s: float = 3.0
    stop_s: float = 1.0
    change_s: float = 2.0
    save_every: int = 10
    before: Callable[[str], None] = lambda what: None
    crash: Callable[[Job], int | None] = lambda job: None
    refuses: bool = False
    runs: dict[int, Process] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    launches: list[tuple[int, int]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    lost: set[Node] = field(default_factory=set)

    def _now(self, job: Job) -> Process | None:
        process = self.runs.get(job.number)
        if process is None:
            return None
        now = self.clock()
        if process.alive and not process.hangs:
            if process.changes_at is not None and now >= process.changes_at:
                target = Allocation.parse(process.told, None)
                process.devices, process.changes_at = target.num_devices, None
                if job.held is not None:
                    process.held = left_after(job.held, target, job.desired)
            kind = process.held.allocation.device_type
            allocation = CLUSTER.packed(kind, process.devices)
            pace = step_time_s(allocation) if not job.spec.rigid else job.spec.expected_s
            process.step += max(0.0, now - max(process.updated, process.begins)) / pace
            process.updated = now
            saved = int(process.step) // self.save_every * self.save_every
            process.saved = max(process.saved, saved)
            if process.step >= job.spec.steps:
                process.step, process.alive, process.exit_code = job.spec.steps, False, 0
            elif process.stops_at is not None and now >= process.stops_at:
                process.alive, process.exit_code, process.saved = False, 75, int(process.step)
        self.saved[job.number] = max(self.saved.get(job.number, 0), process.saved)
        return process

    def launch(self, job: Job, orders: Orders) -> None:
        self.before("launch")
        old = self._now(job)
        if old is not None and old.alive:
            raise StillAlive("a process of an earlier run is alive")
        assert job.held is not None
        for number, other in self.runs.items():  # the machine itself: no device is given twice
            if other.alive and other.held.allocation.device_type == job.held.allocation.device_type:
                mine = {(node, i) for node, numbers in job.held.devices for i in numbers}
                theirs = {(node, i) for node, numbers in other.held.devices for i in numbers}
                assert not mine & theirs, f"jobs {job.number} and {number} share {mine & theirs}"
        now = self.clock()
        start = self.saved.get(job.number, 0)
        process = Process(job.run, job.held, job.held.allocation.num_devices, start, start, now, now + self.start_s)
        code = self.crash(job)
        if code is not None:
            process.alive, process.exit_code = False, code
        self.runs[job.number] = process
        self.launches.append((job.number, job.run))
        self.before("launched")

    def tell(self, job: Job, orders: Orders) -> None:
        self.before("tell")
        process = self._now(job)
        if process is not None and process.alive and process.told != job.told and not self.refuses:
            process.told, process.changes_at = job.told, self.clock() + self.change_s

    def stop(self, job: Job) -> None:
        self.before("stop")
        process = self._now(job)
        if process is not None and process.stops_at is None:
            process.stops_at = self.clock() + self.stop_s

    def signal(self, job: Job, number: int) -> None:
        self.before("signal")
        process = self._now(job)
        if process is not None and process.alive and number == signal.SIGKILL:
            process.alive, process.exit_code = False, -9

    def heartbeat(self, job: Job) -> Heartbeat:
        process = self._now(job)
        if process is None or process.run != job.run:
            return Heartbeat(alive=process is not None and process.alive)
        progress = None
        if process.updated > process.begins or not process.alive:
            kind = process.held.allocation.device_type
            progress = Progress(
                step=int(process.step),
                loss=5.0 / (1 + process.step),
                step_time_s=step_time_s(CLUSTER.packed(kind, process.devices)),
                grid=f"cpu:{process.devices}/s1",
                num_devices=process.devices,
                seen_at=process.updated,
                points=((int(process.step), process.updated, 1.0, 1.0),),
            )
        told = "pending" if process.changes_at is not None else "refused" if self.refuses and job.told else ""
        return Heartbeat(
            alive=process.alive,
            exit_code=process.exit_code,
            progress=progress,
            told=told,
            why="no plan" if self.refuses else "",
        )

    def lost_nodes(self) -> frozenset[Node]:
        return frozenset(self.lost)

    def spans_nodes(self, spec: Submission) -> bool:
        return spec.kind != "closure"

    def close(self, *, idle: bool) -> None:
        pass

    def logs(self, job: Job, offset: int, max_bytes: int) -> tuple[bytes, int]:
        text = b"first line\nlast line\n"[offset : offset + max_bytes]
        return text, offset + len(text)


class StubIndexer:
    """Indexes of one kind of model; a job called ``hopeless`` has no plan anywhere."""

    def key(self, job: Job) -> str:
        bounds = (job.spec.min_devices, job.spec.max_devices, job.spec.types)
        return f"{job.spec.name} {bounds}"

    def look(self, job: Job, allocations: Sequence[Allocation]) -> Indexing:
        if job.spec.name == "hopeless":
            return Indexing(error="no plan fits")
        return Indexing(index={a: IndexedStep(step_time_s=step_time_s(a)) for a in allocations})

    def drop(self, job: Job) -> None:
        pass


def recipe(name: str = "gpt", **values) -> Submission:
    return Submission(**{"kind": "recipe", "name": name, "recipe": "x: 1", "steps": 100, **values})


class Bench:
    """A service on the stub machine, killed and started again at will."""

    def __init__(self, folder, *, policy: str = "arena", rules: Rules | None = None, **executor) -> None:
        self.clock = Clock()
        self.executor = StubExecutor(self.clock, **executor)
        self.folder, self.policy, self.rules = folder, policy, rules or Rules(change_cost_s=4.0)
        self.notes: list[str] = []
        self.start()

    def start(self) -> None:
        """The service begins, or begins again from its state."""
        self.store = Store(self.folder / "state.sqlite")
        self.loop = Reconciler(
            store=self.store,
            cluster=CLUSTER,
            policy=make_policy(self.policy)[0],
            executor=self.executor,
            indexer=StubIndexer(),
            clock=self.clock,
            rules=self.rules,
            note=self.notes.append,
        )
        self.requests = Requests(store=self.store, cluster=CLUSTER, executor=self.executor, clock=self.clock)

    def submit(self, spec: Submission) -> Job:
        answer = self.requests.answer({"do": "submit", "job": spec.to_json()})
        assert "job" in answer, answer
        return self.store.job(answer["job"]["id"])

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        """Let time pass, a tick each ``step_s``."""
        for _ in range(int(seconds / step_s)):
            self.loop.tick()
            self.clock.now += step_s

    def job(self, job: Job) -> Job:
        return self.store.job(job.id)

    def kinds(self, job: Job | None = None) -> list[str]:
        return [e["kind"] for e in self.store.events(last=100_000) if job is None or e["job"] == job.id]
