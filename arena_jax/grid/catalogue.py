"""The hardware catalogue: one row per device type.

A row holds datasheet facts only. What a device reaches in practice is the cost model's business.
``[types.NAME]`` tables of a cluster file add rows or override fields (:meth:`Catalogue.extended`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any

from arena_jax.errors import UsageError, nearest

# Short names that people write; the left side is accepted wherever the right side is.
ALIASES: Mapping[str, str] = {
    "v100": "v100-32",
    "a100": "a100-40",
    "h100": "h100-sxm",
}


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
        intra_node_latency_s: seconds to start one transfer inside a node.
        inter_node_latency_s: seconds to start one transfer between nodes.
        price_per_hour: US dollars per device-hour on demand where public, else ``None``.
        platform: the jax platform that drives it (``cpu``, ``cuda``, ``tpu``).
        threads: CPU types only: threads per device, ``None`` to share the node's cores.
        source: where the numbers come from.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    devices_per_node: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    intra_node_latency_s: float = 5e-6
    inter_node_latency_s: float = 2e-5
    price_per_hour: float | None = None
    platform: str = "cuda"
    threads: int | None = None
    source: str = ""

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


def _load() -> Catalogue:
    text = files("arena_jax.grid").joinpath("catalogue.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return Catalogue({name: DeviceType(name=name, **row) for name, row in tables.items()})


CATALOGUE = _load()
