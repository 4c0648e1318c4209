"""Time the pieces that the candidate plans of a model are made of, on one device.

Nothing of a plan runs on all its devices: a layer of a dp x tp plan is timed at the size one device has
of it; collectives are timed once for a machine, whatever the model. Repeats of several pieces are
interleaved, so that whatever else the machine does hits all of them and caches hold what they hold
between the layers of a step; the low quantile is kept. Pieces are stored as soon as they are known.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.cost.pieces import BOTH
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.profiling.cores import num_neighbours, on_cores
from arena_jax.compiler.profiling.piece_programs import (
    CHAIN,
    Run,
    collective_run,
    dispatch_run,
    fresh_run,
    layer_run,
    transfer_run,
    update_run,
)
from arena_jax.compiler.profiling.pieces import (
    ChainPiece,
    CollectivePiece,
    DispatchPiece,
    FreshPiece,
    LayerPiece,
    Pieces,
    TransferPiece,
    UpdatePiece,
)
from arena_jax.errors import ArenaError
from arena_jax.grid import Profile, ProfileStore

AnyPiece = LayerPiece | ChainPiece | FreshPiece | UpdatePiece | CollectivePiece | TransferPiece | DispatchPiece
# Pieces whose repeats are interleaved.
_GROUP = 6
REPEATS = 7
# A repeat runs a piece as often as it takes to last this long.
_LEAST_S = 5e-4
_LOW, _HIGH = 0.2, 0.8
# Layers that are timed on all cores of the node too, for what one gains that runs alone.
_ALONE = 6


@dataclass(frozen=True)
class Outcome:
    """What a profiling run did.

    Attributes:
        timed, known, left: pieces timed now, found in the store, and left for want of budget.
        refused: pieces that could not be compiled alone; they stay computed.
        device_s: seconds that devices were kept at work, summed over devices, and cores that were busy beside.
    """

    timed: int
    known: int
    left: int
    refused: int
    device_s: float


@dataclass(frozen=True)
class _Job:
    """A piece to time: under which cores, and how its program is made."""

    profile: Profile
    cores: int | None
    devices: int
    runs: int
    priority: float
    make: Callable[[], Run]


def environment_of(device: Any, cores: int | None) -> dict[str, Any]:
    """What besides the piece decides a time on this device."""
    import jaxlib

    return {
        "driver": f"{device.device_kind}, {device.client.platform_version.strip().splitlines()[0]}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cores": cores,
    } | ({"others": "at work"} if num_neighbours(cores) else {})


def profile(
    pieces: Pieces,
    problem: Problem,
    device_type: str,
    store: ProfileStore,
    *,
    num_devices: int,
    threads: int | None = None,
    budget_s: float | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, left_s: None,
) -> Outcome:
    """Time what the store lacks, the most telling first, until done or the budget is spent.

    Args:
        num_devices: of the allocation. Devices of a CPU share its cores, and pieces run on the cores of one.
        threads: of a virtual CPU type whose devices have cores of their own, how many.
        progress: called with pieces done, pieces in all, and about the seconds that remain.
    """
    jobs = _jobs(pieces, problem, device_type, num_devices, threads)
    stored = {known.digest for known in store.profiles(device_type)}
    missing = [job for job in jobs if job.profile.digest not in stored]
    started = time.perf_counter()
    done, refused, device_s = 0, 0, 0.0
    empty = dispatch_run(jax.devices()[:1])
    while missing:
        if budget_s is not None and time.perf_counter() - started >= budget_s:
            break
        # Of one number of cores, for they share a pinning.
        group = [job for job in missing if job.cores == missing[0].cores][:_GROUP]
        missing = [job for job in missing if job not in group]
        ready = []
        for job in group:
            try:
                ready.append((job, job.make()))
            except jax.errors.JaxRuntimeError as error:
                raise _device_failed(error, done, store) from error
            except (TypeError, ValueError, NotImplementedError):  # no program of its own; it stays computed
                refused += 1
        try:
            with on_cores(group[0].cores):
                times, used = _timed([run for _, run in ready] + [empty], [job.devices for job, _ in ready] + [1])
        except jax.errors.JaxRuntimeError as error:
            raise _device_failed(error, done, store) from error
        device_s += used * (1 + num_neighbours(group[0].cores))
        issue_s = float(np.quantile(times.pop(), _LOW))
        store.put([_measured(job, seconds, issue_s) for (job, _), seconds in zip(ready, times, strict=True)])
        done += len(group)
        progress(done, done + len(missing), (time.perf_counter() - started) / done * len(missing))
    return Outcome(done - refused, len(jobs) - done - len(missing), len(missing), refused, device_s)


def _device_failed(error: Exception, done: int, store: ProfileStore) -> ArenaError:
    return ArenaError(
        f"the device failed while pieces were timed: {str(error).splitlines()[0]}",
        hint=f"{done} pieces are kept in {store.path}; run this again to go on",
    )


def _measured(job: _Job, seconds: Sequence[float], issue_s: float) -> Profile:
    """The low quantile; of a part of a program, without what issuing one takes."""
    low, high = np.quantile(seconds, (_LOW, _HIGH))
    issued = issue_s if job.profile.kind in ("layer", "chain", "update", "collective") else 0.0
    return replace(
        job.profile,
        seconds=max(float(low) - issued, float(low) / 5) / job.runs,
        noise=float(high / low - 1),
        num_repeats=REPEATS,
        measured_at=time.time(),
    )


def _jobs(pieces: Pieces, problem: Problem, device_type: str, num_devices: int, threads: int | None) -> list[_Job]:
    """Everything there is to time, the most telling first."""
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    whole = os.cpu_count() if on_cpu else None
    share, slowdown = share_of_cores(num_devices) if on_cpu else (None, 1.0)
    if on_cpu and threads is not None:
        share, slowdown = min(threads, os.cpu_count() or 1), 1.0
    at_hand = devices[: min(num_devices, len(devices))]
    jobs: list[_Job] = []

    def add(
        kind: str, piece: AnyPiece, what: dict[str, Any], cores: int | None, make: Callable[[], Run], **how: Any
    ) -> None:
        computed_s = piece.computed_s / (how.pop("slower", 1.0))
        profile = Profile(
            device_type=device_type,
            kind=kind,
            piece=what,
            environment=environment_of(devices[0], cores),
            seconds=1.0,
            computed_s=max(computed_s, 1e-9),
        )
        priority = how.pop("priority", piece.priority)
        jobs.append(_Job(profile, cores, how.get("devices", 1), how.get("runs", 1), priority, make))

    for layer in pieces.layers:
        make = partial(layer_run, layer.program, layer.direction)
        add("layer", layer, layer.what, share, make, slower=slowdown)
    alone = _ALONE if share != whole and threads is None else 0
    for layer in [layer for layer in pieces.layers if layer.direction == BOTH][:alone]:
        faster = slowdown * (whole or 1) / (share or 1)
        add("layer", layer, layer.what, whole, partial(layer_run, layer.program, layer.direction), slower=faster)
    for chain in pieces.chains:
        add("chain", chain, chain.what, share, partial(layer_run, chain.program, BOTH), slower=slowdown)
    for fresh in pieces.fresh if on_cpu else ():
        add("fresh", fresh, {"bytes": fresh.num_bytes}, share, partial(fresh_run, fresh.num_bytes), slower=slowdown)
    for update in pieces.updates:
        params = [update.program.params[i] for i in update.program.owned]
        add("update", update, update.what, share, partial(update_run, problem, params), slower=slowdown)
    for c in pieces.collectives:
        if c.size > len(at_hand):
            continue  # not here; the machine that has them shares what it measures
        what = {"collective": c.collective, "size": c.size, "stride": 1, "inside": True, "bytes": c.num_bytes}
        if on_cpu and threads is None:
            what["devices"] = num_devices
        run = partial(collective_run, c.collective, c.size, c.num_bytes, at_hand)
        add("collective", c, what, whole, run, devices=len(at_hand), runs=CHAIN)
    for t in pieces.transfers if len(at_hand) > 1 else ():
        add("transfer", t, {"bytes": t.num_bytes}, whole, partial(transfer_run, t.num_bytes, at_hand), devices=2)
    for d in pieces.dispatches:
        if d.devices <= len(at_hand):
            run = partial(dispatch_run, at_hand[: d.devices])
            add("dispatch", d, {"devices": d.devices}, whole, run, devices=d.devices)
    jobs.sort(key=lambda job: -job.priority)
    return jobs


def _timed(runs: Sequence[Run], devices: Sequence[int]) -> tuple[list[list[float]], float]:
    """Seconds of each run, repeat by repeat, and device seconds used."""
    counts = []
    used = 0.0
    for run, number in zip(runs, devices, strict=True):
        run()
        start = time.perf_counter()
        run()
        once_s = time.perf_counter() - start
        used += 2 * once_s * number
        counts.append(max(1, int(_LEAST_S / max(once_s, 1e-7))))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for i, (run, count, number) in enumerate(zip(runs, counts, devices, strict=True)):
            start = time.perf_counter()
            for _ in range(count):
                run()
            seconds = time.perf_counter() - start
            used += seconds * number
            times[i].append(seconds / count)
    return times, used
