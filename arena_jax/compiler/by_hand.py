"""The plans people write by hand, to compare a search with: one stage, one way of sharding, remat as needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.stored import StoredSearch
from arena_jax.grid import Allocation, GridShape, IndexRow, PlanIndex

NAMES: Mapping[str, str] = {
    "dp": "pure data parallelism",
    "fsdp": "data parallelism with parameters, gradients and optimizer state sharded (ZeRO-3)",
    "tp": "Megatron tensor parallelism inside a node, data parallelism over nodes",
}


def by_hand(name: str, allocation: Allocation) -> Constraints:
    """The pins of a hand-written plan on an allocation.

    Rematerialisation and the number of microbatches stay open: whoever writes a plan tries these.
    Tensor parallelism stays inside a node, as Megatron-LM has it (Narayanan et al. 2021, section 3.2).
    """
    if name == "tp":
        return Constraints(stages=1, dp=allocation.num_nodes, tp=allocation.devices_per_node, zero=0)
    data_parallel = Constraints(stages=1, dp=allocation.num_devices, tp=1, zero=0)
    return replace(data_parallel, zero=3) if name == "fsdp" and allocation.num_devices > 1 else data_parallel


@dataclass(frozen=True, kw_only=True)
class HandWritten:
    """A hand-written plan and how it does, as a row of the index; infeasible where it does not fit."""

    name: str
    row: IndexRow


def compare(
    search: StoredSearch, index: PlanIndex, names: Sequence[str], *, num_microbatches: int | None, engine: str
) -> list[HandWritten]:
    """The named hand-written plans on every allocation of an index, in the index's order.

    Args:
        num_microbatches, engine: as the index was searched with.
    """
    found = []
    for allocation in dict.fromkeys(row.grid.allocation for row in index):
        settled = num_microbatches
        if settled is None and search.coupled:  # another number would compute something else
            settled = next(iter(index)).num_microbatches
        for name in names:
            pins = replace(by_hand(name, allocation), engine=engine)
            (row,) = search.plan([GridShape(allocation, 1)], constraints=pins, num_microbatches=settled)
            found.append(HandWritten(name=name, row=row))
    return found
