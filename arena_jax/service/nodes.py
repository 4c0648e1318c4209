"""Which nodes are not to be used: those that somebody has drained, and those that are not there."""

from collections.abc import Iterable

from arena_jax.service.devices import Node, name_of, node_of
from arena_jax.service.store import Event, Store


class NodeStates:
    """Nodes that are not up, kept in the store.

    Attributes:
        drained: somebody said so, and has to take it back.
        lost: not there, says the executor.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.drained = {node_of(name) for name, state in store.nodes().items() if state != "up"}
        self.lost = {node_of(name) for name in store.meta("lost", [])}

    @property
    def down(self) -> set[Node]:
        """Where nothing is placed."""
        return self.drained | self.lost

    def drain(self, name: str, drained: bool) -> None:
        """Take a node out, or let it in again."""
        (self.drained.add if drained else self.drained.discard)(node_of(name))
        self._store.put_node(name, "drained" if drained else "up")

    def count(self, lost: Iterable[Node], now: float) -> list[Event]:
        """Note which nodes are not there now; returns what has changed."""
        found = set(lost)
        if found == self.lost:
            return []
        self._store.put_meta("lost", sorted(name_of(node) for node in found))
        events: list[Event] = [(now, "", "node lost", {"node": name_of(node)}) for node in sorted(found - self.lost)]
        events += [(now, "", "node back", {"node": name_of(node)}) for node in sorted(self.lost - found)]
        self.lost = found
        return events
