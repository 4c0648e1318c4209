"""What to do about the difference between where a job is and where it should be.

Each action is committed before it is made, and may be repeated.
"""

import signal
from collections.abc import Callable, Sequence

from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.devices import Ledger
from arena_jax.service.executor import Executor, LaunchError, StillAlive
from arena_jax.service.job import Held, Job, Phase, Place
from arena_jax.service.job_indexes import JobIndexes
from arena_jax.service.rules import Rules
from arena_jax.service.store import Store


class Steering:
    """Starts, stops and resizes jobs.

    Args:
        note: told what happens, for the service's own log.
    """

    def __init__(
        self,
        *,
        store: Store,
        cluster: Cluster,
        executor: Executor,
        indexes: JobIndexes,
        rules: Rules,
        note: Callable[[str], None],
    ) -> None:
        self._store, self._cluster, self._executor = store, cluster, executor
        self._indexes, self._rules, self._note = indexes, rules, note

    def act(self, jobs: Sequence[Job], now: float) -> None:
        """One round, for all jobs."""
        ledger = Ledger(self._cluster, jobs)
        for job in jobs:  # first what frees devices
            if job.live:
                self._steer(job, ledger, now)
        for job in jobs:
            if job.phase is Phase.QUEUED and job.desired is not None and not job.cancelled and job.not_before <= now:
                held = ledger.fit(job.desired)
                if held is not None:
                    ledger.take(held)
                    self._launch(job, held, now)

    def _steer(self, job: Job, ledger: Ledger, now: float) -> None:
        held, want = job.held, job.desired
        if job.phase is Phase.STOPPING or job.killed:
            if not job.killed and now - job.stop_at > self._rules.stop_grace_s:
                job.killed = True
                self._store.save(
                    [job], [(now, job.id, "kill", {"why": f"not ended {self._rules.stop_grace_s:g} s after asked"})]
                )
            if job.killed:
                self._executor.signal(job, signal.SIGKILL)
            else:
                self._executor.stop(job)
            return
        assert held is not None
        same_type = want is not None and want.allocation.device_type == held.allocation.device_type
        if want is None or job.cancelled or not same_type:
            why = "cancelled" if job.cancelled else "preempted" if want is None else f"to move to {want.allocation}"
            job.begin_stop(why, now)
            self._store.save([job])
            self._executor.stop(job)
            return
        if job.told:
            self._executor.tell(job, self._indexes.orders(job))  # again and again: it may not have heard
            return
        if want.allocation == Allocation.parse(job.ran_on, None) and set(want.nodes) == set(held.nodes):
            return
        more = want.allocation.num_devices - held.allocation.num_devices
        shrinks = more < 0 and set(want.nodes) <= set(held.nodes)
        grows = more > 0 and set(want.nodes) >= set(held.nodes)
        if not self._executor.elastic or not (shrinks or grows):
            job.begin_stop(f"to go to {want.allocation}", now)
            self._store.save([job])
            self._executor.stop(job)
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
        self._store.save([job])
        self._executor.tell(job, self._indexes.orders(job))

    def _launch(self, job: Job, held: Held, now: float) -> None:
        job.held, job.phase, job.run, job.launched_at = held, Phase.STARTING, job.run + 1, now
        job.killed, job.told, job.exit_code, job.seen_at, job.reason = False, "", None, now, ""
        job.first_start_at = job.first_start_at or now
        kind = self._kind_of_start(job, held)
        event = {"from": job.ran_on or None, "to": str(held.allocation), "run": job.run, "nodes": list(held.nodes)}
        job.ran_on, job.paused = str(held.allocation), False
        self._store.save([job], [(now, job.id, kind, event | {"how": "a new process"})])
        try:
            self._executor.launch(job, self._indexes.orders(job))
        except StillAlive as error:  # an earlier process of it holds the devices, and is waited for
            self._note(f"{job.id}: {error.message}")
        except LaunchError as error:
            # Nothing ran, so that this is no crash: the disk may be full.
            job.held, job.phase, job.not_before = None, Phase.QUEUED, now + self._rules.back_off_s
            job.desired, job.reason = None, error.message
            self._store.save([job], [(now, job.id, "not started", {"why": error.message})])

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


def left_after(held: Held, target: Allocation, desired: Place | None) -> Held:
    """What a job still holds when it has gone to a smaller allocation; all of it where it has grown."""
    if target == held.allocation:
        return held
    wanted = desired.nodes if desired is not None and desired.allocation == target else held.nodes
    kept = [(node, numbers[: target.devices_per_node]) for node, numbers in held.devices if node in wanted]
    return Held(target, tuple(kept[: target.num_nodes]))
