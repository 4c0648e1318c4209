"""The cluster: nodes of device types, read from TOML, and the columns policies choose from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.errors import UsageError, nearest
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, read_cluster_file


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """``num_nodes`` equal nodes of one device type."""

    device_type: str
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class Cluster:
    """Node groups, one per device type, and the catalogue that describes the types."""

    groups: tuple[NodeGroup, ...]
    catalogue: Catalogue = field(default=CATALOGUE, repr=False)

    def __post_init__(self) -> None:
        if not sum(group.num_devices for group in self.groups):
            raise UsageError("the cluster has no nodes", hint="add a [[nodes]] table with type, count and devices")
        names = [group.device_type for group in self.groups]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"device type {name!r} is given twice with different nodes",
                    hint=f'name the second kind in a table [types.{name}-b] with like = "{name}"',
                )

    @property
    def types(self) -> tuple[str, ...]:
        """Canonical type names, in the order of the file."""
        return tuple(group.device_type for group in self.groups)

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    def group(self, device_type: str) -> NodeGroup:
        """The nodes of a type; raise :class:`UsageError` where the cluster has none."""
        for group in self.groups:
            if group.device_type == device_type:
                return group
        raise UsageError(
            f"the cluster has no {device_type!r} devices{nearest(device_type, self.types)}",
            hint=f"it has {', '.join(self.types)}",
        )

    def packed(self, device_type: str, num_devices: int) -> Allocation | None:
        """``num_devices`` of a type on as few nodes as possible, or ``None`` where that is no rectangle that fits."""
        group = self.group(device_type)
        per_node = min(num_devices, group.devices_per_node)
        while per_node > 0 and num_devices % per_node:
            per_node -= 1
        nodes = num_devices // per_node if per_node else 0
        return Allocation(device_type, nodes, per_node) if 0 < nodes <= group.num_nodes else None

    def prices_per_hour(self) -> np.ndarray:
        """US dollars per device-hour by type; NaN where the catalogue has none."""
        prices = (self.catalogue[name].price_per_hour for name in self.types)
        return np.array([np.nan if price is None else price for price in prices])

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read a cluster file; raise :class:`UsageError` that names the table and key at fault."""
        return cls.from_tables(read_cluster_file(path), source=str(path))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], *, source: str = "cluster") -> "Cluster":
        """Build from parsed TOML: ``[[nodes]]``, optional ``[types.NAME]`` and ``[networks.NAME]`` tables.

        ``[queues.NAME]`` tables are the cluster service's.
        """
        catalogue = CATALOGUE.of_cluster(tables, source=source)
        groups = cls._groups(tables, catalogue, source)
        return cls(groups, catalogue)

    @staticmethod
    def catalogue_of(path: str | Path) -> Catalogue:
        """The types of a cluster file; its ``[[nodes]]``, which may be missing, say how large nodes are."""
        tables = read_cluster_file(path)
        catalogue = CATALOGUE.of_cluster(tables, source=str(path))
        sizes: dict[str, int] = {}
        for group in Cluster._groups(tables, catalogue, str(path)):
            sizes[group.device_type] = max(group.devices_per_node, sizes.get(group.device_type, 0))
        return catalogue.with_nodes(sizes)

    @staticmethod
    def _groups(tables: Mapping[str, Any], catalogue: Catalogue, source: str) -> tuple[NodeGroup, ...]:
        merged: dict[tuple[str, int], int] = {}
        for i, table in enumerate(tables.get("nodes", ())):
            for key in table:
                if key not in ("type", "count", "devices"):
                    raise UsageError(
                        f"{source}: nodes[{i}]: unknown key {key!r}{nearest(key, ('type', 'count', 'devices'))}"
                    )
            if "type" not in table:
                raise UsageError(f"{source}: nodes[{i}] has no 'type'")
            if not isinstance(table["type"], str):
                raise UsageError(f"{source}: nodes[{i}].type must be a name, got {table['type']!r}")
            name = catalogue.canonical(table["type"])
            count, devices = table.get("count", 1), table.get("devices", catalogue[name].devices_per_node)
            for key, value, least in (("count", count, 0), ("devices", devices, 1)):
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise UsageError(
                        f"{source}: nodes[{i}].{key} must be a whole number of at least {least}, got {value!r}"
                    )
            merged[name, devices] = merged.get((name, devices), 0) + count
        return tuple(NodeGroup(device_type=n, num_nodes=c, devices_per_node=d) for (n, d), c in merged.items() if c)


class Columns:
    """The allocations policies choose from, as parallel arrays: one column per allocation.

    Attributes:
        allocations: the columns.
        types: type names, indexing ``capacity``.
        type_of: type index of each column.
        num_devices: devices of each column.
        capacity: devices of each type when every node is up.
    """

    def __init__(self, cluster: Cluster, allocations: Iterable[Allocation]) -> None:
        order = {name: k for k, name in enumerate(cluster.types)}
        fitting = {a for a in allocations if a.device_type in order and _fits(cluster, a)}
        self.allocations = tuple(sorted(fitting, key=lambda a: (order[a.device_type], a.num_devices, a.num_nodes)))
        self.types = cluster.types
        self.type_of = np.array([order[a.device_type] for a in self.allocations], dtype=np.int64)
        self.num_devices = np.array([a.num_devices for a in self.allocations], dtype=np.int64)
        self.capacity = np.array([group.num_devices for group in cluster.groups], dtype=np.int64)
        self._index = {a: c for c, a in enumerate(self.allocations)}

    def __len__(self) -> int:
        return len(self.allocations)

    def index(self, allocation: Allocation) -> int:
        """Column of an allocation, -1 where there is none."""
        return self._index.get(allocation, -1)

    def usage(self, chosen: np.ndarray) -> np.ndarray:
        """Devices in use per type when ``chosen`` holds one column (or -1) per job."""
        held = chosen[chosen >= 0]
        return np.bincount(self.type_of[held], weights=self.num_devices[held], minlength=len(self.types)).astype(
            np.int64
        )


def _fits(cluster: Cluster, allocation: Allocation) -> bool:
    group = cluster.group(allocation.device_type)
    return allocation.devices_per_node <= group.devices_per_node and allocation.num_nodes <= group.num_nodes
