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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from arena_jax.device_type import environment_for
from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import Plan, Request, parse_target

FILE_NAME = "relaunch.json"
# The note that a process goes on from.
ENV_NOTE = "ARENA_JAX_RELAUNCH"
ENV_SUPERVISED = "ARENA_JAX_SUPERVISED"


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
        left_at, began_at: unix seconds at the end of the last step, and when the state began to be handed over.
        num_bytes: of the state.
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
    began_at: float = 0.0
    num_bytes: int = 0
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


def rescue(run: Path, checkpoints: Path, newest: int | None) -> int | None:
    """Make a checkpoint of the state that a killed process had handed over, where it is newer than the newest.

    Returns:
        Its step; ``None`` where there is none.
    """
    try:
        note = Note.read(run / FILE_NAME)
    except UsageError:
        return None
    source, place = Path(note.folder) / str(note.step), checkpoints / str(note.step)
    step = None
    with suppress(OSError):  # host memory does not outlive the machine
        if source.is_dir() and note.step > (newest or 0):
            checkpoints.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix="rescued-", dir=checkpoints))
            shutil.copytree(source, temporary, dirs_exist_ok=True)
            temporary.rename(place)
            step = note.step
    note.settle()
    return step


def go_on(run: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the one that the note in ``run`` asks for.

    Args:
        arguments: of ``arena-jax``.
    """
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
        return error.one_line
    return f"{type(error).__name__}: {error}".splitlines()[0]


def import_path() -> str:
    """A PYTHONPATH under which a process runs the same code, installed or not."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
