"""The loop: what should be, what is, and what to do about the difference.

A tick observes, takes requests, decides when something happened, and acts. Each change of state is
committed before it is acted on, and every action may be repeated, so that the service can be killed between
any two lines: its successor reads where things stand and goes on. Devices belong to a job from before its
launch until its end, or the smaller grid, is confirmed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from arena_jax.errors import ArenaError, UsageError
from arena_jax.scheduler import Cluster, Policy
from arena_jax.service.decisions import Decided, Decider, lost_places
from arena_jax.service.executor import Executor
from arena_jax.service.indexing import Indexer
from arena_jax.service.job import ENDED, LIVE, Job, Phase
from arena_jax.service.job_indexes import JobIndexes
from arena_jax.service.nodes import NodeStates
from arena_jax.service.observer import Observer
from arena_jax.service.queues import Queues, Usage, worth_of
from arena_jax.service.rules import Rules
from arena_jax.service.steering import Steering
from arena_jax.service.store import Event, Point, StateError, Store

# With thousands of jobs a decision takes a while; so many times as long is left between two, for requests.
_MOST_DECIDING = 4.0


class Reconciler:
    """Brings the jobs to where the policy wants them, one :meth:`tick` at a time.

    Args:
        clock: unix seconds.
        note: told what happens, for the service's own log.
    """

    def __init__(
        self,
        *,
        store: Store,
        cluster: Cluster,
        policy: Policy,
        executor: Executor,
        indexer: Indexer,
        clock: Callable[[], float],
        queues: Queues | None = None,
        rules: Rules | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.cluster, self.executor, self.indexer = store, cluster, executor, indexer
        self.queues, self.rules = queues or Queues(), rules or Rules()
        self._clock, self._note = clock, note
        now = clock()
        epoch = store.meta("epoch")
        if epoch is None:
            epoch = now
            store.put_meta("epoch", epoch)
        self._decider = Decider(cluster=cluster, policy=policy, epoch=float(epoch))
        self._nodes = NodeStates(store)
        kept = store.meta("policy")
        policy.reset()
        if kept is not None and kept["name"] == policy.name:
            policy.set_state(kept["state"])
        self.jobs: dict[int, Job] = {job.number: job for job in store.jobs_after(0)}
        self._last = max(self.jobs, default=0)
        self.indexes = JobIndexes(store, cluster, indexer, executor.spans_nodes)
        self._trigger: list[str] = ["service start"] if self.jobs else []
        self._observer = Observer(
            store=store,
            executor=executor,
            indexes=self.indexes,
            rules=self.rules,
            trigger=self._trigger.append,
            note=note,
        )
        self._steering = Steering(
            store=store, cluster=cluster, executor=executor, indexes=self.indexes, rules=self.rules, note=note
        )
        self._usage = Usage()
        self._worth = worth_of(cluster)
        self._wake_at: float | None = None
        self._decided_at = 0.0
        self._decision_s = 0.0
        self._advanced_at = now
        self._said: dict[int, str] = {}
        self._policy_state: dict[str, Any] | None = None
        self._check_executor()
        for job in self.jobs.values():
            self._check_held(job)
            if job.plan_key:
                self.indexes.load(job.plan_key)

    def _check_executor(self) -> None:
        """What runs under another executor would be taken for ended, and started a second time."""
        before = self.store.meta("executor", "local")
        alive = [job.id for job in self.jobs.values() if job.live]
        if alive and before != self.executor.name:
            raise UsageError(
                f"{', '.join(alive[:5])} of this state folder ran under the {before} executor, this is the "
                f"{self.executor.name} executor",
                hint=f"start with --executor {before}, pause or cancel those jobs, and change it then",
            )
        self.store.put_meta("executor", self.executor.name)

    def _check_held(self, job: Job) -> None:
        """The cluster file may have changed since the last time: what runs must still be in it."""
        groups = {group.device_type: group for group in self.cluster.groups}
        for what, place in (("held", job.held), ("desired", job.desired)):
            if place is None:
                continue
            group = groups.get(place.allocation.device_type)
            if (
                group is not None
                and max(place.nodes) < group.num_nodes
                and place.allocation.devices_per_node <= group.devices_per_node
            ):
                continue
            if what == "held":
                raise UsageError(
                    f"{job.id} runs on {place.allocation}, nodes {list(place.nodes)}, which this cluster file lacks",
                    hint="start the service with the old file, drain those nodes, and change it then",
                )
            job.desired = None

    # The tick.

    def tick(self) -> None:
        """One round. Raises :class:`ArenaError` where the state cannot be written; nothing was acted on then."""
        now = self._clock()
        self._account(now)
        self._take(now)
        self._index(now)
        self._count_nodes(now)
        self._observe(now)
        if self._due(now):
            self._decide(now)
        self._act(now)

    @property
    def down(self) -> set[tuple[str, int]]:
        """Nodes that are not up."""
        return self._nodes.down

    def _account(self, now: float) -> None:
        passed = max(0.0, now - self._advanced_at)
        self._advanced_at = now
        holding = []
        for job in self.jobs.values():
            if job.held is not None:
                devices = job.held.allocation.num_devices
                job.run_s += passed
                job.device_s += passed * devices
                holding.append((job.spec.queue, devices * self._worth[job.held.allocation.device_type]))
        self._usage.advance(now, holding)

    # Requests.

    def _take(self, now: float) -> None:
        wishes = self.store.wishes()  # before the jobs: a job may be submitted and cancelled at once
        for job in self.store.jobs_after(self._last):
            self.jobs[job.number] = job
            self._last = job.number
        if not wishes:
            return
        changed: dict[int, Job] = {}
        events: list[Event] = []
        for _, wish in wishes:
            self._obey(wish, now, changed, events)
        self._save(changed.values(), events, taken=wishes[-1][0])

    def _obey(self, wish: Mapping[str, Any], now: float, changed: dict[int, Job], events: list[Event]) -> None:
        what = wish["do"]
        if what in ("drain", "undrain"):
            self._nodes.drain(wish["node"], what == "drain")
            events.append((now, "", what, {"node": wish["node"]}))
            self._trigger.append(f"{what} {wish['node']}")
            return
        job = self.jobs.get(wish["job"])
        if job is None or job.phase in ENDED:
            return
        changed[job.number] = job
        if what == "cancel":
            job.cancelled, job.desired = True, None
            events.append((now, job.id, "cancel", {}))
            if not job.live:
                self.indexer.drop(job)
                self._observer.end(job, Phase.CANCELLED, "cancelled by its user", now, events)
        elif what == "resize":
            job.pin = "" if wish["grid"] == "auto" else wish["grid"]
            events.append((now, job.id, "pin", {"to": wish["grid"]}))
        self._trigger.append(f"{what} {job.id}")

    # Plan indexes.

    def _index(self, now: float) -> None:
        changed: list[Job] = []
        events: list[Event] = []
        for job in [job for job in self.jobs.values() if job.phase is Phase.PLANNING]:
            try:
                done = self.indexes.look(job)
            except StateError:
                raise
            except ArenaError as error:
                self._observer.end(job, Phase.FAILED, error.message, now, events)
                changed.append(job)
                continue
            except Exception as error:  # a job that trips the indexer up must not hold up the others
                self._observer.end(job, Phase.FAILED, f"planning failed: {type(error).__name__}: {error}", now, events)
                changed.append(job)
                continue
            if done:
                job.phase, job.reason = Phase.QUEUED, ""
                self._trigger.append(f"arrival of {job.id}")
                events.append((now, job.id, "planned", {"allocations": len(self.indexes.of[job.plan_key])}))
            if done or job.reason != self._said.get(job.number, ""):
                self._said[job.number] = job.reason
                changed.append(job)
        if changed:
            self._save(changed, events)

    # Observation.

    def _count_nodes(self, now: float) -> None:
        """Which nodes are there. What ran on one that is lost is found by its heartbeat."""
        events = self._nodes.count(self.executor.lost_nodes(), now)
        if events:
            self._save([], events)
        for _, _, kind, data in events:
            self._trigger.append(f"{kind}: {data['node']}")
            self._note(f"{kind}: {data['node']}")

    def _observe(self, now: float) -> None:
        changed: list[Job] = []
        events: list[Event] = []
        points: dict[int, list[Point]] = {}
        for job in [job for job in self.jobs.values() if job.phase in LIVE]:
            try:
                beat = self.executor.heartbeat(job)
            except ArenaError as error:
                if self._said.get(job.number) != error.message:
                    self._said[job.number] = error.message
                    self._note(f"{job.id}: {error.message}")
                continue
            before = (job.step, job.phase, job.held, job.told, job.reason, job.killed, job.settled)
            self._observer.see(job, beat, now, events, points)
            if before != (job.step, job.phase, job.held, job.told, job.reason, job.killed, job.settled):
                changed.append(job)
        if changed:
            self._save(changed, events, points=points)

    # Decisions.

    def _due(self, now: float) -> bool:
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self._trigger.append("the policy's timer")
        waking = [job for job in self.jobs.values() if 0 < job.not_before <= now]
        for job in waking:
            job.not_before = 0.0
            self._trigger.append(f"{job.id} may be tried again")
        wait_s = max(self.rules.round_s, self.rules.settle_s, _MOST_DECIDING * self._decision_s)
        return bool(self._trigger) and now - self._decided_at >= wait_s

    def _decide(self, now: float) -> None:
        trigger = [*self._trigger]
        self._trigger.clear()
        self._decided_at = now
        changed: dict[int, Job] = {}
        events: list[Event] = []
        planned = [job for job in self.jobs.values() if job.plan_key and job.phase not in ENDED | {Phase.PLANNING}]
        for job in lost_places(planned, self.down):
            job.desired = None
            changed[job.number] = job
        active = [job for job in planned if not job.cancelled]
        factors = self._usage.factors(self.queues, {job.spec.queue for job in active})
        times = {key: self.indexes.step_times(key) for key in {job.plan_key for job in active}}
        self._decider.down = self.down
        decided = self._decider.decide(active, times, now, self._observer.costs, factors)
        for change in decided.changes:
            job = change.job
            job.desired = change.place
            changed[job.number] = job
            if change.place is None:
                job.settled = True
                continue
            if job.started:
                job.num_changes += 1
            job.since, job.cause, job.settled = now, change.cause, False
            job.charge_until = max(now + change.charge_s, job.charge_until if job.live else 0.0)
        for job in decided.rejected:
            self._observer.end(job, Phase.FAILED, "turned away by the policy: its deadline cannot be met", now, events)
            changed[job.number] = job
        self._wake_at, self._decision_s = decided.wake_at, decided.took_s
        if decided.changes:
            events.append((now, "", "decision", self._log_entry(decided, trigger)))
        if changed or events:
            self._save(changed.values(), events)
        state = dict(self._decider.policy.get_state())
        if state != self._policy_state:
            self._policy_state = state
            self.store.put_meta("policy", {"name": self._decider.policy.name, "state": state})

    def _log_entry(self, decided: Decided, trigger: list[str]) -> dict[str, Any]:
        return {
            "policy": self._decider.policy.name,
            "trigger": trigger[:8] + ([f"and {len(trigger) - 8} more"] if len(trigger) > 8 else []),
            "num_jobs": decided.num_jobs,
            "took_s": round(decided.took_s, 4),
            "changes": [change.to_json() for change in decided.changes[:200]],
        }

    # Actions.

    def _act(self, now: float) -> None:
        self._steering.act(list(self.jobs.values()), now)
        self._forget()

    # Keeping.

    def _save(
        self,
        jobs: Iterable[Job],
        events: Iterable[Event] = (),
        *,
        points: Mapping[int, Iterable[Point]] | None = None,
        taken: int = 0,
    ) -> None:
        self.store.save(jobs, events, points=points, taken=taken)

    def _forget(self) -> None:
        """Keep only what has not ended in memory."""
        for number in [number for number, job in self.jobs.items() if job.phase in ENDED]:
            del self.jobs[number]
            self._said.pop(number, None)
        self.indexes.keep({job.plan_key for job in self.jobs.values()})
