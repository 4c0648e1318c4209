"""A device type as XLA's compilers want it described.

The CUDA compiler takes a ``GpuTargetConfigProto`` as text. What it asks for that the catalogue lacks follows
from the compute capability: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability". The clock is the one at which the datasheet's float32 rate holds. The TPU compiler knows its
chips by name and takes the shape of a slice.
"""

import math
from dataclasses import dataclass

from arena_jax.errors import UsageError, nearest
from arena_jax.grid import DeviceType, Submesh

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """Limits of a compute capability, in bytes and numbers."""

    shared_bytes_per_core: int
    shared_bytes_per_block: int  # at most, where a kernel opts in
    threads_per_core: int = 2048


_ARCHITECTURES = {
    "6.0": _Architecture(shared_bytes_per_core=64 * KIB, shared_bytes_per_block=48 * KIB),
    "7.0": _Architecture(shared_bytes_per_core=96 * KIB, shared_bytes_per_block=96 * KIB),
    "7.5": _Architecture(shared_bytes_per_core=64 * KIB, shared_bytes_per_block=64 * KIB, threads_per_core=1024),
    "8.0": _Architecture(shared_bytes_per_core=164 * KIB, shared_bytes_per_block=163 * KIB),
    "8.6": _Architecture(shared_bytes_per_core=100 * KIB, shared_bytes_per_block=99 * KIB, threads_per_core=1536),
    "8.9": _Architecture(shared_bytes_per_core=100 * KIB, shared_bytes_per_block=99 * KIB, threads_per_core=1536),
    "9.0": _Architecture(shared_bytes_per_core=228 * KIB, shared_bytes_per_block=227 * KIB),
    "10.0": _Architecture(shared_bytes_per_core=228 * KIB, shared_bytes_per_block=227 * KIB),
}
# The release of cuDNN that is compiled for.
_DNN_VERSION = "9.10.0"

_CONFIG = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock:.4f}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {extension}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  dnn_version: "{dnn}"
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""

# Slices of TPU chips by their number, smallest first.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBIC = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
_SLICES = {"tpu-v5e": ("v5e", _FLAT), "tpu-v6e": ("v6e", _FLAT), "tpu-v5p": ("v5p", _CUBIC)}


def gpu_config(device: DeviceType) -> str:
    """A GPU as text of a ``GpuTargetConfigProto``.

    Raises:
        UsageError: a fact that the compiler needs is not in the catalogue.
    """
    wanted = ("compute_capability", "num_cores", "fp32_lanes_per_core", "cache_bytes")
    missing = [name for name in wanted if getattr(device, name) is None]
    if missing:
        raise UsageError(
            f"cannot compile for {device.name}: the catalogue lacks its {', '.join(missing)}",
            hint=f"give them in [types.{device.name}] of a cluster file",
        )
    capability = str(device.compute_capability)
    if capability not in _ARCHITECTURES:
        raise UsageError(
            f"cannot compile for {device.name} of compute capability {capability}{nearest(capability, _ARCHITECTURES)}",
            hint=f"known: {', '.join(_ARCHITECTURES)}",
        )
    limits = _ARCHITECTURES[capability]
    cores, lanes = int(device.num_cores or 0), int(device.fp32_lanes_per_core or 0)
    major, minor = capability.split(".")
    return _CONFIG.format(
        shared_per_core=limits.shared_bytes_per_core,
        shared_per_block=limits.shared_bytes_per_block,
        threads_per_core=limits.threads_per_core,
        cores=cores,
        lanes=lanes,
        bandwidth=int(device.memory_bandwidth),
        cache=int(device.cache_bytes or 0),
        clock=device.peak_flops["float32"] / (2 * cores * lanes) / 1e9,
        memory=int(device.memory_bytes),
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if int(major) >= 9 else "NONE",
        dnn=_DNN_VERSION,
        name=device.name,
    )


def gpu_topology(submesh: Submesh) -> str:
    """Nodes, processes of one, and devices of each process; one process drives a node."""
    return f"{submesh.num_nodes}x1x{submesh.devices_per_node}"


def tpu_slice(device: DeviceType, num_devices: int) -> str:
    """The smallest slice that holds so many chips, as the TPU compiler names it.

    Raises:
        UsageError: a chip that is not known, or more than its largest slice.
    """
    if device.name not in _SLICES:
        raise UsageError(f"cannot compile for {device.name}", hint=f"known TPUs: {', '.join(_SLICES)}")
    chip, slices = _SLICES[device.name]
    fitting = [size for size in slices if size >= num_devices]
    if not fitting:
        raise UsageError(f"no {chip} slice has {num_devices} chips", hint=f"the largest has {max(slices)}")
    return f"{chip}:{slices[min(fitting)]}"


def describe(device: DeviceType, submesh: Submesh) -> str:
    """What a program is compiled for, as text that decides what comes of it."""
    if device.platform == "tpu":
        return tpu_slice(device, math.prod((submesh.num_nodes, submesh.devices_per_node)))
    return f"{gpu_topology(submesh)}\n{gpu_config(device)}"
