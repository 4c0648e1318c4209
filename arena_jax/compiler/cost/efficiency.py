"""What devices reach of their datasheets.

Every constant is a share of, or a rate per, a datasheet fact, so that a type nobody has measured gets
a believable value. docs/cost_model.md says which rule each follows and what it was fitted on.
"""

from dataclasses import dataclass

from arena_jax.grid import DeviceType

# Since GA10x the maker counts float32 lanes that integers share; before, every lane was float32's own.
_SHARED_LANES_SINCE = 2020
_SHARED_LANES = 128
# Power per operation is counted from this process on; an older maker's name is no larger in effect.
_REFERENCE_NM = 16.0
# HBM of the first generation, and GDDR, reach less of their pin rate.
_HBM_SINCE = 2017
_GDDR_SINCE = 2020


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Constants of the compile-time model; shares are of datasheet rates.

    Attributes:
        float32_share: of the plain float32 rate, by large products.
        tensor_share: of the rate of matrix units, by large products.
        shared_lanes_share: further share where integer work shares half of the float32 lanes.
        flops_per_joule: plain FLOPs that a 16 nm chip does within a joule; finer processes do more in
            proportion. It caps the rate of devices with a small power limit.
        tensor_flops_per_joule: the same for matrix units.
        tile_128x64, tile_64x64, tile_64x32, tile_32x32, tile_16x16: rate of a smaller output tile as a
            share of that of 128 x 128.
        tile_start_depth: depth of contraction that starting a tile costs.
        exposed_share: of the shorter of computing and moving, what is not hidden by the longer.
        store_cost: bytes that writing a byte from a product's end counts.
        unaligned_share: rate when rows are not a multiple of 16 bytes.
        old_unaligned_share: the same before 2017.
        old_long_rows: growth of time per doubling of a row beyond 8192 elements, before 2017.
        stream_share: of the memory bandwidth, by streaming kernels, HBM since 2017.
        new_gddr_share: the same for GDDR since 2020.
        old_stream_share: the same for older GDDR and HBM.
        reduce_share: further share of kernels that reduce rows and use them again.
        conv_share: further share of convolutions.
        conv_weight_passes: times that a convolution's weights pass through memory each time it runs, besides once:
            kernels lay them out anew and transform them (Winograd, FFT), however few the images.
        unfused_share: of the bytes that work vectors count, what fusions move.
        launch_s: seconds between two kernels of one program.
    """

    float32_share: float = 0.94
    tensor_share: float = 0.83
    shared_lanes_share: float = 0.56
    flops_per_joule: float = 59e9
    tensor_flops_per_joule: float = 350e9
    tile_128x64: float = 0.84
    tile_64x64: float = 0.83
    tile_64x32: float = 0.44
    tile_32x32: float = 0.21
    tile_16x16: float = 0.1
    tile_start_depth: float = 7.3
    exposed_share: float = 0.34
    store_cost: float = 1.32
    unaligned_share: float = 0.98
    old_unaligned_share: float = 0.74
    old_long_rows: float = 0.51
    stream_share: float = 0.86
    new_gddr_share: float = 0.88
    old_stream_share: float = 0.745
    reduce_share: float = 0.74
    conv_share: float = 0.9
    conv_weight_passes: float = 22.0
    unfused_share: float = 0.74
    launch_s: float = 4e-6

    def flops_per_s(self, device: DeviceType, dtype: str) -> float:
        """FLOP/s that large matrix products sustain."""
        peak = device.peak(dtype)
        if device.platform == "cpu":
            return peak  # measured, not a datasheet's
        plain = device.peak("float32")
        matrix_units = device.platform == "tpu" or peak > 1.5 * plain
        reached = peak * (self.tensor_share if matrix_units else self.float32_share)
        shared = device.year >= _SHARED_LANES_SINCE and device.fp32_lanes_per_core == _SHARED_LANES
        if shared and not matrix_units:
            reached *= self.shared_lanes_share
        if device.power_w is None or device.process_nm is None:
            return reached
        per_joule = self.tensor_flops_per_joule if matrix_units else self.flops_per_joule
        finer = max(1.0, _REFERENCE_NM / device.process_nm) if device.process_nm < 10 else 1.0
        return min(reached, device.power_w * per_joule * finer)

    def bytes_per_s(self, device: DeviceType) -> float:
        """Bytes/s that streaming kernels move through device memory."""
        if device.platform == "cpu":
            return device.memory_bandwidth
        if device.memory_kind == "gddr" and device.year >= _GDDR_SINCE:
            return device.memory_bandwidth * self.new_gddr_share
        fast = device.memory_kind == "hbm" and device.year >= _HBM_SINCE
        return device.memory_bandwidth * (self.stream_share if fast else self.old_stream_share)


FITTED = Efficiency()
