"""Rates of this machine's CPU: measured once in a process of their own, kept under ``ARENA_JAX_HOME``. Needs no jax."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from arena_jax.home import home

# 2: memory is kept between steps (:mod:`arena_jax.cpu_memory`), which makes bytes four times as fast.
# 3: with the rate of convolutions.
# 4: rates of the parts of a layer with their gradients instead of the best there are.
_FORMAT = 4


@cache
def node_rates() -> dict[str, float]:
    """FLOP/s of products by dtype (``float32``, ``float64``) and of a float32 ``convolution``, ``pass_bytes_per_s`` of
    what is no product, all with their gradients; ``bytes_per_s`` of a copy, and ``cores``. Of the whole node.

    To be called before this process is kept on some of its cores: the process that measures inherits them.
    """
    cores = float(os.cpu_count() or 1)
    path = home() / "cpu.json"
    with suppress(OSError, ValueError):
        data: Any = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("format") == _FORMAT and data.get("cores") == cores:
            return data
    command = [sys.executable, "-m", "arena_jax.compiler.cpu_rates"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    rates = {"format": float(_FORMAT), "cores": cores, **json.loads(done.stdout)}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):  # then it is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(rates))
        temporary.replace(path)
    return rates
