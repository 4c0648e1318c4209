"""Which nodes an allocation gets.

Allocations are rectangles: N nodes with D devices free on each. Nodes are chosen best-fit, fullest
first, so that whole nodes stay whole. Where enough devices are free but scattered, the jobs that
cost least to clear are migrated; with power-of-two counts and nodes that always succeeds, and the
policy is never asked. A migrated job pays a restart like any other change.
"""

from dataclasses import dataclass

import numpy as np

from arena_jax.grid import Allocation
from arena_jax.scheduler.cluster import Cluster


@dataclass(frozen=True)
class Placed:
    """Devices held by one job: ``devices_per_node`` on each of ``nodes`` of one type (by index)."""

    device_type: int
    nodes: tuple[int, ...]
    devices_per_node: int


class Placer:
    """Free devices by node and the placement of each running job."""

    def __init__(self, cluster: Cluster) -> None:
        self._types = {name: k for k, name in enumerate(cluster.types)}
        self._free = [np.full(g.num_nodes, g.devices_per_node, dtype=np.int64) for g in cluster.groups]
        self._size = [g.devices_per_node for g in cluster.groups]
        self.up = [np.ones(g.num_nodes, dtype=bool) for g in cluster.groups]
        self.held: dict[int, Placed] = {}
        self.fixed: set[int] = set()  # jobs that are never migrated

    def capacity(self) -> np.ndarray:
        """Devices per type on the nodes that are up."""
        return np.array([int(up.sum()) * size for up, size in zip(self.up, self._size, strict=True)], dtype=np.int64)

    def free(self, device_type: int, node: int) -> int:
        """Devices of a node that nobody holds; none where it is not up."""
        return int(self._free[device_type][node]) if self.up[device_type][node] else 0

    def set_up(self, device_type: int, node: int, up: bool) -> list[int]:
        """Take a node down or back; return the jobs that lose devices by it (still held: release them)."""
        self.up[device_type][node] = up
        if up:
            return []
        return [j for j, p in self.held.items() if p.device_type == device_type and node in p.nodes]

    def release(self, job: int) -> None:
        """Free a job's devices."""
        placed = self.held.pop(job)
        free = self._free[placed.device_type]
        for node in placed.nodes:
            free[node] += placed.devices_per_node

    def place(self, wanted: dict[int, Allocation]) -> tuple[list[int], list[int]]:
        """Place allocations, largest first.

        Returns:
            Jobs migrated to make room, and jobs that could not be placed.
        """
        migrated: list[int] = []
        failed: list[int] = []
        queue = sorted(wanted.items(), key=lambda item: (-item[1].num_devices, item[0]))
        for job, allocation in queue:
            k = self._types[allocation.device_type]
            nodes = self._fit(k, allocation.num_nodes, allocation.devices_per_node)
            if nodes is None:
                nodes = self._clear(k, allocation.num_nodes, allocation.devices_per_node, migrated, wanted)
            if nodes is None:
                failed.append(job)
                continue
            self.take(job, Placed(k, nodes, allocation.devices_per_node))
        return migrated, failed

    def take(self, job: int, placed: Placed) -> None:
        """Give a job exactly these devices, which must be free."""
        free = self._free[placed.device_type]
        for node in placed.nodes:
            free[node] -= placed.devices_per_node
        self.held[job] = placed

    def _fit(self, k: int, num_nodes: int, per_node: int, banned: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        free = np.where(self.up[k], self._free[k], -1)
        if banned:
            free[list(banned)] = -1
        fits = np.flatnonzero(free >= per_node)
        if len(fits) < num_nodes:
            return None
        if num_nodes == 1:
            return (int(fits[np.argmin(free[fits])]),)
        return tuple(int(n) for n in fits[np.argsort(free[fits], kind="stable")][:num_nodes])

    def _clear(
        self, k: int, num_nodes: int, per_node: int, migrated: list[int], wanted: dict[int, Allocation]
    ) -> tuple[int, ...] | None:
        """Empty ``per_node`` devices on enough nodes by migrating the smallest jobs away."""
        residents: dict[int, list[int]] = {}
        for job, placed in self.held.items():
            if placed.device_type == k and len(placed.nodes) == 1 and job not in self.fixed:
                residents.setdefault(placed.nodes[0], []).append(job)
        free = np.where(self.up[k], self._free[k], -1)
        chosen = [int(n) for n in np.flatnonzero(free >= per_node)][:num_nodes]
        # Nodes that lack the fewest devices are the cheapest to clear.
        for node in np.argsort(-free, kind="stable"):
            if len(chosen) == num_nodes:
                break
            node = int(node)
            if node in chosen or free[node] < 0:
                continue
            undo: list[tuple[int, Placed]] = []
            for job in sorted(residents.get(node, ()), key=lambda j: (self.held[j].devices_per_node, j)):
                if self._free[k][node] >= per_node:
                    break
                old = self.held[job]
                self.release(job)
                away = self._fit(k, 1, old.devices_per_node, (*chosen, node))
                if away is None:
                    self.take(job, old)
                    continue
                self.take(job, Placed(k, away, old.devices_per_node))
                undo.append((job, old))
            if self._free[k][node] >= per_node:
                chosen.append(node)
                migrated.extend(job for job, _ in undo if job not in wanted and job not in migrated)
            else:
                for job, old in reversed(undo):
                    self.release(job)
                    self.take(job, old)
        return tuple(chosen) if len(chosen) == num_nodes else None
