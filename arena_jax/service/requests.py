"""What each request does. Reads the store, or adds to it; the reconcile loop does the rest."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from arena_jax.errors import ArenaError, UsageError, nearest
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.devices import check_node, node_names
from arena_jax.service.estimates import candidate_allocations
from arena_jax.service.executor import Executor
from arena_jax.service.job import ENDED, Job, Submission
from arena_jax.service.store import Store

# Jobs that have not ended; more are refused.
MAX_QUEUED = 10_000
_LOG_BYTES = 1 << 16
_MOST_ENDED = 10_000


class Requests:
    """Answers requests. Safe to call from any thread.

    Args:
        about: facts of the service for ``status``: cluster, policy, page.
    """

    def __init__(
        self,
        *,
        store: Store,
        cluster: Cluster,
        executor: Executor,
        clock: Callable[[], float],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._store, self._cluster, self._executor, self._clock = store, cluster, executor, clock
        self._about = dict(about or {})
        self._verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "submit": self._submit,
            "status": self._status,
            "cancel": self._cancel,
            "resize": self._resize,
            "drain": self._drain,
            "undrain": self._drain,
            "logs": self._logs,
            "events": self._events,
        }

    def answer(self, request: Any) -> dict[str, Any]:
        """The answer to one request; never raises for what was sent."""
        try:
            if not isinstance(request, Mapping):
                raise UsageError("a request is a JSON object")
            verb = request.get("do")
            if not isinstance(verb, str) or verb not in self._verbs:
                raise UsageError(
                    f"there is no request {str(verb)[:50]!r}{nearest(str(verb)[:50], self._verbs)}",
                    hint=f"requests: {', '.join(self._verbs)}",
                )
            return self._verbs[verb](request)
        except ArenaError as error:
            return {"error": error.message, "hint": error.hint}

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        spec = Submission.from_json(request.get("job"))
        if sum(n for phase, n in self._store.counts().items() if phase not in ENDED) >= MAX_QUEUED:
            raise UsageError(f"{MAX_QUEUED:,} jobs are queued already", hint="cancel some, or wait")
        for name in spec.types:
            self._cluster.group(self._cluster.catalogue.canonical(name))
        if spec.on:
            self._check_allocation(spec.on)
        if not spec.rigid:
            candidate_allocations(self._cluster, least=spec.min_devices, most=spec.max_devices, types=spec.types)
        job = self._store.submit(spec, self._clock())
        return {"job": job.row()}

    def _check_allocation(self, text: str) -> Allocation:
        allocation = Allocation.parse(text, self._cluster.catalogue)
        group = self._cluster.group(allocation.device_type)
        if allocation.num_nodes > group.num_nodes or allocation.devices_per_node > group.devices_per_node:
            raise UsageError(
                f"{allocation} is more than the cluster has",
                hint=f"{group.device_type}: {group.num_nodes} nodes of {group.devices_per_node}",
            )
        return allocation

    def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request.get("job")
        if name is not None:
            return {"jobs": [self._job(name).row()], "now": self._clock()}
        ended = request.get("ended", 20)
        if ended is not None and (isinstance(ended, bool) or not isinstance(ended, int)):
            raise UsageError(f"ended is {ended!r}", hint="a number of jobs")
        jobs = self._store.jobs(ended=min(max(ended or 0, 0), _MOST_ENDED))
        return {
            "jobs": [job.row() for job in jobs],
            "counts": self._store.counts(),
            "nodes": self._nodes(jobs),
            "now": self._clock(),
            **self._about,
        }

    def _nodes(self, jobs: list[Job]) -> list[dict[str, Any]]:
        states = self._store.nodes() | dict.fromkeys(self._store.meta("lost", []), "lost")
        users: dict[str, list[str]] = {}
        used: dict[str, int] = {}
        for job in jobs:
            for node, numbers in job.held.devices if job.held is not None else ():
                name = f"{job.held.allocation.device_type}/{node}" if job.held is not None else ""
                users.setdefault(name, []).append(job.id)
                used[name] = used.get(name, 0) + len(numbers)
        return [
            {
                "node": name,
                "state": states.get(name, "up"),
                "devices": self._cluster.group(name.rpartition("/")[0]).devices_per_node,
                "used": used.get(name, 0),
                "jobs": users.get(name, []),
            }
            for name in node_names(self._cluster)
        ]

    def _cancel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._alive(request.get("job"))
        self._store.wish({"do": "cancel", "job": job.number})
        return {"job": job.row()}

    def _resize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job, grid = self._alive(request.get("job")), request.get("grid")
        if not isinstance(grid, str) or len(grid) > 100:
            raise UsageError(f"grid is {str(grid)[:50]!r}", hint="an allocation, pause, or auto")
        if job.spec.rigid:
            raise UsageError(f"{job.id} is a command: it runs on {job.spec.on} and nowhere else")
        if grid not in ("pause", "auto"):
            grid = str(self._check_allocation(grid))
            index = self._store.index(job.plan_key) if job.plan_key else None
            if index is None:
                raise UsageError(f"{job.id} is not planned yet", hint="ask again in a moment")
            if grid not in index:
                raise UsageError(f"{job.id} has no plan on {grid}{nearest(grid, index)}", hint=", ".join(index))
        self._store.wish({"do": "resize", "job": job.number, "grid": grid})
        return {"job": job.row()}

    def _drain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request.get("node")
        if not isinstance(name, str) or len(name) > 100:
            raise UsageError(f"node is {str(name)[:50]!r}", hint=f"nodes: {', '.join(node_names(self._cluster)[:12])}")
        node = check_node(self._cluster, name)
        self._store.wish({"do": request["do"], "node": node})
        return {"node": node}

    def _logs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job, offset = self._job(request.get("job")), request.get("offset", 0)
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 60:
            raise UsageError(f"offset is {str(offset)[:50]!r}", hint="a number of bytes")
        data, end = self._executor.logs(job, offset, _LOG_BYTES)
        return {"text": data.decode("utf-8", "replace"), "offset": end, "ended": job.phase in ENDED}

    def _events(self, request: Mapping[str, Any]) -> dict[str, Any]:
        after, last = request.get("after", 0), request.get("last", 200)
        for value in (after, last):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < math.inf or value > 1 << 60:
                raise UsageError("after and last are whole numbers of at least 0")
        job = "" if request.get("job") is None else self._job(request["job"]).id
        return {"events": self._store.events(after=after, last=min(last, 5000), job=job)}

    def _alive(self, name: Any) -> Job:
        job = self._job(name)
        if job.phase in ENDED:
            raise UsageError(
                f"{job.id} has {job.phase} already" if job.phase == "finished" else f"{job.id} is {job.phase}"
            )
        return job

    def _job(self, name: Any) -> Job:
        text = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
        if not text or len(text) > 200 or not text.isprintable():
            raise UsageError("name a job", hint="by its id, as `arena-jax status` shows it")
        job = self._store.job(text)
        if job is None:
            known = [other.id for other in self._store.jobs(ended=200)]
            raise UsageError(f"there is no job {text!r}{nearest(text, known)}", hint="`arena-jax status` lists them")
        return job
