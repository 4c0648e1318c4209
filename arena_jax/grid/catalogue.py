"""The hardware catalogue: one row per device type.

A row holds datasheet facts only. What a device reaches in practice is the cost model's business.
``[types.NAME]`` tables of a cluster file add rows or override fields (:meth:`Catalogue.extended`), its
``[networks.NAME]`` tables say what joins devices and nodes (:meth:`Catalogue.with_networks`).
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from arena_jax.errors import UsageError, nearest

# Short names that people write; the left side is accepted wherever the right side is.
ALIASES: Mapping[str, str] = {
    "v100": "v100-32",
    "a100": "a100-40",
    "h100": "h100-sxm",
}


# A cluster file whose types every process of a run knows.
ENV_CLUSTER = "ARENA_JAX_CLUSTER"

INTRA_NODE_LINKS = ("nvlink-switch", "nvlink-mesh", "pcie", "ici", "memory")
INTER_NODE_LINKS = ("infiniband", "ethernet", "ici")
_CHOICES = {
    "intra_node_link": INTRA_NODE_LINKS,
    "inter_node_link": INTER_NODE_LINKS,
    "memory_kind": ("hbm", "gddr", "ddr"),
    "platform": ("cpu", "cuda", "tpu"),
}
_NETWORK_KEYS = ("types", "scope", "link", "bandwidth", "latency_s")
_POSITIVE = (
    *("memory_bytes", "memory_bandwidth", "devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth"),
    *("intra_node_latency_s", "inter_node_latency_s", "price_per_hour", "threads", "num_cores"),
    *("fp32_lanes_per_core", "cache_bytes", "power_w", "process_nm", "year"),
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """One device type of a cluster.

    Attributes:
        name: canonical name, as written in allocations.
        peak_flops: dense peak rate in FLOP/s by dtype name (``float32`` is the plain rate, without
            TF32); a dtype that is absent runs at the float32 rate, and float64 at half of it.
        memory_bytes: device memory in bytes.
        memory_bandwidth: bytes/s between device memory and the chip.
        devices_per_node: devices in the usual node.
        intra_node_bandwidth: bytes/s one device sends to its peers inside a node, one direction.
        inter_node_bandwidth: bytes/s one node sends to another, one direction.
        intra_node_latency_s: seconds that one step of a collective inside a node takes to start.
        inter_node_latency_s: seconds that one step of a collective between nodes takes to start.
        intra_node_link: what joins the devices of a node, one of :data:`INTRA_NODE_LINKS`. Behind a
            switch every pair has the whole bandwidth; in a mesh it is spread over the other devices.
        inter_node_link: what joins nodes, one of :data:`INTER_NODE_LINKS`.
        memory_kind: ``hbm``, ``gddr`` or ``ddr``.
        num_cores: multiprocessors of a GPU; ``None`` where unknown.
        fp32_lanes_per_core: float32 lanes of a multiprocessor; ``None`` where unknown.
        cache_bytes: last-level cache; ``None`` where unknown.
        compute_capability: of a GPU, as ``"8.0"``: what XLA's CUDA compiler goes by; ``None`` where unknown.
        power_w: power limit in watts; ``None`` where unknown.
        process_nm: the maker's name of the process, in nanometres; ``None`` where unknown.
        year: year of release.
        price_per_hour: US dollars per device-hour on demand where public, else ``None``.
        platform: the jax platform that drives it (``cpu``, ``cuda``, ``tpu``).
        threads: CPU types only: threads per device, ``None`` to share the node's cores.
        lacks: dtypes that the hardware has no arithmetic for; a run that is pinned to one cannot go there.
        source: where the numbers come from.
        sources: fields whose number has another source than ``source``, and which.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    devices_per_node: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    intra_node_latency_s: float = 1.2e-5
    inter_node_latency_s: float = 6e-5
    intra_node_link: str = "pcie"
    inter_node_link: str = "ethernet"
    memory_kind: str = "hbm"
    num_cores: int | None = None
    fp32_lanes_per_core: int | None = None
    cache_bytes: int | None = None
    compute_capability: str | None = None
    power_w: float | None = None
    process_nm: float | None = None
    year: int = 2020
    price_per_hour: float | None = None
    platform: str = "cuda"
    threads: int | None = None
    lacks: tuple[str, ...] = ()
    source: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.lacks, list | tuple) or not all(isinstance(name, str) for name in self.lacks):
            raise UsageError(f"types.{self.name}: lacks is {self.lacks!r}", hint='give dtypes, such as ["bfloat16"]')
        object.__setattr__(self, "lacks", tuple(self.lacks))
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(
                    f"types.{self.name}: {name} is {value!r}{nearest(str(value), allowed)}",
                    hint=f"one of {', '.join(allowed)}",
                )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise UsageError(f"types.{self.name}: {name} must be a number above 0, got {value!r}")
        if not self.peak_flops or not all(_is_number(v) and v > 0 for v in self.peak_flops.values()):
            raise UsageError(f"types.{self.name}: peak_flops must hold numbers above 0, got {dict(self.peak_flops)!r}")
        if "float32" not in self.peak_flops:
            raise UsageError(f"types.{self.name}: peak_flops lacks float32, which other types are derived from")

    def source_of(self, name: str) -> str:
        """Where the number of a field comes from."""
        return self.sources.get(name, self.source)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a numpy dtype name; unlisted narrow types count as float32."""
        if dtype in self.peak_flops:
            return self.peak_flops[dtype]
        base = self.peak_flops["float32"]
        return base / 2 if dtype == "float64" else base


@dataclass(frozen=True)
class Catalogue:
    """An immutable set of device types, looked up by name or alias."""

    types: Mapping[str, DeviceType] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """Return the canonical name of ``name``; raise :class:`UsageError` when unknown."""
        resolved = name if name in self.types else ALIASES.get(name, name)
        if resolved not in self.types:
            known = [*self.types, *ALIASES]
            raise UsageError(
                f"unknown device type {name!r}{nearest(name, known)}",
                hint=f"known types: {', '.join(sorted(self.types))}",
            )
        return resolved

    def __getitem__(self, name: str) -> DeviceType:
        return self.types[self.canonical(name)]

    def extended(self, tables: Mapping[str, Mapping[str, Any]]) -> "Catalogue":
        """Return a catalogue with ``[types.NAME]`` tables added or laid over existing rows.

        A new row names its base with ``like = "TYPE"`` or gives every required field.
        """
        types = dict(self.types)
        allowed = {f.name for f in fields(DeviceType)} - {"name"} | {"like"}
        for name, table in tables.items():
            for key in table:
                if key not in allowed:
                    raise UsageError(f"types.{name}: unknown key {key!r}{nearest(key, allowed)}")
            values = dict(table)
            base_name = values.pop("like", name if name in types or name in ALIASES else None)
            if base_name is None and "threads" in values:
                base_name = "cpu"
            if "peak_flops" in values and not isinstance(values["peak_flops"], Mapping):
                values["peak_flops"] = {"float32": float(values["peak_flops"])}
            if base_name is not None:
                types[name] = replace(Catalogue(types)[base_name], name=name, **values)
                continue
            required = ("peak_flops", "memory_bytes", "memory_bandwidth", "devices_per_node")
            missing = [key for key in required if key not in values]
            if missing:
                raise UsageError(
                    f"types.{name}: missing {', '.join(missing)}",
                    hint='give them, or name a base row with like = "a100"',
                )
            values.setdefault("intra_node_bandwidth", 12e9)
            values.setdefault("inter_node_bandwidth", 1.25e9)
            types[name] = DeviceType(name=name, **values)
        return Catalogue(types)

    def with_networks(self, tables: Mapping[str, Mapping[str, Any]]) -> "Catalogue":
        """Lay ``[networks.NAME]`` tables of a cluster file over the types they join.

        A table gives ``types``, ``scope`` (``"inter"``, the default, or ``"intra"``) and at least one
        of ``link``, ``bandwidth`` (bytes/s of a node between nodes, of a device inside one) and
        ``latency_s``.
        """
        types = dict(self.types)
        owner: dict[tuple[str, str], str] = {}
        for network, table in tables.items():
            for key in table:
                if key not in _NETWORK_KEYS:
                    raise UsageError(f"networks.{network}: unknown key {key!r}{nearest(key, _NETWORK_KEYS)}")
            scope = table.get("scope", "inter")
            if scope not in ("inter", "intra"):
                raise UsageError(f"networks.{network}: scope is {scope!r}", hint='"inter" or "intra" (of nodes)')
            facts = {f"{scope}_node_{key}": table[key] for key in ("link", "bandwidth", "latency_s") if key in table}
            joined = table.get("types")
            if not facts or not isinstance(joined, list) or not joined:
                raise UsageError(
                    f"networks.{network}: names no types, or nothing about them",
                    hint='types = ["a100"] and one of link, bandwidth, latency_s',
                )
            for name in map(Catalogue(types).canonical, joined):
                if owner.setdefault((name, scope), network) != network:
                    raise UsageError(f"networks.{network}: {name} is on networks.{owner[name, scope]} already")
                said = dict.fromkeys(facts, f"networks.{network} of the cluster file")
                types[name] = replace(types[name], **facts, sources={**types[name].sources, **said})
        return Catalogue(types)

    def of_cluster(self, tables: Mapping[str, Any], *, source: str) -> "Catalogue":
        """The catalogue as a cluster file's ``[types.NAME]`` and ``[networks.NAME]`` tables have it.

        Args:
            source: what faults are reported of.
        """
        for key, given in tables.items():
            if key not in CLUSTER_TABLES:
                raise UsageError(f"{source}: unknown table {key!r}{nearest(key, CLUSTER_TABLES)}")
            kind, form = CLUSTER_TABLES[key]
            members = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
            if not isinstance(given, kind) or not all(isinstance(member, dict) for member in members):
                raise UsageError(f"{source}: {key!r} must be tables", hint=f"write {form} and its keys below it")
        return self.extended(tables.get("types", {})).with_networks(tables.get("networks", {}))

    def with_nodes(self, sizes: Mapping[str, int]) -> "Catalogue":
        """The catalogue with nodes of other sizes, by type."""
        types = dict(self.types)
        for name, devices in sizes.items():
            types[self.canonical(name)] = replace(self[name], devices_per_node=devices)
        return Catalogue(types)


# What a cluster file may hold; queues are the cluster service's.
CLUSTER_TABLES: Mapping[str, tuple[type, str]] = {
    "nodes": (list, "[[nodes]]"),
    "types": (dict, "[types.NAME]"),
    "networks": (dict, "[networks.NAME]"),
    "queues": (dict, "[queues.NAME]"),
}


def read_cluster_file(path: str | Path) -> dict[str, Any]:
    """The tables of a cluster file; raise :class:`UsageError` where it is missing or no TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read cluster file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cluster file {str(path)!r} is not TOML: {error}") from error


def _load() -> Catalogue:
    text = files("arena_jax.grid").joinpath("catalogue.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    own = Catalogue({name: DeviceType(name=name, **row) for name, row in tables.items()})
    path = os.environ.get(ENV_CLUSTER)
    if not path:
        return own
    try:
        cluster = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{ENV_CLUSTER}: cannot read {path!r}: {error}") from error
    return own.extended(cluster.get("types", {})).with_networks(cluster.get("networks", {}))


CATALOGUE = _load()
