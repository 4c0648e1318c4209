"""Planning and compiling in another process, so that neither slows a training's steps.

The process builds the same job from the same recipe, plans it for the target and compiles the plan. What
comes of it is in the caches: the plan in the store of plans, the executables in jax's compilation cache.
The training then only has to trace. Anything that goes wrong here costs time and is not reported: the
training does the same work again, and reports what is wrong with it. For devices that the training's own
process lacks (``rehearse``) the answer counts, as nobody else can find it.

On accelerators there is no such process, as a second one could not open them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation, GridShape, Plan, parse_target
from arena_jax.relaunch import ENV_NOTE, import_path

if TYPE_CHECKING:
    from arena_jax.planner import Candidate
    from arena_jax.runtime.contract import Rehearsed

# How nice the process is: what somebody waits for leaves the steps most of the processor, what may never
# be needed leaves them nearly all of it.
URGENT_NICE, PREPARE_NICE = 2, 10
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
        task = self._task(target, devices, num_microbatches, urgent)
        with suppress(OSError):
            _wait(_start(task, subprocess.DEVNULL), cancelled)

    def rehearse(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        *,
        num_devices: int,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> "Rehearsed | None":
        """Plan and compile for devices that this process does not have, in one that has them.

        Returns:
            The plan, or ``None`` when it was cancelled.

        Raises:
            ArenaError: what went wrong there.
        """
        from arena_jax.device_type import environment_for
        from arena_jax.runtime.contract import Rehearsed

        allocation = target.allocation
        task = self._task(target, devices, num_microbatches, urgent)
        task |= {"num_devices": num_devices, "environment": environment_for(allocation.device_type)}
        with tempfile.TemporaryFile() as said:
            try:
                process = _start(task, said)
            except OSError as error:
                raise ArenaError(f"no process could be started to plan {target}: {error}") from error
            if not _wait(process, cancelled):
                return None
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").splitlines()
        answer: dict[str, Any] = {}
        with suppress(ValueError, IndexError):
            answer = json.loads(lines[-1])
        if "plan" not in answer:
            message = answer.get("error") or f"planning {target} died with exit code {process.returncode}"
            raise ArenaError(message, hint=answer.get("hint", ""))
        return Rehearsed(
            plan=Plan.from_json(answer["plan"]),
            estimated_step_time_s=answer["estimated_step_time_s"],
            engine=answer["engine"],
        )

    def _task(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        num_microbatches: int,
        urgent: bool,
    ) -> dict[str, Any]:
        return {
            "recipe": self._recipe,
            "overrides": self._overrides,
            "num_devices": self._num_devices,
            "target": str(target),
            "devices": None if devices is None else list(devices),
            "num_microbatches": num_microbatches,
            "nice": URGENT_NICE if urgent else PREPARE_NICE,
            "parent": os.getpid(),
            "environment": {},
        }


def warm_process(devices: Sequence[Any], given: tuple[str, Sequence[str]] | None) -> WarmProcess | None:
    """A process that compiles ahead; on accelerators, which it could not open, and without a recipe none.

    Args:
        devices: those of the training.
        given: name and overrides of the recipe.
    """
    if given is None or devices[0].platform != "cpu":
        return None
    return WarmProcess(*given, len(devices))


def _start(task: dict[str, Any], stdout: Any) -> "subprocess.Popen[bytes]":
    environment = {k: v for k, v in (os.environ | task["environment"]).items() if v is not None}
    environment.pop(ENV_NOTE, None)  # a note to this process
    return subprocess.Popen(
        [sys.executable, "-m", "arena_jax.warm", json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": import_path()},
    )


def _wait(process: "subprocess.Popen[bytes]", cancelled: Callable[[], bool]) -> bool:
    """Wait until the process ends; end it, and say no, where it is called off before."""
    while process.poll() is None:
        if cancelled():
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return False
        time.sleep(_POLL_S)
    return True


def main(task: dict[str, Any]) -> None:
    """What the process does."""
    os.nice(task["nice"])
    _leave_half_the_cores()
    end_with_parent(task["parent"])
    try:
        candidate = _fill(task)
        answer: dict[str, Any] = {
            "plan": candidate.plan.to_json(),
            "estimated_step_time_s": candidate.estimated_step_time_s,
            "engine": candidate.engine,
        }
    except ArenaError as error:
        answer = {"error": error.message, "hint": error.hint}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)


def _fill(task: dict[str, Any]) -> "Candidate":
    """Plan and compile; the plan and what is known of it."""
    from arena_jax.job import build
    from arena_jax.planner import choose
    from arena_jax.recipe import load_recipe
    from arena_jax.recipe_run import make_planner
    from arena_jax.start import start_jax

    start_jax(task["num_devices"])
    planner = make_planner(build(load_recipe(task["recipe"], task["overrides"])))
    planner.settle(task["num_microbatches"])
    target = parse_target(task["target"])
    candidate = choose(planner.search(target), target)
    planner.compile(candidate, task["devices"])
    return candidate


def _leave_half_the_cores() -> None:
    """XLA compiles on as many threads as there are cores; together they would outweigh the training."""
    with suppress(OSError, AttributeError):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])


def end_with_parent(parent: int, signal_name: str = "SIGTERM") -> None:
    """Have the system end this process when the one that started it is gone (Linux; elsewhere it ends when done)."""
    with suppress(OSError, AttributeError):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.Signals[signal_name])  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
