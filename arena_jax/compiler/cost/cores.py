"""What one of a CPU's virtual devices has of its cores."""

import os


def share_of_cores(num_devices: int, cores: int | None = None) -> tuple[int, float]:
    """Cores of one device, and how many times slower it is than those where devices outnumber cores."""
    cores = cores or os.cpu_count() or 1
    share = max(1, cores // num_devices)
    return share, max(1.0, share * num_devices / cores)
