"""The cores that a piece is timed on, and what the others do meanwhile."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from arena_jax.compiler.profiling import neighbour_work


def num_neighbours(cores: int | None) -> int:
    """Cores that a device with so many leaves to others; none where ``None`` says that it is no CPU."""
    return 0 if cores is None else max(0, (os.cpu_count() or 1) - cores)


@contextmanager
def on_cores(cores: int | None) -> Iterator[None]:
    """Keep all threads of this process on that many cores, those of the runtime's pool too, and the others at work.

    In a step all devices work at once. Cores that share caches, memory, power or one physical core then run slower
    than one alone: by a fifth on a virtual machine of two.
    """
    mine = sorted(os.sched_getaffinity(0)) if cores is not None else []
    if cores is None or cores >= len(mine):
        yield
        return
    with ExitStack() as stack:
        for core in mine[cores:]:
            stack.enter_context(_at_work(core))
        _pin(mine[:cores])
        stack.callback(_pin, mine)
        yield


@contextmanager
def _at_work(core: int) -> Iterator[None]:
    command = [sys.executable, "-P", neighbour_work.__file__, str(core)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield
    finally:
        process.kill()
        process.communicate()


def _pin(cores: Sequence[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # a thread that has just ended
            continue
