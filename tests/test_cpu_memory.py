"""Freed memory is kept: page faults are counted in processes of their own."""

import json
import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource
import numpy as np
from arena_jax.cpu_memory import keep_freed_memory

kept = keep_freed_memory()
np.ones(16 << 20)  # 128 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    np.ones(16 << 20)
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def faults(**environment: str) -> tuple[bool, int]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, check=True, capture_output=True, text=True)
    kept, number = json.loads(done.stdout)
    return kept, number


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep memory")
def test_large_blocks_are_reused() -> None:
    kept, few = faults(JAX_PLATFORMS="cpu")
    assert kept
    handed_back, many = faults(JAX_PLATFORMS="cpu", ARENA_JAX_KEEP_MEMORY="0")
    assert not handed_back
    # With pages of at most 2 MiB, four arrays of 128 MiB are 256 pages and more.
    assert many >= 256
    assert few < many / 10


def test_nothing_changes_where_jax_runs_on_an_accelerator() -> None:
    assert not faults(JAX_PLATFORMS="cuda,cpu")[0]
