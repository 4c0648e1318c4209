"""Which devices are free: all of the nodes that are up, less what any job still holds."""

from collections.abc import Iterable

from arena_jax.errors import UsageError, nearest
from arena_jax.scheduler import Cluster
from arena_jax.service.job import Held, Job, Place

Node = tuple[str, int]
"""Device type, and number of the node among those of its type; written ``TYPE/NUMBER``."""


def node_of(name: str) -> Node:
    """A node by its name ``TYPE/NUMBER``."""
    kind, _, number = name.rpartition("/")
    return kind, int(number)


def name_of(node: Node) -> str:
    """``TYPE/NUMBER``."""
    return f"{node[0]}/{node[1]}"


def node_names(cluster: Cluster) -> list[str]:
    """All nodes as ``TYPE/NUMBER``."""
    return [f"{group.device_type}/{i}" for group in cluster.groups for i in range(group.num_nodes)]


def check_node(cluster: Cluster, name: str) -> str:
    """The node's name with its canonical type; raise :class:`UsageError` that names the nearest."""
    kind, slash, number = name.partition("/")
    known = node_names(cluster)
    full = name
    if slash and kind in {*cluster.catalogue.types} | {"v100", "a100", "h100"}:
        full = f"{cluster.catalogue.canonical(kind)}/{number}"
    if full not in known:
        raise UsageError(f"there is no node {name!r}{nearest(name, known)}", hint=f"nodes: {', '.join(known[:12])}")
    return full


class Ledger:
    """Devices by node, and who holds them."""

    def __init__(self, cluster: Cluster, jobs: Iterable[Job]) -> None:
        self._free: dict[Node, set[int]] = {
            (group.device_type, node): set(range(group.devices_per_node))
            for group in cluster.groups
            for node in range(group.num_nodes)
        }
        for job in jobs:
            if job.held is not None:
                self.take(job.held)

    def take(self, held: Held) -> None:
        """These devices are no longer free; raise :class:`ValueError` for one that was not."""
        for node, numbers in held.devices:
            free = self._free[held.allocation.device_type, node]
            if not free.issuperset(numbers):
                raise ValueError(f"{held.allocation.device_type}/{node}: {numbers} are not all free ({sorted(free)})")
            free.difference_update(numbers)

    def fit(self, place: Place, own: Held | None = None) -> Held | None:
        """The devices of a place, ``own`` ones first, or ``None`` while some are not free."""
        mine = {} if own is None or own.allocation.device_type != place.allocation.device_type else dict(own.devices)
        per_node = place.allocation.devices_per_node
        chosen = []
        for node in sorted(place.nodes):
            kept = mine.get(node, ())[:per_node]
            others = self._free[place.allocation.device_type, node].difference(kept)
            free = sorted(others)[: per_node - len(kept)]
            if len(kept) + len(free) < per_node:
                return None
            chosen.append((node, (*kept, *free)))
        return Held(place.allocation, tuple(chosen))

    def give_back(self, held: Held) -> None:
        """These devices are free again."""
        for node, numbers in held.devices:
            self._free[held.allocation.device_type, node].update(numbers)
