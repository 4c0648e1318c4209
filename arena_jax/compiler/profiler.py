"""Time, on one device, the matrix products that the candidate plans of a model run at their local shapes.

Nothing of a plan runs on all its devices: a product of a dp x tp plan is timed at the size one device
has of it. Repeats of several pieces are interleaved, so that whatever else the machine does hits all
of them, and the low quantile is kept. Each piece is stored as soon as it is known.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena_jax.compiler.analysis import Analysis
from arena_jax.compiler.cost import Hardware
from arena_jax.compiler.products import local_shapes
from arena_jax.errors import ArenaError
from arena_jax.grid import PlanIndex, Profile, ProfileStore

Shape = tuple[int, int, int, int]
# Pieces whose repeats are interleaved.
_GROUP = 6
_REPEATS = 7
# A repeat runs a piece as often as it takes to last this long.
_LEAST_S = 1e-3
_LOW, _HIGH = 0.2, 0.8


@dataclass(frozen=True)
class Piece:
    """One product at local shape; ``weight_s`` are the seconds that candidate plans spend in it."""

    dtype: str
    shape: Shape
    weight_s: float

    def described(self, devices: int | None) -> dict[str, Any]:
        piece: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        return piece if devices is None else piece | {"devices": devices}


def pieces_of(analysis: Analysis, index: PlanIndex, hardware: Callable[[Any], Hardware]) -> list[Piece]:
    """The products of all meshes that plans of an index use, the dearest first."""
    weights: dict[tuple[str, Shape], float] = {}
    for row in index:
        if row.plan is None:
            continue
        on = hardware(row.grid.allocation)
        for stage in row.plan.stages:
            for mesh in analysis.meshes(on, stage.submesh, stage.dp, stage.tp):
                times = mesh.work.times[stage.layers[0] : stage.layers[1] + 1].sum(axis=0)
                for product, count in zip(mesh.work.products, times, strict=True):
                    if product.kind != "dot" or not count:
                        continue
                    for shape in local_shapes(product, row.num_microbatches):
                        whole = tuple(round(x) for x in shape)
                        if not np.allclose(whole, shape):
                            continue
                        key = product.dtype, (whole[0], whole[1], whole[2], whole[3])
                        seconds = float(on.op_s("dot", product.dtype, 0.0, 0.0, shape))
                        weights[key] = weights.get(key, 0.0) + count * seconds * row.num_microbatches
    return [Piece(*key, weight) for key, weight in sorted(weights.items(), key=lambda item: -item[1])]


def environment_of(device: Any) -> dict[str, Any]:
    """What besides the piece decides a time on this device."""
    import jaxlib

    return {
        "driver": f"{device.device_kind}, {device.client.platform_version.strip().splitlines()[0]}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cores": len(os.sched_getaffinity(0)) if device.platform == "cpu" else None,
    }


@dataclass(frozen=True)
class Outcome:
    """What a profiling run did: pieces timed, found in the store, left for want of budget, device seconds."""

    timed: int
    known: int
    left: int
    device_s: float


def profile(
    pieces: Sequence[Piece],
    hardware: Hardware,
    store: ProfileStore,
    *,
    devices: int | None,
    slowdown: float = 1.0,
    budget_s: float | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, left_s: None,
) -> Outcome:
    """Time what the store lacks, dearest first, until done or the budget is spent.

    Args:
        devices: of a CPU, the virtual devices that share it; ``None`` for others.
        slowdown: seconds there over seconds here, where more devices than cores share a CPU.
        progress: called with pieces done, pieces in all, and about the seconds that remain.
    """
    device = jax.devices()[0]
    environment = environment_of(device)
    plain = replace(hardware, corrections={}, products={})

    def made(piece: Piece, seconds: float = 1.0, noise: float = 0.0) -> Profile:
        b, m, k, n = map(float, piece.shape)
        return Profile(
            device_type=hardware.device.name,
            kind="dot",
            piece=piece.described(devices),
            environment=environment,
            seconds=seconds * slowdown,
            computed_s=float(plain.op_s("dot", piece.dtype, 0.0, 0.0, (b, m, k, n))),
            noise=noise,
            num_repeats=_REPEATS,
            measured_at=time.time(),
        )

    stored = {known.digest for known in store.profiles(hardware.device.name, "dot")}
    missing = [piece for piece in pieces if made(piece).digest not in stored]
    started = time.perf_counter()
    done, device_s = 0, 0.0
    for at in range(0, len(missing), _GROUP):
        spent = time.perf_counter() - started
        if budget_s is not None and spent >= budget_s:
            break
        group = missing[at : at + _GROUP]
        try:
            times, used = _timed(group)
        except jax.errors.JaxRuntimeError as error:
            raise ArenaError(
                f"the device failed while {group[0].dtype} products were timed: {str(error).splitlines()[0]}",
                hint=f"{done} pieces are kept in {store.path}; run this again to go on",
            ) from error
        device_s += used
        results = []
        for piece, seconds in zip(group, times, strict=True):
            low, high = np.quantile(seconds, (_LOW, _HIGH))
            results.append(made(piece, float(low), float(high / low - 1)))
        store.put(results)
        done += len(group)
        progress(done, len(missing), (time.perf_counter() - started) / done * (len(missing) - done))
    return Outcome(done, len(pieces) - len(missing), len(missing) - done, device_s)


def _timed(group: Iterable[Piece]) -> tuple[list[list[float]], float]:
    """Seconds of one execution of each piece, repeat by repeat, and device seconds used."""
    product = jax.jit(lambda x, y: jax.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))))
    runs = []
    used = 0.0
    for piece in group:
        batch, m, k, n = piece.shape
        rng = np.random.default_rng(0)
        x, y = (jnp.asarray(rng.standard_normal(s), piece.dtype) for s in ((batch, m, k), (batch, k, n)))
        product(x, y).block_until_ready()
        start = time.perf_counter()
        product(x, y).block_until_ready()
        once_s = time.perf_counter() - start
        runs.append((x, y, max(1, int(_LEAST_S / max(once_s, 1e-7)))))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_REPEATS):
        for i, (x, y, count) in enumerate(runs):
            start = time.perf_counter()
            for _ in range(count):
                out = product(x, y)
            out.block_until_ready()
            seconds = time.perf_counter() - start
            used += seconds
            times[i].append(seconds / count)
    return times, used
