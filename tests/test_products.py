"""Matrix products as one device runs them: local sizes, what a microbatch shrinks, both passes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.intra_op.flat import Op
from arena_jax.compiler.intra_op.layout import DP, TP, MeshShape
from arena_jax.compiler.intra_op.products import Product, product_of, product_seconds
from arena_jax.grid import Allocation

MESH = MeshShape(2, 4)


def op_of(function, *shapes) -> Op:
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float16) for s in shapes))
    (eqn,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("dot_general", "conv_general_dilated"))
    return Op(eqn.primitive.name, "0", eqn, None, [], [], 0, 1.0, False, True, 0)


def test_a_column_parallel_product() -> None:
    op = op_of(lambda x, y: x @ y, (32, 128, 64), (64, 256))
    rows = [(True, False, False), (False, False)]
    found = product_of(op, [(DP, 0, 0), (0, TP)], [(DP, 0, TP)], rows, (True, True), MESH)
    assert found == Product("dot", "float16", (1, 16 * 128, 64, 64), (False, True, False, False), (True, True), False)
    assert found.flops == 2 * 32 * 128 * 64 * 256 / 8


def test_scores_of_attention_shrink_in_their_batch() -> None:
    op = op_of(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (32, 128, 8, 16), (32, 128, 8, 16))
    rows = [(True, False, False, False)] * 2
    found = product_of(op, [(DP, 0, TP, 0)] * 2, [(DP, TP, 0, 0)], rows, (True, True), MESH)
    assert found is not None
    assert (found.shape, found.rows) == ((16 * 2, 128, 16, 128), (True, False, False, False))


def test_a_convolution_is_the_product_of_its_implicit_matrices() -> None:
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    op = op_of(conv, (8, 32, 32, 16), (3, 3, 16, 64))
    rows = [(True, False, False, False), (False,) * 4]
    found = product_of(op, [(DP, 0, 0, 0), (0, 0, 0, TP)], [(DP, 0, 0, TP)], rows, (False, True), MESH)
    assert found is not None
    assert (found.kind, found.shape) == ("conv", (1, 4 * 16 * 16, 9 * 16, 16))
    assert found.gradients == (False, True)


def test_other_operations_are_no_products() -> None:
    op = op_of(lambda x, y: x @ y, (4, 4), (4, 4))
    other = Op("add", "0", op.eqn, None, [], [], 0, 1.0, False, True, 0)
    assert product_of(other, [(), ()], [()], [(), ()], (True, True), MESH) is None


def test_both_passes_and_microbatches() -> None:
    hardware = hardware_of(Allocation("a100-40", 1, 1))
    shape, rows = (1.0, 8192.0, 4096.0, 4096.0), (False, True, False, False)
    both, weights_only, again = (
        Product("dot", "float16", shape, rows, gradients, repeated)
        for gradients, repeated in (((True, True), False), ((False, True), False), ((True, True), True))
    )
    found = product_seconds(hardware, [both, weights_only, again], 1)
    forward, backward = found.forward, found.backward
    assert not found.measured_forward.any()
    assert not found.measured_backward.any()
    assert forward[0] == forward[1] == forward[2]
    assert backward[0] == pytest.approx(2 * forward[0], rel=0.1)
    assert backward[1] < 0.6 * backward[0]
    assert backward[2] == pytest.approx(backward[0] + forward[0])
    small = product_seconds(hardware, [both], 64).forward  # a 64th of the rows fills the device worse
    assert forward[0] / 64 < small[0] < forward[0] / 8


def test_measured_products_replace_computed_ones() -> None:
    product = Product("dot", "float16", (1.0, 512.0, 64.0, 32.0), (False, True, False, False), (True, True), True)
    known = {
        ("dot", "float16", (1.0, 128.0, 64.0, 32.0)): 1.0,
        ("dot", "float16", (1.0, 128.0, 32.0, 64.0)): 2.0,
        ("dot", "float16", (1.0, 64.0, 128.0, 32.0)): 4.0,
    }
    hardware = replace(hardware_of(Allocation("a100-40", 1, 1)), products=known)
    found = product_seconds(hardware, [product], 4)
    assert (found.forward.tolist(), found.measured_forward.tolist()) == ([1.0], [1.0])
    assert (found.backward.tolist(), found.measured_backward.tolist()) == ([7.0], [7.0])
    other = product_seconds(hardware, [product], 2)  # no such piece was measured
    assert other.forward[0] < 1e-3
    assert not other.measured_forward.any()


def test_a_convolutions_weights_pass_through_memory_however_few_the_images() -> None:
    hardware = hardware_of(Allocation("a40", 1, 1))
    shape, rows = (1.0, 64 * 49.0, 9 * 512.0, 512.0), (False, True, False, False)
    conv = Product("conv", "float32", shape, rows, (True, True), False)
    whole, part = (product_seconds(hardware, [conv], m).forward[0] for m in (1, 64))
    weights_s = hardware.memory_s(hardware.efficiency.conv_weight_passes * 4 * shape[2] * shape[3])
    assert part > weights_s
    assert whole < 64 * part / 2
