"""Planning and compiling in another process, so that neither slows a training's steps.

The process builds the same job from the same recipe, plans it for the target and compiles the plan. What
comes of it is in the caches: the plan in the store of plans, the executables in jax's compilation cache.
The training then only has to trace. Anything that goes wrong here costs time and is not reported: the
training does the same work again, and reports what is wrong with it.

On accelerators there is no such process, as a second one could not open them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.grid import Allocation, GridShape, parse_target

# How nice the process is: what somebody waits for leaves the steps most of the processor, what may never
# be needed leaves them nearly all of it.
URGENT_NICE, PREPARE_NICE = 2, 7
_POLL_S = 0.05
_END_S = 2.0


class WarmProcess:
    """Starts a process for each target; :class:`arena_jax.runtime.ahead.Warm`.

    Args:
        recipe: name or path of the recipe, or ``module:function``.
        overrides: its ``key=value`` overrides.
        num_devices: CPU devices of the training.
    """

    def __init__(self, recipe: str, overrides: Sequence[str], num_devices: int) -> None:
        self._recipe = recipe
        self._overrides = list(overrides)
        self._num_devices = num_devices

    def __call__(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> None:
        task = {
            "recipe": self._recipe,
            "overrides": self._overrides,
            "num_devices": self._num_devices,
            "target": str(target),
            "devices": None if devices is None else list(devices),
            "num_microbatches": num_microbatches,
            "nice": URGENT_NICE if urgent else PREPARE_NICE,
            "parent": os.getpid(),
        }
        with suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-m", "arena_jax.warm", json.dumps(task)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH")]))},
            )
            _wait(process, cancelled)


def _wait(process: "subprocess.Popen[bytes]", cancelled: Callable[[], bool]) -> None:
    while process.poll() is None:
        if cancelled():
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                return
            process.kill()
            process.wait()
            return
        time.sleep(_POLL_S)


def _root() -> str:
    """The folder of this package, so that the process runs the same code, installed or not."""
    return str(Path(__file__).resolve().parents[1])


def main(task: dict[str, Any]) -> None:
    """What the process does."""
    os.nice(task["nice"])
    _leave_half_the_cores()
    _end_with_parent(task["parent"])
    from arena_jax.cli.train import make_planner, start_jax
    from arena_jax.job import build
    from arena_jax.recipe import load_recipe

    start_jax(task["num_devices"])
    planner = make_planner(build(load_recipe(task["recipe"], task["overrides"])))
    planner.settle(task["num_microbatches"])
    planner.recompile(parse_target(task["target"]), task["devices"])


def _leave_half_the_cores() -> None:
    """XLA compiles on as many threads as there are cores; together they would outweigh the training."""
    with suppress(OSError, AttributeError):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])


def _end_with_parent(parent: int) -> None:
    """Have the system end this process when the training is gone (Linux; elsewhere it ends when done)."""
    with suppress(OSError, AttributeError):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
