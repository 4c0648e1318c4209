"""Every plan gives the numbers of one device. The whole matrix is ``make verify``."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from tests.same_numbers.cases import NUM_MICROBATCHES, Case, pairwise_matrix, variation_cases
from tests.same_numbers.run import run

TOLERANCE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def _some_variations() -> list[Case]:
    """Each variation once, on ever another plan."""
    by_name: dict[str, list[Case]] = {}
    for case in variation_cases():
        other_counts = {("", 4), ("weighted", 12)}
        if case.num_microbatches == NUM_MICROBATCHES or (case.variation, case.num_microbatches) in other_counts:
            by_name.setdefault(f"{case.variation} M{case.num_microbatches}", []).append(case)
    by_name.pop(f" M{NUM_MICROBATCHES}", None)
    return [found[(i + 1) % len(found)] for i, found in enumerate(by_name.values())]


def _smaller(case: Case) -> Case:
    """Two blocks repeat as four do and compile in half the time; of experts, only every other block has some."""
    return case if case.model in ("wide_resnet", "moe") else replace(case, num_blocks=2)


CASES = [_smaller(case) for case in (*pairwise_matrix(18), *_some_variations())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_plan_matches_one_device(case: Case) -> None:
    difference = run(case)
    assert difference.losses <= TOLERANCE
    assert difference.parameters <= TOLERANCE, difference.worst_parameter
