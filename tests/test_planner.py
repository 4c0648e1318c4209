"""What the planner accepts of the devices at hand, and how it says what would work."""

from types import SimpleNamespace
from typing import Any

import pytest

from arena_jax.compiler import plan_problem
from arena_jax.compiler.inter_op.grid_search import FEWER
from arena_jax.errors import InfeasibleError, UsageError
from arena_jax.grid import CATALOGUE, Allocation, GridShape, IndexRow, PlanIndex
from arena_jax.planner import Planner, allocation_of, choose
from tests.problems import tower_analysis


def devices(number: int, kind: str = "NVIDIA X9000", platform: str = "gpu") -> list[Any]:
    return [SimpleNamespace(platform=platform, device_kind=kind, process_index=0)] * number


def planner(found: list[Any]) -> Planner:
    problem: Any = None  # nothing is planned here
    return Planner(problem, devices=found)


def test_hardware_that_the_catalogue_lacks_runs_a_grid_that_is_named() -> None:
    with pytest.raises(UsageError, match="not in the hardware catalogue") as caught:
        allocation_of(devices(4))
    assert "name a grid" in caught.value.hint
    unknown = planner(devices(4))
    unknown.check_fits(Allocation.parse("h100:4"))
    with pytest.raises(UsageError, match="needs 8 devices, jax has 4") as caught:
        unknown.check_fits(Allocation.parse("h100:8"))
    assert "4 x NVIDIA X9000" in caught.value.hint
    with pytest.raises(UsageError, match="asks for cpu devices; jax runs on 4 x NVIDIA X9000"):
        unknown.check_fits(Allocation.parse("cpu:4"))


def test_known_hardware_is_named_as_the_catalogue_does() -> None:
    with pytest.raises(UsageError, match=r"jax runs on h100-sxm:4 here") as caught:
        planner(devices(4, "NVIDIA H100 80GB HBM3")).check_fits(Allocation.parse("cpu:4"))
    assert "a grid of h100-sxm" in caught.value.hint


@pytest.mark.parametrize(
    ("reason", "least_memory_bytes", "hint"),
    [
        (f"the model has 1 layer to cut, {FEWER}", None, "use fewer stages"),
        ("needs 90 GiB", 90 << 30, "use more devices, a smaller batch"),
        ("no dp divides the 3 rows of a microbatch here", None, "use another batch"),
    ],
)
def test_the_hint_follows_what_excludes_the_grid(reason: str, least_memory_bytes: int | None, hint: str) -> None:
    grid = GridShape.parse("cpu:4/s4")
    row = IndexRow(
        grid=grid,
        num_microbatches=1,
        plan=None,
        estimate=None,
        reason=reason,
        least_memory_bytes=least_memory_bytes,
    )
    with pytest.raises(InfeasibleError, match=reason) as caught:
        choose(PlanIndex([row]), grid)
    assert caught.value.hint.startswith(hint)


def test_a_type_without_the_arithmetic_of_the_run_is_infeasible_by_name() -> None:
    analysis = tower_analysis()
    catalogue = CATALOGUE.extended({"old": {"threads": 1, "lacks": ["float32"]}, "new": {"threads": 1}})
    allocations = [Allocation("old", 1, 1), Allocation("new", 1, 1)]
    index = plan_problem(analysis.problem, allocations, catalogue=catalogue, analysis=analysis, num_microbatches=1)
    old, new = index
    assert new.feasible
    assert old.reason == "old has no float32 arithmetic, and the run's precision is pinned"
    with pytest.raises(InfeasibleError, match="old has no float32") as caught:
        choose(PlanIndex([old]), Allocation("old", 1, 1))
    assert "another device type" in caught.value.hint


def test_a_process_stands_for_one_virtual_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena_jax.device_type.CATALOGUE", CATALOGUE.extended({"slow": {"threads": 1}}))
    monkeypatch.setenv("ARENA_JAX_DEVICE_TYPE", "slow")
    here = devices(2, "cpu", "cpu")
    assert str(allocation_of(here)) == "slow:2"
    with pytest.raises(UsageError, match="asks for cpu devices; this process has slow devices"):
        planner(here).check_fits(Allocation.parse("cpu:2"))
    monkeypatch.setenv("ARENA_JAX_DEVICE_TYPE", "a100")
    with pytest.raises(UsageError, match="is no CPU type"):
        allocation_of(here)
