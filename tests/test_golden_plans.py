"""The plans of the tiny recipes as text under review: what a change of search or cost model does shows here.

``pytest tests/test_golden_plans.py --update-golden`` rewrites them; read the difference before it is
committed. Hardware is a catalogue's, never this machine's, so that the files are the same everywhere.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from arena_jax.compiler import plan_problem
from arena_jax.grid import CATALOGUE, Allocation, IndexRow, Plan, Spec
from arena_jax.home import numba_cache
from arena_jax.job import build
from arena_jax.planner import constraints_of
from arena_jax.recipe import load_recipe

FOLDER = Path(__file__).parent / "golden" / "plans"
# A CPU type with threads and rates of its own is taken as it is, not measured.
FIXED = CATALOGUE.extended({"cpu": {"threads": 1, "peak_flops": {"float32": 50e9, "float64": 25e9, "float16": 50e9}}})
ALLOCATIONS = ("cpu:4", "a100:2x2")
NUM_MICROBATCHES = 4


@pytest.fixture(autouse=True)
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without what other tests have measured and learnt; alpa's compiled functions stay at hand."""
    numba_cache().mkdir(parents=True, exist_ok=True)
    (tmp_path / "numba").symlink_to(numba_cache())
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path))


@pytest.mark.parametrize("name", ["gpt_tiny", "bert_tiny", "moe_tiny", "wide_resnet_tiny"])
def test_plans_are_as_reviewed(name: str, golden) -> None:
    recipe = load_recipe(name)
    job = build(recipe)
    problem = job.problem()
    index = plan_problem(
        problem,
        [Allocation.parse(allocation) for allocation in ALLOCATIONS],
        constraints=constraints_of(recipe.plan),
        num_microbatches=NUM_MICROBATCHES,
        catalogue=FIXED,
    )
    lines = [line for row in index for line in _row(row, index.best(row.grid.allocation) is row)]
    golden(FOLDER / f"{name}.txt", "\n".join([f"{name}, {NUM_MICROBATCHES} microbatches", *lines, ""]))


def _row(row: IndexRow, is_best: bool) -> Iterator[str]:
    yield ""
    if row.plan is None or row.estimate is None:
        yield f"{row.grid}: {row.reason}"
        return
    # Two digits: enough to see a change of plan or of cost, not rounding between versions of jax.
    yield f"{row.grid}: {row.estimate.step_time_s:.2g} s" + (", the best" if is_best else "")
    yield from _stages(row.plan)


def _stages(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        remat = ", remat" if stage.remat else ""
        first, last = stage.layers
        yield f"  layers {first}-{last} on {stage.submesh}: dp {stage.dp} x tp {stage.tp}, zero {stage.zero}{remat}"
        specs: dict[tuple[str, str], int] = {}
        for name, spec in stage.parameters.items():
            place = re.sub(r"\d+", "#", name), _text(spec)
            specs[place] = specs.get(place, 0) + 1
        for (name, text), count in sorted(specs.items()):
            yield f"    {name}: {text}" + (f" ({count} of them)" if count > 1 else "")


def _text(spec: Spec) -> str:
    return ", ".join("-" if dim is None else dim if isinstance(dim, str) else "+".join(dim) for dim in spec)
