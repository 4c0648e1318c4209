"""When nothing fits: the nearest changes that would."""

import time
from collections.abc import Iterator
from dataclasses import replace

from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.search import MAX_MICROBATCHES
from arena_jax.compiler.stored import StoredSearch
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, PlanIndex

# An allocation this many times as large is no near change any more.
_MAX_GROWTH = 4
# Nobody waits longer for a hint; what was not tried by then is not.
_PATIENCE_S = 20.0


def nearest_fits(
    search: StoredSearch,
    allocation: Allocation,
    *,
    constraints: Constraints,
    num_microbatches: int | None,
    grow: bool = True,
    catalogue: Catalogue = CATALOGUE,
) -> list[str]:
    """Changes under which a plan fits, each found by searching: one of pins, one of devices.

    Args:
        allocation: where nothing fits.
        constraints, num_microbatches: under which nothing fits.
        grow: whether more devices can help.

    Returns:
        Up to two phrases, such as ``plan.zero=search`` and ``a100-40:2x8``; empty when nothing tried fits.
    """
    batch = search.problem.global_batch
    patience = time.monotonic() + _PATIENCE_S
    found = []
    for words, pins, microbatches in _freer(constraints, num_microbatches, batch):
        if time.monotonic() > patience:
            break
        if _fits(search.plan([allocation], constraints=pins, num_microbatches=microbatches)):
            found.append(words)
            break
    for larger in _larger(allocation, catalogue) if grow else ():
        if time.monotonic() > patience + _PATIENCE_S:
            break
        if constraints.stages is not None and constraints.stages > larger.num_devices:
            continue
        if _fits(search.plan([larger], constraints=constraints, num_microbatches=num_microbatches)):
            found.append(str(larger))
            break
    return found


def _fits(index: PlanIndex) -> bool:
    return any(row.feasible for row in index)


def _freer(
    pins: Constraints, num_microbatches: int | None, batch: int
) -> Iterator[tuple[str, Constraints, int | None]]:
    """Pins with less pinned, one at a time, then all together."""
    words = []
    if pins.remat == "off":
        words.append("plan.remat=search")
        yield words[-1], replace(pins, remat="search"), num_microbatches
    if pins.zero not in ("search", 3):
        words.append("plan.zero=search")
        yield words[-1], replace(pins, zero="search"), num_microbatches
    if num_microbatches is not None:
        for more in range(num_microbatches + 1, min(batch, 2 * MAX_MICROBATCHES) + 1):
            if batch % more == 0:
                yield f"plan.num_microbatches={more}", pins, more
    unpinned = {"stages": replace(pins, stages=None), "dp": replace(pins, dp=None), "tp": replace(pins, tp=None)}
    for name, without in unpinned.items():
        if without != pins:
            words.append(f"no plan.{name}")
            yield words[-1], without, num_microbatches
    if len(words) > 1:
        free = replace(pins, remat="search", zero="search", stages=None, dp=None, tp=None)
        yield " ".join(words), free, num_microbatches


def _larger(allocation: Allocation, catalogue: Catalogue) -> Iterator[Allocation]:
    """Twice the devices, and again: a full node first, then more nodes."""
    whole = catalogue[allocation.device_type].devices_per_node
    nodes, devices = allocation.num_nodes, allocation.devices_per_node
    while nodes * devices < _MAX_GROWTH * allocation.num_devices:
        if devices * 2 <= whole:
            devices *= 2
        else:
            nodes *= 2
        yield Allocation(allocation.device_type, nodes, devices)
