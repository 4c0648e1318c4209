"""What a heartbeat makes of a job: progress, a change that is complete, a crash, its end.

Changes jobs in memory only; who calls commits them before anything is done about it.
"""

import signal
import statistics
from collections.abc import Callable

from arena_jax.errors import EXIT_INFEASIBLE, EXIT_USAGE, ArenaError
from arena_jax.grid import Allocation
from arena_jax.scheduler import RestartCosts
from arena_jax.scheduler.costs import CAUSES
from arena_jax.service.executor import Executor, Heartbeat
from arena_jax.service.job import Job, Phase
from arena_jax.service.job_indexes import JobIndexes
from arena_jax.service.rules import Rules
from arena_jax.service.steering import left_after
from arena_jax.service.store import Event, Point, Store

# Of a job's curves, so many points are kept at most.
_MOST_POINTS = 2000
_TAIL_LINES, _TAIL_BYTES = 20, 16_384


class Observer:
    """Judges heartbeats.

    Args:
        trigger: takes what is worth a decision.
        note: told what happens, for the service's own log.

    Attributes:
        costs: of changes, as they were measured.
    """

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        indexes: JobIndexes,
        rules: Rules,
        trigger: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._store, self._executor, self._indexes, self._rules = store, executor, indexes, rules
        self._trigger, self._note = trigger, note
        self.costs = self._measured_costs()

    def see(self, job: Job, beat: Heartbeat, now: float, events: list[Event], points: dict[int, list[Point]]) -> None:
        """Bring the job up to date with what was heard of it; adds to events and points."""
        if beat.progress is not None:
            self._progress(job, beat, now, points)
        if beat.alive:
            self._alive(job, beat, now, events)
        else:
            self._ended(job, beat, now, events)

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
            self._trigger(f"first step of {job.id}")
            self._arrived(job, now)
        if job.phase is Phase.RUNNING:
            if job.told:
                self._told(job, beat, now, events)
            elif beat.progress is not None and self._indexes.learn(job):
                self._trigger(f"step time of {job.id}")
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
        elif beat.told == "refused" or now - job.told_at > self._rules.change_grace_s:
            why = beat.why or f"it was not made within {self._rules.change_grace_s:g} s"
            events.append((now, job.id, "refused", {"to": job.told, "why": why}))
            self._note(f"{job.id} does not go to {job.told} in its process: {why}")
            job.told = ""
            job.begin_stop(f"to be launched anew: {why}", now)

    def _arrived(self, job: Job, now: float, cost_s: float | None = None) -> None:
        """A change is complete: it is known now what it cost, by default the time since it was decided."""
        if not job.settled:
            job.settled = True
            job.charge_until = min(job.charge_until, now) if job.charge_until else now
            if job.cause in CAUSES:
                self._store.put_charge(job.cause, max(0.0, now - job.since) if cost_s is None else cost_s)
                self.costs = self._measured_costs()

    def _measured_costs(self) -> RestartCosts:
        costs = {}
        for cause in CAUSES:
            known = self._store.charges(cause)
            inside = self._executor.elastic and cause in ("grow", "shrink")
            prior_s = self._rules.resize_cost_s if inside else self._rules.change_cost_s
            costs[cause] = statistics.median(known) if known else prior_s
        return RestartCosts(**costs)

    def _check_hang(self, job: Job, now: float, events: list[Event]) -> None:
        if job.killed or job.spec.rigid:
            return
        if job.phase is Phase.STARTING and now - job.launched_at > self._rules.start_grace_s:
            why = f"no step within {self._rules.start_grace_s:g} s of its launch"
        elif job.phase is Phase.RUNNING:
            patience = max(self._rules.hang_s, 20 * (job.step_time_s or 0.0))
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
        self._trigger(f"end of {job.id}")
        if job.cancelled:
            self.end(job, Phase.CANCELLED, "cancelled by its user", now, events)
        elif code == 0:
            self.end(job, Phase.FINISHED, "", now, events)
        elif was is Phase.STOPPING and not (job.killed and job.reason.startswith("killed")):
            job.phase, job.reason = Phase.QUEUED, ""
            job.paused = job.paused or job.desired is None
            # Where it goes it may have to wait for devices: what it has left is told by an event of its own.
            kind = "pause" if job.desired is None else "left"
            events.append((now, job.id, kind, {"from": job.ran_on, "step": job.step}))
        elif job.spec.rigid:
            what = "was lost" if code is None else f"ended with exit code {code}"
            self.end(job, Phase.FAILED, f"its command {what}", now, events)
        elif code in (EXIT_USAGE, EXIT_INFEASIBLE):
            self.end(job, Phase.FAILED, f"it cannot run: exit code {code}", now, events)
        else:
            self._crashed(job, job.reason or _how_it_ended(code), now, events)

    def _crashed(self, job: Job, why: str, now: float, events: list[Event]) -> None:
        if job.step > job.crash_step and job.crash_step >= 0:
            job.crashes = 0
        job.crashes += 1
        job.crash_step = max(job.step, job.crash_step, 0)
        events.append((now, job.id, "crash", {"why": why, "step": job.step, "crashes": job.crashes}))
        self._note(f"{job.id}: {why}")
        if job.crashes >= self._rules.most_crashes:
            self.end(job, Phase.FAILED, f"{job.crashes} crashes without progress; the last: {why}", now, events)
            return
        wait_s = self._rules.back_off_s * 2 ** (job.crashes - 1)
        job.phase, job.desired, job.not_before = Phase.QUEUED, None, now + wait_s
        job.reason = f"{why}; again in {wait_s:g} s"

    def end(self, job: Job, phase: Phase, reason: str, now: float, events: list[Event]) -> None:
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
                piece, after = self._executor.logs(job, end, 1 << 20)
                if after == end:
                    break
                text, end = (text + piece)[-_TAIL_BYTES:], after
        except ArenaError:
            return []
        return text.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its process is gone"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
