"""Matrix products and convolutions as one device runs them: their sizes decide what share of peak they reach.

Work vectors are linear; the time of a product is not. So products are kept with their local shapes,
and with which of their dims run over rows of the batch, until a number of microbatches is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arena_jax.compiler.cost import Hardware
from arena_jax.compiler.cost.hardware import itemsize_of
from arena_jax.compiler.intra_op.flat import Op
from arena_jax.compiler.intra_op.layout import Layout, MeshShape

Floats = np.ndarray


@dataclass(frozen=True)
class Product:
    """One product, ``(batch, m, k) x (batch, k, n)``, of one device for all rows of the global batch.

    Attributes:
        kind: ``dot`` or ``conv``.
        shape: batch, m, k, n.
        rows: which of them shrink with the rows of a microbatch.
        gradients: how many products its backward pass takes, one for each operand that needs it.
        again: whether the backward pass runs it once more (a rematerialised block).
    """

    kind: str
    dtype: str
    shape: tuple[float, float, float, float]
    rows: tuple[bool, bool, bool, bool]
    gradients: tuple[bool, bool]
    again: bool

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.shape)


def product_of(
    op: Op,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    rows: Sequence[Sequence[bool]],
    needs_gradient: Sequence[bool],
    mesh: MeshShape,
) -> Product | None:
    """The product that an operation is under these layouts; ``None`` where it is none.

    Args:
        rows: per operand and dim, whether it runs over rows of the batch.
    """
    if op.name not in ("dot_general", "conv_general_dilated") or op.eqn is None:
        return None
    shapes = [_local(v.aval.shape, layout, mesh) for v, layout in zip(op.eqn.invars[:2], operands, strict=False)]
    flags = [tuple(r) or (False,) * len(s) for r, s in zip(rows, shapes, strict=False)]
    dtype = str(op.eqn.invars[0].aval.dtype)
    gradients = (bool(needs_gradient[0]), bool(needs_gradient[1]))
    if op.name == "dot_general":
        shape, over = _dot(op.eqn.params, shapes, flags)
        return Product("dot", dtype, shape, over, gradients, op.again)
    result = _local(op.eqn.outvars[0].aval.shape, results[0], mesh)
    shape, over = _convolution(op.eqn.params, shapes[1], result)
    return Product("conv", dtype, shape, over, gradients, op.again)


def _local(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> tuple[float, ...]:
    axes = tuple(layout) or (0,) * len(shape)
    return tuple(size / mesh.sizes[a] for size, a in zip(shape, axes, strict=True))


def _dot(
    params: dict[str, Any], shapes: list[tuple[float, ...]], flags: list[tuple[bool, ...]]
) -> tuple[tuple[float, float, float, float], tuple[bool, bool, bool, bool]]:
    (contract_l, contract_r), (batch_l, batch_r) = params["dimension_numbers"]
    left, right = shapes
    free_l = [d for d in range(len(left)) if d not in (*contract_l, *batch_l)]
    free_r = [d for d in range(len(right)) if d not in (*contract_r, *batch_r)]

    def size(shape: tuple[float, ...], dims: Sequence[int]) -> float:
        return float(math.prod(shape[d] for d in dims))

    # Rows that a reshape has split may be flagged in several dims: the outermost group takes them.
    batch = any(flags[0][d] for d in batch_l)
    m = not batch and any(flags[0][d] for d in free_l)
    n = not batch and not m and any(flags[1][d] for d in free_r)
    k = not batch and not m and not n and any(flags[0][d] for d in contract_l)
    return (size(left, batch_l), size(left, free_l), size(left, contract_l), size(right, free_r)), (batch, m, k, n)


def _convolution(
    params: dict[str, Any], kernel: tuple[float, ...], result: tuple[float, ...]
) -> tuple[tuple[float, float, float, float], tuple[bool, bool, bool, bool]]:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    out_channels = kernel[numbers.rhs_spec[0]]
    depth = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
    pixels = math.prod(result) / result[numbers.out_spec[1]]
    return (float(groups), pixels, float(depth), out_channels / groups), (False, True, False, False)


@dataclass(frozen=True)
class Seconds:
    """Seconds of products, as arrays over them.

    Attributes:
        forward, backward: of one microbatch, without launches.
        measured_forward, measured_backward: the part of each that was measured.
    """

    forward: Floats
    backward: Floats
    measured_forward: Floats
    measured_backward: Floats


def local_shapes(product: Product, num_microbatches: float) -> tuple[tuple[float, float, float, float], ...]:
    """The products that one microbatch runs: forward, then one for each gradient that is needed."""
    batch, m, k, n = (
        max(size / num_microbatches, 1.0) if over else size
        for size, over in zip(product.shape, product.rows, strict=True)
    )
    into, weights = (batch, m, n, k), (batch, k, m, n)
    wanted = [shape for shape, needed in zip((into, weights), product.gradients, strict=True) if needed]
    return ((batch, m, k, n), *wanted)


def product_seconds(hardware: Hardware, products: Sequence[Product], num_microbatches: float) -> Seconds:
    """Seconds of each product for one microbatch."""
    computed = _computed(hardware, products, num_microbatches)
    forward, backward = computed
    measured_forward, measured_backward = np.zeros(len(products)), np.zeros(len(products))
    if hardware.products:
        for i, product in enumerate(products):
            first, *others = (
                hardware.products.get((product.kind, product.dtype, shape))
                for shape in local_shapes(product, num_microbatches)
            )
            if first is not None:
                measured_forward[i] = forward[i] = first
            if first is not None and others and all(x is not None for x in others):
                backward[i] = sum(x for x in others if x is not None) + (first if product.again else 0.0)
                measured_backward[i] = backward[i]
    return Seconds(forward, backward, measured_forward, measured_backward)


def _computed(hardware: Hardware, products: Sequence[Product], num_microbatches: float) -> tuple[Floats, Floats]:
    forward, backward = np.zeros(len(products)), np.zeros(len(products))
    for kind in ("dot", "conv"):
        for dtype in {p.dtype for p in products if p.kind == kind}:
            at = [i for i, p in enumerate(products) if (p.kind, p.dtype) == (kind, dtype)]
            sizes = np.array([products[i].shape for i in at], float).T
            rows = np.array([products[i].rows for i in at], bool).T
            batch, m, k, n = np.where(rows, np.maximum(sizes / num_microbatches, 1.0), sizes)
            again = np.array([products[i].again for i in at], float)
            wants = np.array([products[i].gradients for i in at], float).T
            weights_s = _weights_s(hardware, dtype, batch * k * n) if kind == "conv" else 0.0

            def seconds(batch: Floats, m: Floats, k: Floats, n: Floats, kind: str = kind, dtype: str = dtype) -> Floats:
                found: Floats = hardware.op_s(kind, dtype, 0.0, 0.0, (batch, m, k, n)) - hardware.launch_s
                return found

            forward[at] = seconds(batch, m, k, n) + weights_s
            into, weights = seconds(batch, m, n, k) + weights_s, seconds(batch, k, m, n) + weights_s
            backward[at] = wants[0] * into + wants[1] * weights + again * forward[at]
    return forward, backward


def _weights_s(hardware: Hardware, dtype: str, elements: Floats) -> Floats:
    """Seconds for which a convolution's weights pass through memory to be laid out and transformed."""
    seconds: Floats = hardware.memory_s(hardware.efficiency.conv_weight_passes * itemsize_of(dtype) * elements)
    return seconds
