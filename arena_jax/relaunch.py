"""Going on in another process: with more devices than this one has, or on another device type.

The plan is found and compiled in a process that has the new devices (:mod:`arena_jax.warm`) while training goes
on. At a step boundary the state is left in host memory, or in the run's directory where that has no room, with
a note ``relaunch.json`` beside the run's log; then this process is replaced by one that has the devices and goes
on from there. Process id, terminal and run directory stay. Under a supervisor, that is with
``ARENA_JAX_SUPERVISED=1``, the process ends with exit code 76 instead, and the supervisor starts the same
command in the environment that the note gives.

If the new process fails before its first step, it goes back to the grid that ran, and says why.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from arena_jax.device_type import environment_for
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import CATALOGUE, Allocation, GridShape, Plan, Request, Target, parse_target

if TYPE_CHECKING:
    from arena_jax.runtime.checkpoint_info import CheckpointInfo
    from arena_jax.runtime.contract import Rehearsed, Relaunch
    from arena_jax.warm import WarmProcess

FILE_NAME = "relaunch.json"
# The note that a process goes on from.
ENV_NOTE = "ARENA_JAX_RELAUNCH"
ENV_SUPERVISED = "ARENA_JAX_SUPERVISED"
_SHARED_MEMORY = Path("/dev/shm")
# What a checkpoint in host memory takes besides the arrays.
_ROOM = 1.1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a training runs: plan, device numbers, and how many devices its process has."""

    plan: Plan
    num_devices: int
    estimated_step_time_s: float | None = None
    engine: str = ""
    devices: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Place":
        devices = data["devices"]
        return cls(**{**data, "plan": Plan.from_json(data["plan"]), "devices": devices and tuple(devices)})


@dataclass(frozen=True, kw_only=True)
class Note:
    """What one process leaves for the next.

    Attributes:
        run: the run's directory.
        folder, step: of the checkpoint that holds the state.
        here: where the next process runs.
        back: where the one before it ran.
        target: what was asked for.
        request_id, reason: of the request.
        background_s, prepared: see ``Swap``.
        left_at: unix seconds at the end of the last step.
        failed: why ``here`` is where the training comes from; empty on the way out.
        first_step: completed steps before this command.
        history: (loss, step time) of each step of this command so far.
        swaps: those of this command so far, as JSON.
        options: further facts that the command line needs.
    """

    run: str
    folder: str
    step: int
    here: Place
    back: Place
    target: str
    request_id: str | None = None
    reason: str = ""
    background_s: float = 0.0
    prepared: bool = False
    left_at: float = 0.0
    failed: str = ""
    first_step: int = 0
    history: tuple[tuple[float, float], ...] = ()
    swaps: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self) -> Path:
        """Keep the note in the run's directory."""
        path = Path(self.run) / FILE_NAME
        environment = environment_for(self.here.plan.grid.allocation.device_type) | {ENV_NOTE: str(path)}
        data = {**vars(self), "here": self.here.to_json(), "back": self.back.to_json(), "environment": environment}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.rename(path)
        return path

    @classmethod
    def read(cls, path: Path) -> "Note":
        """Read a note; raises :class:`UsageError` for what is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            del data["environment"]
            return cls(
                **{
                    **data,
                    "here": Place.from_json(data["here"]),
                    "back": Place.from_json(data["back"]),
                    "history": tuple(map(tuple, data["history"])),
                    "swaps": tuple(data["swaps"]),
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{ENV_NOTE}: {str(path)!r} is no note of a training: {error}", hint=f"unset {ENV_NOTE}"
            ) from error

    def request(self) -> Request:
        """What was asked for."""
        return Request(target=parse_target(self.target), reason=self.reason, id=self.request_id)

    def settle(self) -> None:
        """Remove the note and the state, which has been taken over."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (Path(self.run) / FILE_NAME).unlink(missing_ok=True)

    def turned_back(self, why: str) -> "Note":
        """The note of the way back."""
        return replace(self, here=self.back, back=self.here, failed=why)


def arriving() -> Note | None:
    """The note that this process goes on from, if it was started for one."""
    path = Path(os.environ.get(ENV_NOTE) or "/nowhere")
    return Note.read(path) if path.exists() else None  # a process that is started again has taken the note already


def forget(run: Path) -> None:
    """Remove what a killed process left half way; the run goes on from its last checkpoint."""
    with suppress(UsageError):
        Note.read(run / FILE_NAME).settle()


class Departure:
    """How a training of the command line goes elsewhere; :class:`arena_jax.runtime.contract.Elsewhere`.

    Args:
        run: the run's directory.
        warm: starts processes that plan and compile.
        num_devices: devices of this process.
        device_type: what they are.
        before: the note that this process went on from.
        first_step: completed steps before this process.
    """

    def __init__(
        self,
        run: Path,
        warm: "WarmProcess",
        *,
        num_devices: int,
        device_type: str,
        before: Note | None = None,
        first_step: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = run
        self._warm = warm
        self._num_devices = num_devices
        self._device_type = device_type
        self._before = before
        self._first_step = first_step if before is None else before.first_step
        self._options = dict(options or {})
        self._history: list[tuple[float, float]] = [] if before is None else list(before.history)
        self._swaps: list[dict[str, Any]] = [] if before is None else [dict(swap) for swap in before.swaps]
        self._last_step_at = 0.0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Follow the run, for the account that the last process of a command gives."""
        if event["kind"] == "step":
            self._history.append((float(event["loss"]), float(event["step_time_s"])))
            self._last_step_at = time.time()
        elif event["kind"] == "swap":
            self._swaps.append({k: v for k, v in event.items() if k not in ("time", "kind")})

    def why(self, target: GridShape | Allocation, devices: Sequence[int] | None) -> str:
        allocation = _allocation(target)
        if allocation.device_type != self._device_type:
            return f"this process runs on {self._device_type} devices"
        platform = CATALOGUE[allocation.device_type].platform
        if platform == "cpu" and allocation.num_devices > self._num_devices:
            return f"this process has {self._num_devices} devices"
        return ""

    def rehearse(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> "Rehearsed | None":
        return self._warm.rehearse(
            target,
            devices,
            num_devices=self._devices_for(_allocation(target)),
            num_microbatches=num_microbatches,
            urgent=urgent,
            cancelled=cancelled,
        )

    def hand_over(self, relaunch: "Relaunch", tree: Mapping[str, Any], info: "CheckpointInfo") -> None:
        from arena_jax.runtime.checkpoint import CheckpointStore

        folder = _folder_for(sum(leaf.nbytes for leaf in tree.values()), self._run)
        try:
            with CheckpointStore(folder) as store:
                done = [*store.save(relaunch.step, tree, info), *store.wait()]
            for saved in done:
                if saved.error is not None:
                    raise OSError(saved.error)
            rehearsed, request = relaunch.rehearsed, relaunch.request
            Note(
                run=str(self._run),
                folder=str(folder),
                step=relaunch.step,
                here=Place(
                    plan=rehearsed.plan,
                    num_devices=self._devices_for(rehearsed.plan.grid.allocation),
                    estimated_step_time_s=rehearsed.estimated_step_time_s,
                    engine=rehearsed.engine,
                    devices=request.devices,
                ),
                back=Place(plan=Plan.from_json(dict(info.plan)), num_devices=self._num_devices),
                target=_text(request.target),
                request_id=request.id,
                reason=request.reason,
                background_s=relaunch.background_s,
                prepared=relaunch.prepared,
                left_at=self._last_step_at or time.time(),
                first_step=self._first_step,
                history=tuple(self._history),
                swaps=tuple(self._swaps),
                options=self._options,
            ).write()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _devices_for(self, allocation: Allocation) -> int:
        """Devices of the process: of a plain CPU as many as before, so that it need not move to come back."""
        if allocation.device_type == "cpu" == self._device_type:
            return max(allocation.num_devices, self._num_devices)
        return allocation.num_devices


def go_on(run: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the one that the note in ``run`` asks for.

    Args:
        arguments: of ``arena-jax``.
    """
    from arena_jax.warm import import_path

    environment = dict(os.environ)
    for key, value in json.loads((run / FILE_NAME).read_text(encoding="utf-8"))["environment"].items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        sys.executable, [sys.executable, "-m", "arena_jax", *arguments], environment | {"PYTHONPATH": import_path()}
    )


def is_supervised() -> bool:
    """Whether another process starts what this one asks for."""
    return os.environ.get(ENV_SUPERVISED, "") not in ("", "0")


def why(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, ArenaError):
        return error.message + (f" (hint: {error.hint})" if error.hint else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _folder_for(num_bytes: int, run: Path) -> Path:
    """A new folder in host memory, or in the run's directory where that has no room."""
    try:
        if shutil.disk_usage(_SHARED_MEMORY).free > _ROOM * num_bytes:
            return Path(tempfile.mkdtemp(prefix="arena-jax-", dir=_SHARED_MEMORY))
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="handed-over-", dir=run))


def _allocation(target: GridShape | Allocation) -> Allocation:
    return target.allocation if isinstance(target, GridShape) else target


def _text(target: Target) -> str:
    return str(target) if isinstance(target, GridShape | Allocation) else type(target).__name__.lower()
