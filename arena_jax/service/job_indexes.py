"""The plan indexes of the jobs at hand: made or found in the store, corrected as jobs run, and turned into orders."""

from collections.abc import Callable, Collection

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.estimates import (
    Index,
    IndexedStep,
    candidate_allocations,
    corrected,
    index_from_json,
    index_to_json,
)
from arena_jax.service.executor import Orders
from arena_jax.service.indexing import Indexer
from arena_jax.service.job import Job, Submission
from arena_jax.service.store import Store

# A measured step time that moves an estimate by more than this is worth another decision.
_SURPRISE = 0.1


class JobIndexes:
    """Indexes by ``plan_key``; jobs that plan alike share one.

    Args:
        spans_nodes: whether a job may get an allocation of several nodes.

    Attributes:
        of: what the compiler said of each key.
    """

    def __init__(
        self, store: Store, cluster: Cluster, indexer: Indexer, spans_nodes: Callable[[Submission], bool]
    ) -> None:
        self._store, self._cluster, self._indexer, self._spans_nodes = store, cluster, indexer, spans_nodes
        self.of: dict[str, Index] = {}
        self._measured: dict[str, dict[Allocation, float]] = {}

    def look(self, job: Job) -> bool:
        """Whether the job's index is there; raises :class:`ArenaError` where there will be none."""
        spec = job.spec
        if spec.rigid:
            allocation = Allocation.parse(spec.on, self._cluster.catalogue)
            job.plan_key = f"command {allocation} {spec.expected_s:g}"
            self._keep(job.plan_key, {allocation: IndexedStep(step_time_s=spec.expected_s)})
        else:
            key = job.plan_key or self._indexer.key(job)
            if not self.load(key):
                allocations = candidate_allocations(
                    self._cluster, least=spec.min_devices, most=spec.max_devices, types=spec.types
                )
                if not self._spans_nodes(spec):
                    allocations = [a for a in allocations if a.num_nodes == 1]
                found = self._indexer.look(job, allocations)
                job.reason = found.said
                if found.error:
                    raise ArenaError(found.error)
                if found.index is None:
                    return False
                self._keep(key, found.index)
            job.plan_key = key
        if not self.of[job.plan_key]:
            raise ArenaError("no allocation of the cluster has a plan for it")
        return True

    def load(self, key: str) -> bool:
        """Whether the index is here or in the store."""
        if key not in self.of:
            kept = self._store.index(key)
            if kept is None:
                return False
            self.of[key] = index_from_json(kept)
            measured = self._store.measured(key)
            self._measured[key] = {Allocation.parse(text, None): value for text, value in measured.items()}
        return True

    def step_times(self, key: str) -> dict[Allocation, float]:
        """What policies are told of a job: estimates, corrected by measurements."""
        return corrected(self.of[key], self._measured.get(key, {}))

    def learn(self, job: Job) -> bool:
        """Keep the step time of a job that runs steadily on what it holds; whether it is far from what was known."""
        if job.held is None or job.step_time_s is None or job.told or not job.settled or job.spec.rigid:
            return False
        allocation, known = job.held.allocation, self._measured.setdefault(job.plan_key, {})
        if allocation not in self.of[job.plan_key]:
            return False
        before = self.step_times(job.plan_key)[allocation]
        surprise = abs(job.step_time_s / before - 1) > _SURPRISE
        if surprise or allocation not in known:
            self._store.put_measured(job.plan_key, str(allocation), job.step_time_s)
            known[allocation] = job.step_time_s
        return surprise

    def orders(self, job: Job) -> Orders:
        """How the job is to run where it is held or told to go."""
        assert job.held is not None
        index = self.of[job.plan_key]
        allocation = Allocation.parse(job.told, None) if job.told else job.held.allocation
        of_type = {a: step for a, step in index.items() if a.device_type == allocation.device_type}
        paced = self._cluster.catalogue[allocation.device_type].threads is not None and not job.spec.rigid
        return Orders(
            num_stages=index[allocation].num_stages if allocation in index else 1,
            pace_s={a.num_devices: step.step_time_s for a, step in of_type.items()} if paced else {},
            most_devices=max([a.num_devices for a in of_type], default=allocation.num_devices),
        )

    def keep(self, keys: Collection[str]) -> None:
        """Forget all but these; the store has them."""
        for key in [key for key in self.of if key not in keys]:
            del self.of[key]
            self._measured.pop(key, None)

    def _keep(self, key: str, index: Index) -> None:
        self._store.put_index(key, index_to_json(index))
        self.of[key] = dict(index)
        self._measured.setdefault(key, {})
