"""Every plan gives the numbers of one device. The whole matrix is ``make verify``."""

from collections.abc import Iterator

import jax
import pytest

from tests.same_numbers.cases import Case, pairwise_matrix, variation_cases
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
    cases = variation_cases()
    by_name: dict[str, list[Case]] = {}
    for case in cases:
        by_name.setdefault(f"{case.variation} M{case.num_microbatches}", []).append(case)
    return [found[(i + 1) % len(found)] for i, found in enumerate(by_name.values())]


@pytest.mark.parametrize("case", [*pairwise_matrix(22), *_some_variations()], ids=lambda case: case.key)
def test_plan_matches_one_device(case: Case) -> None:
    difference = run(case)
    assert difference.losses <= TOLERANCE
    assert difference.parameters <= TOLERANCE, difference.worst_parameter
