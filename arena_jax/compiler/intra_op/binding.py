"""Which constraints keep a grid's plan from being faster: each is lifted in turn, and the grid searched again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arena_jax.compiler.analysis import Analysis, Constraints
from arena_jax.compiler.cost import Hardware, hardware_of
from arena_jax.compiler.inter_op.grid_search import plan_grid
from arena_jax.compiler.search import UNLIMITED_BYTES, fastest, microbatch_choices
from arena_jax.grid import CATALOGUE, Catalogue, IndexRow

MEMORY, MICROBATCHES = "memory", "plan.num_microbatches"
# What is faster by less is not worth a line.
_WORTH = 1e-3


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A constraint that binds: without it, the grid would run ``freed``."""

    constraint: str
    freed: IndexRow


def binding_constraints(
    analysis: Analysis,
    row: IndexRow,
    constraints: Constraints,
    num_microbatches: int | None,
    catalogue: Catalogue = CATALOGUE,
) -> list[Binding]:
    """Constraints without which the plan of ``row`` would be faster, the dearest first.

    Args:
        row: the best plan of its grid under ``constraints`` and ``num_microbatches``.
    """
    if row.estimate is None:
        return []
    hardware = hardware_of(row.grid.allocation, catalogue)
    # Where samples are coupled the search settled on one number for all grids, which binds like a pin.
    settled = row.num_microbatches if num_microbatches is None and analysis.coupling else num_microbatches
    found = []
    for name, pins, where, microbatches in _relaxed(constraints, hardware, settled):
        if name == MICROBATCHES:
            shared = "one number of microbatches for all grids"
            name = shared if num_microbatches is None else f"{name}={num_microbatches}"
        choices = microbatch_choices(analysis.problem, microbatches)
        freed = fastest([plan_grid(analysis, row.grid, where, pins, m) for m in choices])
        if freed.estimate is not None and freed.estimate.step_time_s < row.estimate.step_time_s * (1 - _WORTH):
            found.append(Binding(constraint=name, freed=freed))
    return sorted(found, key=lambda binding: binding.freed.step_time_s or 0.0)


def _relaxed(
    pins: Constraints, hardware: Hardware, num_microbatches: int | None
) -> Iterator[tuple[str, Constraints, Hardware, int | None]]:
    """Every way to lift one constraint. The grid itself says the number of stages."""
    endless = replace(hardware, device=replace(hardware.device, memory_bytes=UNLIMITED_BYTES))
    yield MEMORY, pins, endless, num_microbatches
    free = Constraints()
    for name in ("dp", "tp", "zero", "remat", "space"):
        pinned = getattr(pins, name)
        if pinned != getattr(free, name):
            lifted = replace(pins, **{name: getattr(free, name)})
            yield f"plan.{name}={pinned}", lifted, hardware, num_microbatches
    if num_microbatches is not None:
        yield MICROBATCHES, pins, hardware, None
