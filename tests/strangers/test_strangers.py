"""Models from elsewhere train like on one device, where their packages are installed."""

from collections.abc import Iterator
from functools import cache

import jax
import pytest

from tests.strangers.compare import LAYOUTS, compare
from tests.strangers.models import STRANGERS, Stranger

# Losses of models that compute in float32 inside.
ROUNDED = 1e-5


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64, jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_rank_promotion", "allow")  # they were not written under our rules
    yield
    jax.config.update("jax_enable_x64", before[0])
    jax.config.update("jax_numpy_rank_promotion", before[1])


@cache
def stranger(name: str) -> Stranger:
    return STRANGERS[name]()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_trains_as_on_one_device(name: str, layout: str) -> None:
    missing = STRANGERS[name].missing()
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    found = compare(stranger(name), layout)
    assert found.moved > 1e-4, "three steps that change no loss compare nothing"
    assert found.difference <= (ROUNDED if stranger(name).float32_inside else 1e-9)
    if layout == "tp=2":
        assert found.sharded > 0
