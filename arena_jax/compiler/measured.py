"""What this machine's profile store knows of a device type, in the cost model's terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from arena_jax import home
from arena_jax.grid import ProfileStore

Shape = tuple[float, float, float, float]


@dataclass(frozen=True)
class Measured:
    """Measurements of one device type.

    Attributes:
        corrections: measured over computed seconds by kind of operation; ``step`` is of all kinds.
        products: (kind, dtype, (batch, m, k, n)) -> seconds, launch included.
        generation: changes with every profile.
    """

    corrections: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[tuple[str, str, Shape], float] = field(default_factory=dict)
    generation: str = ""


def measured(device_type: str, num_devices: int | None = None) -> Measured:
    """What ``$ARENA_JAX_HOME``'s store holds of a type.

    Args:
        num_devices: of a CPU, devices that share the node: profiles taken with another number are of
            other devices.
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
    products: dict[tuple[str, str, Shape], float] = {}
    for profile in store.profiles(device_type):
        key = _product(profile.piece)
        if profile.kind in ("dot", "conv") and key is not None and profile.piece.get("devices") == num_devices:
            products[profile.kind, *key] = profile.seconds
    return Measured(store.corrections(device_type), products, store.generation(device_type))


def _product(piece: Mapping[str, Any]) -> tuple[str, Shape] | None:
    dtype, shape = piece.get("dtype"), piece.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list | tuple) or len(shape) != 4:
        return None
    batch, m, k, n = map(float, shape)
    return dtype, (batch, m, k, n)
