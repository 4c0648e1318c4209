"""One line that names the machine a benchmark ran on."""

import os
import platform
from pathlib import Path


def describe() -> str:
    """CPU model, cores, Python: ``AMD EPYC, 2 cores, Python 3.11.9``."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
