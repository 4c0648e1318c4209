"""Run directories: one per training, found again to resume it.

``ROOT/20260131-120000-123456-1a2b/`` holds ``run.json`` (id, name), ``events.jsonl``, ``checkpoints/``
and what the tracker keeps. A run that is resumed goes on in its own directory, under its own id, so
its log, its curve and its checkpoints stay in one piece.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from arena_jax.errors import CheckpointError, UsageError
from arena_jax.runtime.checkpoint_info import complete_steps

Resume = str | int
"""``auto``, ``never``, ``must``, or the number of completed steps to go back to."""

# Which open file holds the lock of which directory, for the program that replaces this one in its process.
_ENV_LOCK = "ARENA_JAX_LOCK"

RESUME_WORDS = ("auto", "never", "must")


@dataclass(kw_only=True)
class RunDirectory:
    """A directory that this process alone trains in, until :meth:`close` or its death.

    Attributes:
        path: the directory.
        run_id: kept through all resumptions.
        resume_step: completed steps of the checkpoint to start from, ``None`` for the beginning.
    """

    path: Path
    run_id: str
    resume_step: int | None = None
    _lock: int = -1

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def keep_over_exec(self) -> None:
        """Leave the directory to the program that replaces this one, so that nobody else takes it in between."""
        os.set_inheritable(self._lock, True)
        os.environ[_ENV_LOCK] = f"{self._lock}:{self.path}"
        self._lock = -1

    def close(self) -> None:
        """Let other processes train here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_run(path: Path, *, name: str, resume: Resume) -> RunDirectory:
    """Take ``path`` as the directory of a run, making it when absent.

    Raises:
        CheckpointError: ``resume`` asks for a checkpoint that is not there.
        UsageError: the directory cannot be written, or another process trains in it.
    """
    check_resume(resume)
    run = _take(path, name)
    try:
        steps = complete_steps(run.checkpoints)
        run.resume_step = _choose(steps, resume, run.checkpoints)
        if resume == "never" and steps:
            _set_aside(run, name)
    except BaseException:
        run.close()
        raise
    return run


def take_over(path: Path) -> RunDirectory | None:
    """The directory that the program before this one left by :meth:`RunDirectory.keep_over_exec`, if it is this one."""
    lock, _, kept = os.environ.pop(_ENV_LOCK, "").partition(":")
    if not lock or Path(kept) != path.absolute():
        return None
    os.set_inheritable(int(lock), False)
    return RunDirectory(path=path.absolute(), run_id=_run_id(path, ""), _lock=int(lock))


def find_run(root: Path, *, name: str, resume: Resume, num_steps: int) -> RunDirectory:
    """Resume a run under ``root``, or begin another there.

    ``auto`` goes on with the newest run that holds a complete checkpoint, unless that run is finished
    (its checkpoint has ``num_steps`` steps); ``must`` and a step number insist on one; ``never`` begins anew.
    """
    check_resume(resume)
    if resume != "never":
        for path in _runs(root):
            steps = complete_steps(path / "checkpoints")
            if resume == "auto" and steps and steps[-1] >= num_steps:
                break
            if steps:
                return open_run(path, name=name, resume=resume)
    if resume == "must" or isinstance(resume, int):
        raise CheckpointError(
            f"there is no run with a checkpoint under {str(root)!r}", hint="begin one with resume 'auto' or 'never'"
        )
    return open_run(new_path(root), name=name, resume="never")


def has_finished(root: Path, num_steps: int) -> bool:
    """Whether the newest run under ``root`` that holds a complete checkpoint has made all ``num_steps`` steps."""
    steps = (complete_steps(path / "checkpoints") for path in _runs(root))
    return next((found[-1] >= num_steps for found in steps if found), False)


def new_path(root: Path) -> Path:
    """A path for another run; names sort by time."""
    return root / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}"


def check_resume(resume: Resume) -> None:
    """Raise :class:`UsageError` for what is no :data:`Resume`."""
    if isinstance(resume, bool) or (isinstance(resume, str) and resume not in RESUME_WORDS):
        raise UsageError(f"resume is {resume!r}", hint="write auto, never, must, or a step number")
    if isinstance(resume, int) and resume < 0:
        raise UsageError(f"resume is step {resume}", hint="steps count from 0")


def _choose(steps: list[int], resume: Resume, where: Path) -> int | None:
    if resume == "never":
        return None
    if isinstance(resume, int):
        if resume not in steps:
            there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"there is no checkpoint of step {resume} in {str(where)!r}", hint=there)
        return resume
    if resume == "must" and not steps:
        raise CheckpointError(f"there is no checkpoint in {str(where)!r}", hint="begin with resume 'auto' or 'never'")
    return steps[-1] if steps else None


def _take(path: Path, name: str) -> RunDirectory:
    path = path.absolute()
    lock = -1
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Held by the open file, so a killed process lets go of it.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run_id = _run_id(path, name)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(
            f"another process is training in {str(path)!r}",
            hint="wait for it, begin another run with resume 'never', or choose another checkpoint directory",
        ) from None
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        raise UsageError(
            f"cannot write the run directory {str(path)!r}: {error.strerror}",
            hint="set checkpoint.dir to a directory that can be written",
        ) from error
    return RunDirectory(path=path, run_id=run_id, _lock=lock)


def _run_id(path: Path, name: str) -> str:
    file = path / "run.json"
    try:
        run_id = json.loads(file.read_text(encoding="utf-8"))["run_id"]
        if isinstance(run_id, str):
            return run_id
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    run_id = secrets.token_hex(8)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"run_id": run_id, "name": name, "started_at": time.time()}), encoding="utf-8")
    temporary.rename(file)
    return run_id


def _set_aside(run: RunDirectory, name: str) -> None:
    """Move an old run's files out of the way of a new one in the same directory, and take a new id."""
    aside = new_path(run.path / "set-aside")
    aside.mkdir(parents=True)
    for entry in list(run.path.iterdir()):
        if entry.name not in ("lock", "set-aside"):
            entry.rename(aside / entry.name)
    run.run_id = _run_id(run.path, name)


def _runs(root: Path) -> Iterator[Path]:
    """Run directories under ``root``, newest first."""
    try:
        paths = [path for path in root.iterdir() if (path / "run.json").is_file()]
    except FileNotFoundError:
        return iter(())
    except OSError as error:
        raise UsageError(f"cannot read {str(root)!r}: {error.strerror}") from error
    return iter(sorted(paths, reverse=True))
