"""Which node of the cluster file is which node of the Ray cluster.

A Ray node says what it is by a custom resource: ``arena-TYPE``, as many as it has devices of that type. It stands
for as many nodes of the cluster file as it has room for.
"""

from collections.abc import Iterable, Mapping

from arena_jax.scheduler import Cluster
from arena_jax.service.devices import Node
from arena_jax.service.ray_link import RayNode


def resource_of(device_type: str) -> str:
    """The custom resource that counts devices of a type."""
    return f"arena-{device_type}"


def assign(cluster: Cluster, nodes: Iterable[RayNode], before: Mapping[Node, str]) -> dict[Node, str]:
    """Ray's id for each node of the cluster file that is there.

    A node keeps the id it had ``before`` while that one is alive; ids beyond what the file asks for are spare,
    and take the place of the next that is lost.
    """
    alive = sorted(nodes, key=lambda node: (node.host, node.id))
    found: dict[Node, str] = {}
    for group in cluster.groups:
        resource, size = resource_of(group.device_type), group.devices_per_node
        room = {node.id: int(node.resources.get(resource, 0)) // size for node in alive}
        wanted = [(group.device_type, number) for number in range(group.num_nodes)]
        for name in wanted:
            kept = before.get(name)
            if kept is not None and room.get(kept, 0) > 0:
                found[name] = kept
                room[kept] -= 1
        spare = [node.id for node in alive for _ in range(room[node.id])]
        for name, chosen in zip([name for name in wanted if name not in found], spare, strict=False):
            found[name] = chosen
    return found
