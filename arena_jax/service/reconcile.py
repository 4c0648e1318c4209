"""The loop: what should be, what is, and what to do about the difference.

A tick observes, takes requests, decides when something happened, and acts. Each change of state is
committed before it is acted on, and every action may be repeated, so that the service can be killed between
any two lines: its successor reads where things stand and goes on. Devices belong to a job from before its
launch until its end, or the smaller grid, is confirmed.
"""

import signal
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arena_jax.errors import EXIT_INFEASIBLE, EXIT_USAGE, ArenaError, UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster, Policy, RestartCosts
from arena_jax.scheduler.costs import CAUSES
from arena_jax.service.decisions import Decided, Decider, lost_places
from arena_jax.service.devices import Ledger
from arena_jax.service.executor import Executor, Heartbeat, LaunchError, StillAlive
from arena_jax.service.indexing import Indexer
from arena_jax.service.job import ENDED, LIVE, Held, Job, Phase, Place
from arena_jax.service.job_indexes import JobIndexes
from arena_jax.service.queues import Queues, Usage, worth_of
from arena_jax.service.store import Point, StateError, Store

Event = tuple[float, str, str, Mapping[str, Any]]
# With thousands of jobs a decision takes a while; so many times as long is left between two, for requests.
_MOST_DECIDING = 4.0
# Of a job's curves, so many points are kept at most.
_MOST_POINTS = 2000
_TAIL_LINES, _TAIL_BYTES = 20, 16_384


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When to give up waiting. Seconds, but for ``most_crashes``.

    Attributes:
        stop_grace_s: to save and end; then it is killed.
        start_grace_s: from launch to the first step.
        hang_s: without a sign of life, or 20 steps if that is longer; then it is killed.
        change_grace_s: for a change inside the process; then it is stopped and launched anew.
        back_off_s: after the first crash, doubled with each one that follows without progress.
        most_crashes: without progress in between; then it has failed.
        round_s: between decisions; 0 decides at events.
        settle_s: events within so long are decided on together.
        change_cost_s: what a new process costs while none of its cause was measured.
        resize_cost_s: the same of a change inside the process.
    """

    stop_grace_s: float = 120.0
    start_grace_s: float = 900.0
    hang_s: float = 300.0
    change_grace_s: float = 300.0
    back_off_s: float = 5.0
    most_crashes: int = 4
    round_s: float = 0.0
    settle_s: float = 0.5
    change_cost_s: float = 20.0
    resize_cost_s: float = 5.0


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
        self._drained = {_node(name) for name, state in store.nodes().items() if state != "up"}
        self._lost = {_node(name) for name in store.meta("lost", [])}
        kept = store.meta("policy")
        policy.reset()
        if kept is not None and kept["name"] == policy.name:
            policy.set_state(kept["state"])
        self.jobs: dict[int, Job] = {job.number: job for job in store.jobs_after(0)}
        self._last = max(self.jobs, default=0)
        self.indexes = JobIndexes(store, cluster, indexer, executor.spans_nodes)
        self._usage = Usage()
        self._worth = worth_of(cluster)
        self._trigger: list[str] = ["service start"] if self.jobs else []
        self._wake_at: float | None = None
        self._decided_at = 0.0
        self._decision_s = 0.0
        self._costs = self._measured_costs()
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
        before = self.store.meta("executor", self.executor.name)
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
        return self._drained | self._lost

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
            node = _node(wish["node"])
            (self._drained.add if what == "drain" else self._drained.discard)(node)
            self.store.put_node(wish["node"], "drained" if what == "drain" else "up")
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
                self._end(job, Phase.CANCELLED, "cancelled by its user", now, events)
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
                self._end(job, Phase.FAILED, error.message, now, events)
                changed.append(job)
                continue
            except Exception as error:  # a job that trips the indexer up must not hold up the others
                self._end(job, Phase.FAILED, f"planning failed: {type(error).__name__}: {error}", now, events)
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
        lost = set(self.executor.lost_nodes())
        if lost == self._lost:
            return
        self.store.put_meta("lost", sorted(_name(node) for node in lost))
        events: list[Event] = [(now, "", "node lost", {"node": _name(node)}) for node in sorted(lost - self._lost)]
        events += [(now, "", "node back", {"node": _name(node)}) for node in sorted(self._lost - lost)]
        self._lost = lost
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
            if beat.progress is not None:
                self._progress(job, beat, now, points)
            if beat.alive:
                self._alive(job, beat, now, events)
            else:
                self._ended(job, beat, now, events)
            if before != (job.step, job.phase, job.held, job.told, job.reason, job.killed, job.settled):
                changed.append(job)
        if changed:
            self._save(changed, events, points=points)

    def _progress(self, job: Job, beat: Heartbeat, now: float, points: dict[int, list[Point]]) -> None:
        progress = beat.progress
        assert progress is not None
        job.step, job.loss, job.grid = progress.step, progress.loss, progress.grid
        job.step_time_s = progress.step_time_s
        job.seen_at = min(now, progress.seen_at)
        every = -(-job.spec.steps // _MOST_POINTS)
        kept = [point for point in progress.points if point[0] % every == 0]
        if kept:
            points[job.number] = kept

    def _alive(self, job: Job, beat: Heartbeat, now: float, events: list[Event]) -> None:
        if job.phase is Phase.STARTING and (beat.progress is not None or job.spec.rigid):
            job.phase, job.reason = Phase.RUNNING, ""
            self._trigger.append(f"first step of {job.id}")
            self._arrived(job, now)
        if job.phase is Phase.RUNNING:
            if job.told:
                self._told(job, beat, now, events)
            elif beat.progress is not None and self.indexes.learn(job):
                self._trigger.append(f"step time of {job.id}")
        self._check_hang(job, now, events)

    def _told(self, job: Job, beat: Heartbeat, now: float, events: list[Event]) -> None:
        """See what has become of a change inside the process."""
        assert job.held is not None
        target = Allocation.parse(job.told, None)
        if beat.progress is not None and beat.progress.num_devices == target.num_devices and beat.told != "pending":
            kind = "shrink" if target.num_devices < Allocation.parse(job.ran_on, None).num_devices else "grow"
            events.append((now, job.id, kind, {"from": job.ran_on, "to": job.told, "how": "in its process"}))
            job.held = left_after(job.held, target, job.desired)
            job.ran_on, job.told = job.told, ""
            # It trained on until the change was made: only standing still was lost.
            self._arrived(job, now, beat.progress.stall_s)
        elif beat.told == "refused" or now - job.told_at > self.rules.change_grace_s:
            why = beat.why or f"it was not made within {self.rules.change_grace_s:g} s"
            events.append((now, job.id, "refused", {"to": job.told, "why": why}))
            self._note(f"{job.id} does not go to {job.told} in its process: {why}")
            job.told = ""
            self._begin_stop(job, f"to be launched anew: {why}", now)

    def _arrived(self, job: Job, now: float, cost_s: float | None = None) -> None:
        """A change is complete: it is known now what it cost, by default the time since it was decided."""
        if not job.settled:
            job.settled = True
            job.charge_until = min(job.charge_until, now) if job.charge_until else now
            if job.cause in CAUSES:
                self.store.put_charge(job.cause, max(0.0, now - job.since) if cost_s is None else cost_s)
                self._costs = self._measured_costs()

    def _measured_costs(self) -> RestartCosts:
        costs = {}
        for cause in CAUSES:
            known = self.store.charges(cause)
            inside = self.executor.elastic and cause in ("grow", "shrink")
            prior_s = self.rules.resize_cost_s if inside else self.rules.change_cost_s
            costs[cause] = statistics.median(known) if known else prior_s
        return RestartCosts(**costs)

    def _check_hang(self, job: Job, now: float, events: list[Event]) -> None:
        if job.killed or job.spec.rigid:
            return
        if job.phase is Phase.STARTING and now - job.launched_at > self.rules.start_grace_s:
            why = f"no step within {self.rules.start_grace_s:g} s of its launch"
        elif job.phase is Phase.RUNNING:
            patience = max(self.rules.hang_s, 20 * (job.step_time_s or 0.0))
            if now - max(job.seen_at, job.launched_at, job.told_at) <= patience:
                return
            why = f"no sign of life for {patience:g} s"
        else:
            return
        job.killed, job.reason = True, f"killed: {why}"
        events.append((now, job.id, "hang", {"why": why}))
        self._note(f"{job.id} hangs: {why}")

    def _ended(self, job: Job, beat: Heartbeat, now: float, events: list[Event]) -> None:
        """No process of it is alive any more: its devices are free."""
        was, code = job.phase, beat.exit_code
        job.held, job.told, job.exit_code = None, "", code
        self._trigger.append(f"end of {job.id}")
        if job.cancelled:
            self._end(job, Phase.CANCELLED, "cancelled by its user", now, events)
        elif code == 0:
            self._end(job, Phase.FINISHED, "", now, events)
        elif was is Phase.STOPPING and not (job.killed and job.reason.startswith("killed")):
            job.phase, job.reason = Phase.QUEUED, ""
            job.paused = job.paused or job.desired is None
            if job.desired is None:
                events.append((now, job.id, "pause", {"from": job.ran_on, "step": job.step}))
        elif job.spec.rigid:
            what = "was lost" if code is None else f"ended with exit code {code}"
            self._end(job, Phase.FAILED, f"its command {what}", now, events)
        elif code in (EXIT_USAGE, EXIT_INFEASIBLE):
            self._end(job, Phase.FAILED, f"it cannot run: exit code {code}", now, events)
        else:
            self._crashed(job, job.reason or _how_it_ended(code), now, events)

    def _crashed(self, job: Job, why: str, now: float, events: list[Event]) -> None:
        if job.step > job.crash_step and job.crash_step >= 0:
            job.crashes = 0
        job.crashes += 1
        job.crash_step = max(job.step, job.crash_step, 0)
        events.append((now, job.id, "crash", {"why": why, "step": job.step, "crashes": job.crashes}))
        self._note(f"{job.id}: {why}")
        if job.crashes >= self.rules.most_crashes:
            self._end(job, Phase.FAILED, f"{job.crashes} crashes without progress; the last: {why}", now, events)
            return
        wait_s = self.rules.back_off_s * 2 ** (job.crashes - 1)
        job.phase, job.desired, job.not_before = Phase.QUEUED, None, now + wait_s
        job.reason = f"{why}; again in {wait_s:g} s"

    def _end(self, job: Job, phase: Phase, reason: str, now: float, events: list[Event]) -> None:
        job.phase, job.reason, job.finished_at = phase, reason, now
        job.desired, job.held, job.told = None, None, ""
        if phase is Phase.FAILED:
            job.log_tail = self._tail(job)
        kind = {Phase.FINISHED: "finish", Phase.FAILED: "fail", Phase.CANCELLED: "cancelled"}[phase]
        events.append((now, job.id, kind, {"from": job.ran_on or None, "step": job.step, "why": reason}))
        self._note(f"{job.id} {phase}{f': {reason}' if reason else ''}")

    def _tail(self, job: Job) -> list[str]:
        try:
            text, end = b"", 0
            while True:  # logs are read in pieces; only the end is kept
                piece, after = self.executor.logs(job, end, 1 << 20)
                if after == end:
                    break
                text, end = (text + piece)[-_TAIL_BYTES:], after
        except ArenaError:
            return []
        return text.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]

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
        trigger, self._trigger = self._trigger, []
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
        decided = self._decider.decide(active, times, now, self._costs, factors)
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
            self._end(job, Phase.FAILED, "turned away by the policy: its deadline cannot be met", now, events)
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
        jobs = list(self.jobs.values())
        ledger = Ledger(self.cluster, jobs)
        for job in jobs:  # first what frees devices
            if job.live:
                self._steer(job, ledger, now)
        for job in jobs:
            if job.phase is Phase.QUEUED and job.desired is not None and not job.cancelled and job.not_before <= now:
                held = ledger.fit(job.desired)
                if held is not None:
                    ledger.take(held)
                    self._launch(job, held, now)
        self._forget()

    def _steer(self, job: Job, ledger: Ledger, now: float) -> None:
        held, want = job.held, job.desired
        if job.phase is Phase.STOPPING or job.killed:
            if not job.killed and now - job.stop_at > self.rules.stop_grace_s:
                job.killed = True
                self._save(
                    [job], [(now, job.id, "kill", {"why": f"not ended {self.rules.stop_grace_s:g} s after asked"})]
                )
            if job.killed:
                self.executor.signal(job, signal.SIGKILL)
            else:
                self.executor.stop(job)
            return
        assert held is not None
        same_type = want is not None and want.allocation.device_type == held.allocation.device_type
        if want is None or job.cancelled or not same_type:
            why = "cancelled" if job.cancelled else "preempted" if want is None else f"to move to {want.allocation}"
            self._begin_stop(job, why, now)
            self._save([job])
            self.executor.stop(job)
            return
        if job.told:
            self.executor.tell(job, self.indexes.orders(job))  # again and again: it may not have heard
            return
        if want.allocation == Allocation.parse(job.ran_on, None) and set(want.nodes) == set(held.nodes):
            return
        more = want.allocation.num_devices - held.allocation.num_devices
        shrinks = more < 0 and set(want.nodes) <= set(held.nodes)
        grows = more > 0 and set(want.nodes) >= set(held.nodes)
        if not self.executor.elastic or not (shrinks or grows):
            self._begin_stop(job, f"to go to {want.allocation}", now)
            self._save([job])
            self.executor.stop(job)
            return
        if job.phase is Phase.STARTING:
            return  # its hook is not there yet
        if grows:
            ledger.give_back(held)
            grown = ledger.fit(want, held)
            ledger.take(held if grown is None else grown)
            if grown is None:
                return  # until others have let go
            job.held = grown
        job.told, job.told_at = str(want.allocation), now
        self._save([job])
        self.executor.tell(job, self.indexes.orders(job))

    def _begin_stop(self, job: Job, why: str, now: float) -> None:
        job.phase, job.reason, job.stop_at, job.told = Phase.STOPPING, why, now, ""

    def _launch(self, job: Job, held: Held, now: float) -> None:
        job.held, job.phase, job.run, job.launched_at = held, Phase.STARTING, job.run + 1, now
        job.killed, job.told, job.exit_code, job.seen_at, job.reason = False, "", None, now, ""
        job.first_start_at = job.first_start_at or now
        kind = self._kind_of_start(job, held)
        event = {"from": job.ran_on or None, "to": str(held.allocation), "run": job.run, "nodes": list(held.nodes)}
        job.ran_on, job.paused = str(held.allocation), False
        self._save([job], [(now, job.id, kind, event | {"how": "a new process"})])
        try:
            self.executor.launch(job, self.indexes.orders(job))
        except StillAlive as error:  # an earlier process of it holds the devices, and is waited for
            self._note(f"{job.id}: {error.message}")
        except LaunchError as error:
            # Nothing ran, so that this is no crash: the disk may be full.
            job.held, job.phase, job.not_before = None, Phase.QUEUED, now + self.rules.back_off_s
            job.desired, job.reason = None, error.message
            self._save([job], [(now, job.id, "not started", {"why": error.message})])

    @staticmethod
    def _kind_of_start(job: Job, held: Held) -> str:
        if not job.ran_on:
            return "start"
        before = Allocation.parse(job.ran_on, None)
        if job.paused or job.crashes:
            return "resume"
        if before.device_type != held.allocation.device_type:
            return "move"
        if before.num_devices == held.allocation.num_devices:
            return "migrate"
        return "grow" if held.allocation.num_devices > before.num_devices else "shrink"

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


def left_after(held: Held, target: Allocation, desired: Place | None) -> Held:
    """What a job still holds when it has gone to a smaller allocation; all of it where it has grown."""
    if target == held.allocation:
        return held
    wanted = desired.nodes if desired is not None and desired.allocation == target else held.nodes
    kept = [(node, numbers[: target.devices_per_node]) for node, numbers in held.devices if node in wanted]
    return Held(target, tuple(kept[: target.num_nodes]))


def _node(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("/")
    return kind, int(number)


def _name(node: tuple[str, int]) -> str:
    return f"{node[0]}/{node[1]}"


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its process is gone"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
