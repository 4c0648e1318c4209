"""What this machine's profile store knows of a device type, in the cost model's terms."""

import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from arena_jax import home
from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.cost.pieces import BOTH, FORWARD, FORWARD_SHARE, Curve, Pieces
from arena_jax.compiler.profiling.cores import num_neighbours
from arena_jax.grid import Profile, ProfileStore

Shape = tuple[float, float, float, float]
Group = tuple[int, int, bool]
_FAR = 3.0


@dataclass(frozen=True)
class Measured:
    """Measurements of one device type.

    Attributes:
        corrections: measured over computed seconds by kind of operation; ``step`` is of all kinds.
        products: (kind, dtype, (batch, m, k, n)) -> seconds, launch included.
        collectives: (group size, stride, inside a node) -> collective -> bytes and seconds, ascending.
        pieces: layers, updates, transfers and dispatches.
        bias: what estimates are mostly made of -> part of one -> factor that training runs have taught.
        generation: changes with every profile.
    """

    corrections: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[tuple[str, str, Shape], float] = field(default_factory=dict)
    collectives: Mapping[Group, Mapping[str, Curve]] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=Pieces)
    bias: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    generation: str = ""


def measured(device_type: str, num_devices: int | None = None) -> Measured:
    """What ``$ARENA_JAX_HOME``'s store holds of a type.

    Args:
        num_devices: of a CPU, devices that share the node. A piece that was timed on the cores of one
            device is then scaled to what is left of them where there are more devices than cores.
    """
    path = home.profiles()
    try:
        stamps = tuple(
            (p.stat().st_mtime_ns, p.stat().st_size) for p in (path, path.with_name(path.name + "-wal")) if p.exists()
        )
    except OSError:  # a checkpoint has just removed the log
        stamps = ()
    return _read(path, stamps, device_type, num_devices) if path.exists() else Measured()


@lru_cache(maxsize=64)
def _read(path: Path, stamps: object, device_type: str, num_devices: int | None) -> Measured:
    store = ProfileStore(path)
    found = store.profiles(device_type)
    products: dict[tuple[str, str, Shape], float] = {}
    for profile in found:
        key = _product(profile.piece)
        if profile.kind in ("dot", "conv") and key is not None and profile.piece.get("devices") == num_devices:
            products[profile.kind, *key] = profile.seconds
    return Measured(
        store.corrections(device_type),
        products,
        _collectives(found, num_devices),
        _pieces(found, num_devices),
        store.bias(device_type),
        store.generation(device_type),
    )


def _pieces(found: Iterable[Profile], num_devices: int | None) -> Pieces:
    cores, slowdown = (None, 1.0) if num_devices is None else share_of_cores(num_devices)
    here, whole = _at(found, cores), _at(found, None if cores is None else os.cpu_count())
    layers: dict[tuple[str, str], float] = {}
    like_of: dict[str, str] = {}
    updates: dict[str, float] = {}
    dispatches: dict[int, float] = {}
    fresh_s = 0.0
    transfers: dict[float, float] = {}
    for profile in here:
        piece, seconds = profile.piece, profile.seconds * slowdown
        if profile.kind == "layer":
            layers[str(piece.get("layer")), str(piece.get("pass"))] = seconds
            like_of[str(piece.get("layer"))] = str(piece.get("like"))
        elif profile.kind == "update":
            updates[str(piece.get("update"))] = seconds
        elif profile.kind == "fresh" and isinstance(piece.get("bytes"), int):
            fresh_s = seconds / piece["bytes"]
    for profile in whole:
        if profile.kind == "transfer" and isinstance(profile.piece.get("bytes"), int | float):
            transfers[float(profile.piece["bytes"])] = profile.seconds
        elif profile.kind == "dispatch" and isinstance(profile.piece.get("devices"), int):
            dispatches[profile.piece["devices"]] = profile.seconds
    return Pieces(
        layers=layers,
        likes=_forward_shares(layers, like_of),
        updates=updates,
        transfers=_curve(transfers) if transfers else None,
        dispatches=dispatches,
        crossing=_crossing([p for p in here if p.kind == "chain"], layers, slowdown),
        fresh_s=fresh_s,
        speedup=_speedup(here, whole) if cores != os.cpu_count() else None,
    )


def _crossing(chains: Iterable[Profile], layers: Mapping[tuple[str, str], float], slowdown: float) -> Curve | None:
    """What programs of many layers take besides these, by the bytes they keep; it does not fall with more."""
    points: dict[float, float] = {}
    for chain in chains:
        keys, saved = chain.piece.get("layers"), chain.piece.get("saved_bytes")
        if not isinstance(keys, list | tuple) or not isinstance(saved, int | float) or saved <= 0:
            continue
        parts = [layers.get((str(key), BOTH)) for key in keys]
        alone = sum(part for part in parts if part is not None)
        # Beyond a few times its layers a chain has measured what else the machine did.
        if all(part is not None for part in parts) and chain.seconds * slowdown <= _FAR * alone:
            points[float(saved)] = max(chain.seconds * slowdown - alone, 0.0)
    if not points:
        return None
    sizes, seconds = _curve(points)
    return sizes, tuple(max(seconds[: i + 1]) for i in range(len(seconds)))


def _forward_shares(layers: Mapping[tuple[str, str], float], like_of: Mapping[str, str]) -> dict[str, float]:
    """Per sort of layer, the part of both passes that the forward pass takes."""
    shares: dict[str, list[float]] = {like: [] for like in like_of.values()}
    for (key, direction), seconds in layers.items():
        if direction == FORWARD and (key, BOTH) in layers:
            shares[like_of[key]].append(min(seconds / layers[key, BOTH], 2 / 3))
    every = [share for found in shares.values() for share in found]
    usual = statistics.median(every) if every else FORWARD_SHARE
    return {like: statistics.median(found) if found else usual for like, found in shares.items()}


def _speedup(here: Iterable[Profile], whole: Iterable[Profile]) -> float | None:
    """Median over the layers that were timed on one device's cores and on all of them."""
    alone = {p.piece.get("layer"): p.seconds for p in whole if p.kind == "layer" and p.piece.get("pass") == BOTH}
    ratios = [
        p.seconds / alone[p.piece.get("layer")]
        for p in here
        if p.kind == "layer" and p.piece.get("pass") == BOTH and p.piece.get("layer") in alone
    ]
    return max(1.0, statistics.median(ratios)) if ratios else None


def _at(found: Iterable[Profile], cores: int | None) -> list[Profile]:
    """Those taken under what decides a time here: on a CPU these cores, this jax and these XLA flags."""
    if cores is None:
        return list(found)
    mine = {"cores": cores, "jax": jax.__version__, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    mine["others"] = "at work" if num_neighbours(cores) else None
    return [p for p in found if all(p.environment.get(k) == v for k, v in mine.items())]


def _collectives(found: Iterable[Profile], num_devices: int | None) -> dict[Group, dict[str, Curve]]:
    points: dict[Group, dict[str, dict[float, float]]] = {}
    for profile in _at(found, None if num_devices is None else os.cpu_count()):
        piece = profile.piece
        if profile.kind != "collective" or piece.get("devices") not in (None, num_devices):
            continue
        try:
            group = int(piece["size"]), int(piece.get("stride", 1)), bool(piece.get("inside", True))
            points.setdefault(group, {}).setdefault(str(piece["collective"]), {})[float(piece["bytes"])] = (
                profile.seconds
            )
        except (KeyError, TypeError, ValueError):  # of a form that nobody here writes
            continue
    return {group: {kind: _curve(at) for kind, at in kinds.items()} for group, kinds in points.items()}


def _curve(points: Mapping[float, float]) -> Curve:
    sizes = sorted(points)
    return tuple(sizes), tuple(points[size] for size in sizes)


def _product(piece: Mapping[str, Any]) -> tuple[str, Shape] | None:
    dtype, shape = piece.get("dtype"), piece.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list | tuple) or len(shape) != 4:
        return None
    batch, m, k, n = map(float, shape)
    return dtype, (batch, m, k, n)
