"""Under what a problem's plans are stored: everything that decides what a row holds."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jax

import arena_jax.grid as grid_package
from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.cost import Hardware, hardware_of
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.rules.kernels import registered_rules
from arena_jax.compiler.trace import Trace
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, GridShape, JobKey


def job_key(
    problem: Problem,
    trace: Trace,
    grids: Sequence[GridShape],
    *,
    constraints: Constraints,
    num_microbatches: int | None,
    coupled: bool,
    catalogue: Catalogue = CATALOGUE,
    name: str = "",
) -> JobKey:
    """Everything a row depends on besides grid and number of microbatches.

    Args:
        grids: what is planned together. Of their device types the key holds the catalogue rows, for
            ``cpu`` as measured here. Where one number of microbatches has to serve all of them
            (``coupled`` and ``num_microbatches`` open), a row depends on the others, and they are in
            the key too.
        name: what people call the model; by default its fingerprint.
    """
    pins = {k: v for k, v in asdict(constraints).items() if k != "stages"}  # a row is of one grid anyway
    types = {grid.allocation.device_type for grid in grids}
    return JobKey(
        {
            "model": name or trace.fingerprint,
            "model_fingerprint": trace.fingerprint,
            "global_batch": problem.global_batch,
            "optimizer": [str(x.dtype) + str(x.shape) for x in jax.tree.leaves(problem.optimizer_struct)],
            "precision": asdict(problem.precision),
            "constraints": pins,
            "annotations": trace.annotations.key(),
            "num_microbatches": num_microbatches,
            "together": sorted(map(str, grids)) if coupled and num_microbatches is None else [],
            "devices": {t: _facts(hardware_of(Allocation(t, 1, 1), catalogue)) for t in sorted(types)},
            "search": _source_digest(),
            "sharding_rules": registered_rules(),
            "jax": jax.__version__,
        }
    )


def _facts(hardware: Hardware) -> dict[str, Any]:
    """What a plan can depend on of a device type, its usable memory included."""
    facts = asdict(hardware.device) | {
        "usable_bytes": hardware.usable_bytes,
        "convolutions": hardware.efficiency.conv_share,  # of a CPU it is measured
        "profiles": hardware.generation,
    }
    irrelevant = ("name", "price_per_hour", "compute_capability", "source", "sources")
    return {k: v for k, v in facts.items() if k not in irrelevant}


@cache
def _source_digest() -> str:
    """Hash of the source that answers, so that no change of search or cost model serves an old answer."""
    folders = Path(__file__).parent, Path(grid_package.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
