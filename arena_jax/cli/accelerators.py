"""Which accelerators this machine has, whether or not jax can use them."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 20
_GOOGLE = "0x1ae0"  # PCI vendor; /dev/vfio alone may be any passed-through device


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of accelerator found here.

    Attributes:
        description: how many of what, as words.
        extra: the extra of ``arena-jax`` that runs on it.
    """

    description: str
    extra: str


def find_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """Look for GPUs and TPUs in the device files below ``root`` and, for names, ask ``nvidia-smi``."""
    found = []
    gpu_files = sorted((root / "dev").glob("nvidia[0-9]*"))
    names = _nvidia_smi()
    if names or gpu_files:
        kinds = sorted(set(names)) or ["NVIDIA GPU"]
        found.append(Accelerator(description=f"{len(names) or len(gpu_files)} x {', '.join(kinds)}", extra="cuda12"))
    tpu_files = sorted((root / "dev").glob("accel[0-9]*"))
    if not tpu_files and _has_google_device(root):
        tpu_files = sorted((root / "dev/vfio").glob("[0-9]*"))
    if tpu_files:
        found.append(Accelerator(description=f"{len(tpu_files)} x TPU", extra="tpu"))
    return tuple(found)


def _nvidia_smi() -> list[str]:
    """Names of the GPUs that the driver reports; empty without a working driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _has_google_device(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)
