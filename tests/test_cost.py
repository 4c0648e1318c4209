"""Seconds of operations and collectives: hand-computed cases and how they must grow."""

import numpy as np
import pytest

from arena_jax.compiler.cost import OP_KINDS, Link, hardware_of
from arena_jax.grid import Allocation

COLLECTIVES = ("all_reduce_s", "all_gather_s", "reduce_scatter_s", "all_to_all_s")


@pytest.mark.parametrize("kind", OP_KINDS)
def test_an_operation_is_costed_elementwise(kind: str) -> None:
    hardware = hardware_of(Allocation("a100-40", 1, 1))
    flops, num_bytes = np.array([0.0, 1e9, 1e12]), np.array([1e3, 1e8, 1e9])
    together = hardware.op_s(kind, "float16", flops, num_bytes)
    alone = [float(hardware.op_s(kind, "float16", f, b)) for f, b in zip(flops, num_bytes, strict=True)]
    assert together.tolist() == alone
    assert (np.diff(together) > 0).all()
    assert together[0] >= hardware.launch_s


def test_an_unknown_kind_of_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of operation 'matmul'"):
        hardware_of(Allocation("a100-40", 1, 1)).op_s("matmul", "float16", np.ones(1), np.ones(1))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_costed_elementwise(name: str) -> None:
    sizes = np.array([0.0, 1e3, 1e8])
    seconds = getattr(Link(size=4, bandwidth=1e9, latency_s=1e-5), name)(sizes)
    assert seconds.shape == sizes.shape
    assert (np.diff(seconds) > 0).all()
    assert (getattr(Link(size=1, bandwidth=1e9, latency_s=1e-5), name)(sizes) == 0).all()
