"""Checkpoints of a run: asynchronous, atomic, restorable under any plan.

A checkpoint is a directory named after its step, written by Orbax under a temporary name and
renamed when complete, so a killed process leaves either a whole checkpoint or a temporary that
nobody restores. It holds ``arrays`` (Orbax), ``about`` (:class:`CheckpointInfo` as JSON) and
``digests.json``, the size and hash of every file of the two: Orbax restores flipped bits without a
word (tried), and reports missing files in the language of its storage layer.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from arena_jax.errors import CheckpointError, UsageError
from arena_jax.runtime.checkpoint_info import CheckpointInfo, LeafType, check_leaves, complete_steps
from arena_jax.runtime.peers import Meeting, Peers

_ARRAYS, _ABOUT, _DIGESTS = "arrays", "about", "digests.json"
_DELETED = ".deleted"
_TEMPORARY = ".orbax-checkpoint-tmp"

Tree = Mapping[str, jax.Array | np.ndarray]
"""A flat state: leaves by plan-independent name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a run saves.

    Attributes:
        directory: the run's directory; made when absent.
        every: steps between checkpoints; 0 saves nothing, not even at the end.
        keep: how many of the newest checkpoints stay.
    """

    directory: str | Path
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(f"checkpoint.every is {self.every}", hint="0 turns checkpoints off")
        if self.keep < 1:
            raise UsageError(f"checkpoint.keep is {self.keep}", hint="keep at least 1")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The end of one save: ``error`` says why it failed, else the checkpoint at ``path`` is whole.

    ``seconds`` count from the request to the commit, ``blocked_s`` those in which training stood.
    """

    step: int
    path: Path
    seconds: float
    blocked_s: float
    error: str | None = None


class CheckpointStore:
    """The checkpoints of one run, in one directory. Used by one thread at a time.

    Args:
        directory: see there.
        keep: how many of the newest stay.
        peers: the processes of the job, where there are several: all of them make the same calls. Where they
            share one runtime each writes its own shards, and process 0 commits; otherwise process 0 is given
            everything and writes it alone. In both cases process 0 alone renames and deletes.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, peers: Peers | None = None) -> None:
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._peers = peers
        self._leads = peers is None or peers.leads
        self._shared = peers is not None and peers.one_runtime
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._saving = 0
        self._meeting: Meeting | None = None
        self._quiet = _DropOrbax()
        logging.getLogger("absl").addFilter(self._quiet)

    def prepare(self) -> None:
        """Make the directory, prove that it can be written, and clear what a killed process left.

        Raises:
            UsageError: when nothing can be written there.
        """
        if not self._leads:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._probe()
        except OSError as error:
            raise UsageError(
                f"cannot write checkpoints to {str(self.directory)!r}: {error.strerror}",
                hint="set checkpoint.dir to a directory that can be written, or checkpoint.every=0",
            ) from error
        self._sweep()

    def _probe(self) -> None:
        probe = self.directory / f".probe-{os.getpid()}"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return complete_steps(self.directory)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.directory / str(step)

    def save(self, step: int, tree: Tree, info: CheckpointInfo) -> list[Saved]:
        """Start saving; return the end of the save before it, if that was still to be reported.

        Returns as soon as the arrays are safe from donation; writing goes on in the background.
        A save that fails never raises: :meth:`poll` reports it. A step that is already saved is left alone.
        """
        done = self.wait()
        started = time.monotonic()
        if self._shared:
            refused = self._refusal(step)
            if refused is not None:
                failed = Saved(step=step, path=self.path(step), seconds=0.0, blocked_s=0.0, error=refused)
                return [*done, failed] if refused else done
        elif not self._leads or step in self.steps():
            return done
        self._prune(self._keep)
        try:
            if self._checkpointer is None:
                self._checkpointer = self._make_checkpointer()
            self._saving = step
            self._meeting = self._peers.meeting() if self._shared and self._peers is not None else None
            self._checkpointer.save(
                self.path(step),
                args=ocp.args.Composite(
                    **{
                        _ARRAYS: ocp.args.PyTreeSave(
                            {name: _one_copy(leaf) for name, leaf in tree.items() if leaf.size}
                        ),
                        _ABOUT: ocp.args.JsonSave(info.to_json()),
                    }
                ),
            )
        except Exception as error:
            seconds = time.monotonic() - started
            self._sweep()
            failed = Saved(step=step, path=self.path(step), seconds=seconds, blocked_s=seconds, error=_one_line(error))
            return [*done, failed]
        self._pending = self._watcher.submit(self._finish, step, started, time.monotonic() - started)
        return done

    def _refusal(self, step: int) -> str | None:
        """Why no process is to write now; empty where the step is there already.

        Asked before, as a process that fails alone leaves the others waiting for it.
        """
        assert self._peers is not None
        why: str | None = None
        if self._leads:
            try:
                why = "" if step in self.steps() else None
                if why is None:
                    self._probe()
            except (OSError, CheckpointError) as error:
                why = _one_line(error)
        answer: str | None = self._peers.share(why)
        return answer

    def _make_checkpointer(self) -> ocp.AsyncCheckpointer:
        several = ocp.options.MultiprocessingOptions()
        barrier = None
        if self._shared:
            assert self._peers is not None
            # Naming the processes lets Orbax meet at the coordination service. Its default is a collective,
            # which from its own thread would fall in between those of the steps.
            several = ocp.options.MultiprocessingOptions(active_processes=set(range(self._peers.count)))
            barrier = self._barrier
        return ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal, barrier_sync_fn=barrier),
            multiprocessing_options=several,
        )

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all processes, or for the first that failed to write."""
        assert self._meeting is not None
        self._meeting.wait(key, timeout_ms / 1000)

    def poll(self) -> list[Saved]:
        """The save that ended since the last call, if one did. Never blocks."""
        if self._pending is None or not self._pending.done():
            return []
        return self.wait()

    def wait(self) -> list[Saved]:
        """Wait for the save under way, if any, and return its end."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def close(self) -> None:
        """Wait for the save under way, and delete all but the newest ``keep``."""
        self.wait()
        self._prune(self._keep)
        self._release()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error delete nothing, and after Ctrl-C wait for nothing."""
        if kind is None:
            self.close()
        elif not issubclass(kind, KeyboardInterrupt):
            self.wait()
            self._release()

    def _release(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self._watcher.shutdown()
        logging.getLogger("absl").removeFilter(self._quiet)

    def read_info(self, step: int) -> CheckpointInfo:
        """Read what a checkpoint says of itself; raise :class:`CheckpointError` when it is damaged."""
        where = f"checkpoint {str(self.path(step))!r}"
        if not self.path(step).is_dir():
            there = self.steps()
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {str(self.directory)!r}",
                hint=f"there are steps {', '.join(map(str, there))}" if there else "there is none at all",
            )
        try:
            data = json.loads((self.path(step) / _ABOUT / "metadata").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{where} is damaged or not made by arena_jax: {error}", hint=self._before(step)
            ) from error
        return CheckpointInfo.from_json(data, where=where)

    def restore(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array | np.ndarray]:
        """Read the leaves in ``wanted``, each into its ``sharding``, or as numpy where it has none.

        Raises:
            CheckpointError: the checkpoint is absent, damaged, or of another model or optimizer.
        """
        where = f"checkpoint {str(self.path(step))!r}"
        info = self.read_info(step)
        check_leaves(info.leaves, leaf_types(wanted), where=where)
        return self._read(step, wanted, where)

    def restore_some(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array | np.ndarray]:
        """Like :meth:`restore` for a part of the leaves: the checkpoint may hold others as well."""
        where = f"checkpoint {str(self.path(step))!r}"
        saved = self.read_info(step).leaves
        check_leaves({k: v for k, v in saved.items() if k in wanted}, leaf_types(wanted), where=where)
        return self._read(step, wanted, where)

    def _read(
        self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], where: str
    ) -> dict[str, jax.Array | np.ndarray]:
        problem = _damage(self.path(step))
        if problem is not None:
            raise CheckpointError(f"{where} is damaged: {problem}", hint=self._before(step))
        arrays = {name: leaf for name, leaf in wanted.items() if leaf.size}
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    self.path(step),
                    args=ocp.args.Composite(
                        **{
                            _ARRAYS: ocp.args.PyTreeRestore(
                                item=arrays,
                                restore_args={name: _restore_args(leaf) for name, leaf in arrays.items()},
                                partial_restore=True,
                            )
                        }
                    ),
                )[_ARRAYS]
        except Exception as error:
            raise CheckpointError(f"{where} cannot be read: {_one_line(error)}", hint=self._before(step)) from error
        return {name: _own(restored.pop(name)) if leaf.size else _empty(leaf) for name, leaf in wanted.items()}

    def set_aside_if_spoilt(self, step: int) -> bool:
        """Move a checkpoint out of the way when a parameter in it is NaN or infinite; return whether it was.

        A gradient that overflows leaves the loss of its own step finite, and so may have been saved.
        """
        types = self.read_info(step).leaves
        wanted = {
            name: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
            for name, (dtype, shape) in types.items()
            if name.startswith("params/")
        }
        leaves = self.restore_some(step, wanted).values()
        if all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in leaves if leaf.dtype.kind in "fV"):
            return False
        if self._leads:
            self._set_aside([step])
        return True

    def set_aside_after(self, step: int) -> Path | None:
        """Move checkpoints later than ``step`` out of the way, into a directory that is returned.

        Going back to an earlier step starts another branch of the run; its end must not be taken for
        the end of the old one.
        """
        later = [s for s in self.steps() if s > step]
        if not later or not self._leads:
            return None
        return self._set_aside(later)

    def _set_aside(self, steps: Sequence[int]) -> Path:
        aside = self.directory / f"set-aside-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        aside.mkdir()
        for step in steps:
            self.path(step).rename(aside / str(step))
        return aside

    def _seal(self) -> None:
        """Add the digests: Orbax calls this when all is written, just before it renames the directory."""
        (unfinished,) = self.directory.glob(f"{self._saving}{_TEMPORARY}*")
        _write_digests(unfinished)

    def _finish(self, step: int, started: float, blocked_s: float) -> Saved:
        assert self._checkpointer is not None
        error = None
        try:
            self._checkpointer.wait_until_finished()
        except Exception as raised:
            error = _one_line(raised)
            if self._meeting is not None:
                self._meeting.fail(error)
            self._sweep()
        seconds = time.monotonic() - started
        return Saved(step=step, path=self.path(step), seconds=seconds, blocked_s=blocked_s, error=error)

    def _prune(self, keep: int) -> None:
        """Delete all but the newest ``keep`` checkpoints.

        Called *before* a save, when every loss up to now is known to be finite: the one that a save
        will make the newest is not yet proven good by a step made from it, so ``keep`` proven ones stay
        beside it until the next save.
        """
        for step in self.steps()[:-keep] if self._leads else ():
            doomed = self.path(step).with_name(f"{step}{_DELETED}")
            try:
                # Renamed first: a kill in the middle must not leave half a checkpoint under its name.
                self.path(step).rename(doomed)
            except OSError:
                continue  # a disk gone read-only; the next save reports it
            shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        """Delete temporaries of saves that did not finish."""
        if not self._leads:
            return
        try:
            entries = list(os.scandir(self.directory))
        except OSError:
            return
        for entry in entries:
            if entry.is_dir() and (entry.name.endswith(_DELETED) or _TEMPORARY in entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _before(self, step: int) -> str:
        earlier = [s for s in self.steps() if s < step]
        if not earlier:
            return "there is no earlier one; start anew with resume 'never'"
        return f"the one before it is of step {earlier[-1]}: resume with {earlier[-1]}"


def leaf_types(tree: Mapping[str, Any]) -> dict[str, LeafType]:
    """Dtype name and shape of each leaf."""
    return {name: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in tree.items()}


def _write_digests(checkpoint: Path) -> None:
    digests = {name: _digest(checkpoint / name) for name in _files(checkpoint)}
    temporary = checkpoint / f"{_DIGESTS}.tmp"
    temporary.write_text(json.dumps(digests, indent=0, sort_keys=True), encoding="utf-8")
    temporary.rename(checkpoint / _DIGESTS)


def _files(checkpoint: Path) -> list[str]:
    return sorted(
        str(file.relative_to(checkpoint))
        for item in (_ARRAYS, _ABOUT)
        for file in (checkpoint / item).rglob("*")
        if file.is_file() and file.name != "commit_success.txt"
    )


def _digest(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return [path.stat().st_size, digest]


def _damage(checkpoint: Path) -> str | None:
    """Say what is wrong with the files of a checkpoint, or ``None``."""
    try:
        digests: dict[str, Sequence[Any]] = json.loads((checkpoint / _DIGESTS).read_text(encoding="utf-8"))
    except OSError as error:
        return f"{_DIGESTS}: {error.strerror}"
    except ValueError as error:
        return f"{_DIGESTS} is not JSON: {error}"
    for name, (num_bytes, digest) in digests.items():
        try:
            there = _digest(checkpoint / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if there[0] != num_bytes:
            return f"{name} has {there[0]} bytes, {num_bytes} were written"
        if there[1] != digest:
            return f"{name} does not hold what was written"
    return None


def _one_copy(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """One device's copy of what every device holds.

    Orbax would let each replica write a slice: eight devices of one host gain nothing from eight times
    as many small transfers (0.2 s of a 0.25 s save).
    """
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and jax.process_count() == 1:
        return leaf.addressable_data(0)
    return leaf


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True)


@lru_cache(maxsize=1024)
def _copier(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=sharding)


def _own(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Give a restored array buffers of its own.

    What a restore returns may alias host memory and then cannot be donated, so that the first step
    would hold the state twice. Called leaf by leaf, so that only one leaf is.
    """
    return _copier(leaf.sharding)(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    """A leaf without elements, which Orbax refuses to store."""
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return zeros if leaf.sharding is None else jax.device_put(zeros, leaf.sharding)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


class _DropOrbax(logging.Filter):
    """Orbax logs, with tracebacks, every error that it also raises; we report what it raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname
