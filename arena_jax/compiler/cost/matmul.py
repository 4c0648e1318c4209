"""Seconds of one matrix product: output tiles spread over cores, against the bytes that must move.

A kernel works on its output in tiles; a product with few or ragged tiles leaves cores idle, small
tiles feed the units badly, and the contraction may be split where there are too few of them. The
shape of such models is public knowledge (CUTLASS documentation, "efficient GEMM"; Osama et al. 2023,
"Stream-K", on wave quantisation); their constants are in :mod:`.efficiency`.
"""

import numpy as np

from arena_jax.compiler.cost.efficiency import Efficiency
from arena_jax.grid import DeviceType

Floats = np.ndarray
# Matrix units of TPUs are 128 x 128; a chip without a known count is taken to have this many cores.
_CORES = {"tpu": 4, "cuda": 80, "cpu": 1}
_SPLITS = (1, 4, 16)
_ALIGN_BYTES = 16
_OLD = 2017


def matmul_s(
    device: DeviceType,
    efficiency: Efficiency,
    dtype: str,
    itemsize: int,
    batch: Floats,
    m: Floats,
    k: Floats,
    n: Floats,
) -> Floats:
    """Seconds of ``(batch, m, k) x (batch, k, n)``, without the launch; arguments broadcast.

    Args:
        dtype: numpy name of the type that is computed in; ``itemsize`` the bytes of its elements.
    """
    batch, m, k, n = np.broadcast_arrays(*(np.asarray(x, float) for x in (batch, m, k, n)))
    moved = itemsize * batch * (m * k + k * n + efficiency.store_cost * m * n)
    moved_s = moved / efficiency.bytes_per_s(device)
    rate = efficiency.flops_per_s(device, dtype)
    if device.platform == "cpu":
        return np.maximum(2 * batch * m * k * n / rate, moved_s)
    aligned = (k * itemsize % _ALIGN_BYTES == 0) & (n * itemsize % _ALIGN_BYTES == 0)
    old = device.platform == "cuda" and device.year < _OLD
    share = np.where(aligned, 1.0, efficiency.old_unaligned_share if old else efficiency.unaligned_share)
    core_rate = rate * share / (device.num_cores or _CORES[device.platform])
    computed_s = np.full(batch.shape, np.inf)
    for (rows, columns), tile_share in _tiles(device, efficiency).items():
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        for split in _SPLITS:
            tile_s = 2 * rows * columns * (k / split + efficiency.tile_start_depth) / (core_rate * tile_share)
            waves = tiles * split / (device.num_cores or _CORES[device.platform])
            # A last wave that is half empty costs about half of what it would if waves were in step.
            seconds = tile_s * np.where(waves < 1, 1.0, (waves + np.ceil(waves)) / 2)
            if split > 1:  # partial sums go through memory
                seconds = seconds + 2 * split * batch * m * n * 4 / efficiency.bytes_per_s(device)
            computed_s = np.minimum(computed_s, seconds)
    if old:
        computed_s = computed_s * (1 + efficiency.old_long_rows * np.maximum(np.log2(np.maximum(k, 1) / 8192), 0))
    longer, shorter = np.maximum(computed_s, moved_s), np.minimum(computed_s, moved_s)
    return longer + efficiency.exposed_share * shorter


def balanced_shape(flops: Floats, num_bytes: Floats, itemsize: int) -> tuple[Floats, Floats]:
    """Rows (= columns) and depth of the square product with these FLOPs and bytes, both float64.

    Of the two that there may be, the one with the larger output; where there is none, a cube.
    """
    flops, elements = np.broadcast_arrays(np.asarray(flops, float), np.asarray(num_bytes, float) / itemsize)
    # rows^2 + flops / rows = elements, by Newton's method from above, where it converges in order.
    least = np.cbrt(flops / 2)
    rows = np.maximum(np.sqrt(elements), least)
    for _ in range(30):
        safe = np.maximum(rows, 1e-9)
        value, slope = safe**2 + flops / safe - elements, 2 * safe - flops / safe**2
        rows = np.maximum(np.where(slope > 0, safe - value / np.where(slope > 0, slope, 1.0), safe), least)
    return np.maximum(rows, 1.0), np.maximum(flops / (2 * np.maximum(rows, 1.0) ** 2), 1.0)


def _tiles(device: DeviceType, efficiency: Efficiency) -> dict[tuple[int, int], float]:
    if device.platform == "tpu":
        return {(128, 128): 1.0}
    return {
        (128, 128): 1.0,
        (128, 64): efficiency.tile_128x64,
        (64, 128): efficiency.tile_128x64,
        (64, 64): efficiency.tile_64x64,
        (64, 32): efficiency.tile_64x32,
        (32, 64): efficiency.tile_64x32,
        (32, 32): efficiency.tile_32x32,
        (16, 16): efficiency.tile_16x16,
    }
