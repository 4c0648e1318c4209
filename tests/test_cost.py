"""Seconds of operations and collectives: hand-computed cases and how they must grow."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.compiler.cost import FITTED, OP_KINDS, Link, hardware_of, links_of, transfer_s
from arena_jax.compiler.cost.links import group_link
from arena_jax.compiler.cost.matmul import balanced_shape, matmul_s
from arena_jax.grid import CATALOGUE, Allocation, Submesh

COLLECTIVES = ("all_reduce_s", "all_gather_s", "reduce_scatter_s", "all_to_all_s")
GPUS = [name for name, row in CATALOGUE.types.items() if row.platform == "cuda"]


def on(text: str):
    return hardware_of(Allocation.parse(text))


@pytest.mark.parametrize("kind", OP_KINDS)
def test_an_operation_is_costed_elementwise(kind: str) -> None:
    hardware = on("a100:1")
    flops, num_bytes = np.array([0.0, 1e9, 1e12]), np.array([1e3, 1e8, 1e9])
    together = hardware.op_s(kind, "float16", flops, num_bytes)
    alone = [float(hardware.op_s(kind, "float16", f, b)) for f, b in zip(flops, num_bytes, strict=True)]
    assert together.tolist() == pytest.approx(alone)
    assert (np.diff(together) > 0).all()
    assert together[0] >= hardware.launch_s


def test_an_unknown_kind_of_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of operation 'matmul'"):
        on("a100:1").op_s("matmul", "float16", np.ones(1), np.ones(1))


def test_what_was_measured_corrects_the_kind_it_was_measured_for() -> None:
    hardware = on("a100:1")
    corrected = replace(hardware, corrections={"dot": 2.0})
    args = "float16", np.array([1e12]), np.array([1e8])
    extra_s = corrected.op_s("dot", *args) - hardware.op_s("dot", *args)
    assert extra_s == pytest.approx(hardware.op_s("dot", *args) - hardware.launch_s)
    assert corrected.op_s("reduce", *args) == hardware.op_s("reduce", *args)


def test_this_cpu_computes_at_the_rates_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from arena_jax.compiler import cpu

    rates = {"cores": 2.0, "float32": 8e10, "float64": 4e10, "convolution": 2e10, "pass_bytes_per_s": 5e9}
    rates["bytes_per_s"] = 1e12
    monkeypatch.setattr(cpu, "node_rates", lambda: rates)
    measured = hardware_of(Allocation.parse("cpu:2"))
    shape, flops = (1.0, 512.0, 512.0, 512.0), 2 * 512.0**3
    seconds = {kind: measured.op_s(kind, "float32", flops, 0.0, shape) - measured.launch_s for kind in ("dot", "conv")}
    assert seconds["dot"] == pytest.approx(flops / 4e10)  # its half of the node
    assert seconds["conv"] == pytest.approx(flops / 1e10)
    assert measured.fused_s(np.array([1e9])) == pytest.approx(1e9 / 2.5e9)
    assert measured.memory_s(np.array([1e9])) == pytest.approx(1e9 / 5e11)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_product_reaches_a_believable_share_of_every_gpu(name: str, dtype: str) -> None:
    device = CATALOGUE[name]
    seconds = float(matmul_s(device, FITTED, dtype, np.dtype(dtype).itemsize, 1, 16384, 16384, 16384))
    share = 2 * 16384**3 / seconds / device.peak(dtype)
    assert 0.25 < share < 0.96, share
    # FLOP/s that power cannot feed: only cards with small limits.
    assert device.power_w < 400 or share > 0.45


def test_a_product_on_a_v100_by_hand() -> None:
    """128 x 128 tiles on 80 cores: 80 of them take one wave, an 81st costs most of another."""
    device = CATALOGUE["v100"]
    full, more = (float(matmul_s(device, FITTED, "float32", 4, 1, 128, 8192, 128 * n)) for n in (80, 81))
    rate = 15.7e12 * FITTED.float32_share
    one_wave_s = 2 * 128 * 128 * (8192 + FITTED.tile_start_depth) / (rate / 80)
    moved = 4 * (128 * 8192 + 8192 * 128 * 80 + FITTED.store_cost * 128 * 128 * 80)
    assert full == pytest.approx(one_wave_s + FITTED.exposed_share * moved / (900e9 * FITTED.stream_share), rel=1e-6)
    assert 1.02 < more / full < 1.6


@given(
    st.sampled_from([*GPUS, "tpu-v5e"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.lists(st.integers(1, 5000), min_size=4, max_size=4),
)
def test_no_product_is_faster_than_the_datasheet(name: str, dtype: str, dims: list[int]) -> None:
    device = CATALOGUE[name]
    batch, m, k, n = dims
    seconds = float(matmul_s(device, FITTED, dtype, 4 if dtype == "float32" else 2, batch, m, k, n))
    assert seconds >= 2 * batch * m * k * n / device.peak(dtype)
    itemsize = 4 if dtype == "float32" else 2
    assert seconds >= itemsize * batch * (m * k + k * n + m * n) / device.memory_bandwidth


@given(st.floats(1, 5e4), st.floats(1, 5e4))
def test_the_square_product_is_found_again(rows: float, depth: float) -> None:
    flops, num_bytes = 2 * rows * rows * depth, 2 * (rows * rows + 2 * rows * depth)
    side, deep = balanced_shape(flops, num_bytes, 2)
    assert 2 * side * side * deep == pytest.approx(flops, rel=1e-3) or deep == 1 or side == 1
    if rows > depth:  # then the given one is the one with the larger output
        assert float(side) == pytest.approx(rows, rel=1e-3)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_costed_elementwise(name: str) -> None:
    sizes = np.array([0.0, 1e3, 1e8])
    seconds = getattr(Link(size=4, bandwidth=1e9, latency_s=1e-5), name)(sizes)
    assert seconds.shape == sizes.shape
    assert (np.diff(seconds) > 0).all()
    assert (getattr(Link(size=1, bandwidth=1e9, latency_s=1e-5), name)(sizes) == 0).all()


def test_collectives_by_hand() -> None:
    link = Link(size=4, bandwidth=1e9, pairs_bandwidth=5e8, latency_s=1e-3, launch_s=0.1)
    assert link.all_gather_s(4e9) == pytest.approx(0.1 + 3e-3 + 3.0)
    assert link.reduce_scatter_s(4e9) == pytest.approx(0.1 + 3e-3 + 3.0)
    assert link.all_reduce_s(4e9) == pytest.approx(0.1 + 6e-3 + 6.0)
    assert link.all_to_all_s(4e9) == pytest.approx(0.1 + 3e-3 + 6.0)
    meeting = replace(link, meets=True)
    assert meeting.all_reduce_s(4e9) == link.all_reduce_s(4e9)
    assert meeting.all_gather_s(4e9) == link.all_reduce_s(4e9)


def test_devices_that_share_cores_launch_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    two, eight = on("cpu:2"), on("cpu:8")
    assert eight.launch_s == pytest.approx(4 * two.launch_s)
    assert on("a100:8").launch_s == on("a100:1").launch_s


def test_measured_collectives_replace_the_formula() -> None:
    link = Link(size=2, bandwidth=1.0, latency_s=0.0, measured={"all_reduce": ((100.0, 10000.0), (1.0, 10.0))})
    assert link.all_reduce_s(np.array([10.0, 100.0, 1000.0, 10000.0, 1e6])) == pytest.approx(
        [1.0, 1.0, np.sqrt(10), 10.0, 1000.0]
    )
    assert link.all_gather_s(100.0) == 50.0


def test_groups_that_cross_nodes_share_their_network() -> None:
    hardware = on("a100:2x8")
    dp, tp = links_of(hardware, Submesh(2, 8), 2, 8)
    assert dp.bandwidth == pytest.approx(links_of(hardware, Submesh(2, 8), 16, 1)[0].bandwidth / 8)
    assert tp.bandwidth > 20 * dp.bandwidth
    assert tp.latency_s < dp.latency_s


def test_in_a_mesh_a_pair_has_one_link_and_all_have_them_all() -> None:
    hardware = on("v100-16:8")
    pair, four, all_of_them = (group_link(hardware, Submesh(1, 8), size, 1).bandwidth for size in (2, 4, 8))
    assert (pair * 7, four * 7 / 3) == pytest.approx((all_of_them, all_of_them))
    switched = on("v100-32:8")
    assert group_link(switched, Submesh(1, 8), 2, 1).bandwidth == group_link(switched, Submesh(1, 8), 8, 1).bandwidth


def test_a_transfer_between_nodes_is_slower() -> None:
    hardware = on("a40:2x2")
    assert transfer_s(hardware, 1e8, same_node=False) > transfer_s(hardware, 1e8, same_node=True)
