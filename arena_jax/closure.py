"""``arena_jax.submit``: a ``fit`` call that the cluster service runs.

The call is carried by cloudpickle, in a file of the service's state folder, to processes that the same user's
service starts. They unpickle only a file that is this user's and that nobody else can write.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, UsageError, nearest
from arena_jax.service.job import Submission
from arena_jax.service.protocol import call, state_folder

if TYPE_CHECKING:
    from arena_jax.compiler import Problem
    from arena_jax.runtime.journal import Callback
    from arena_jax.runtime.signals import StopSignals

# Arguments of `fit` that a job of the service may give; where it runs and what it keeps is the service's business.
OPTIONS = (
    *("num_microbatches", "trainable", "precision", "axis_rules", "specs", "eval_data", "eval_every"),
    *("init_from", "nonfinite", "callbacks", "seed"),
)
_PROBLEM = ("precision", "trainable", "axis_rules", "specs", "seed")
_SAVES = 10


def submit(
    model: Any,
    optimizer: Any,
    loss_fn: Any,
    data: Iterable[Any],
    *,
    steps: int,
    name: str = "fit",
    on: str = "",
    min_devices: int = 1,
    max_devices: int | None = None,
    types: Sequence[str] = (),
    priority: float = 1.0,
    deadline_s: float | None = None,
    queue: str = "default",
    state: str | Path | None = None,
    **options: Any,
) -> str:
    """Give the cluster service a training, and return the id of its job.

    Args:
        model, optimizer, loss_fn, data, steps: as for :func:`arena_jax.fit`. All are pickled; ``data`` needs
            ``get_state`` and ``set_state`` to be resumed (lists do without).
        name: what it is called.
        on, min_devices, max_devices, types, priority, deadline_s, queue: as for ``arena-jax submit``.
        state: the service's state folder; by default as for the command line.
        options: more arguments of ``fit``, some of :data:`OPTIONS`.

    Raises:
        UsageError: an argument that cannot be carried, or that the service refuses.
        ServiceError: no service runs.
    """
    for key in options:
        if key not in OPTIONS:
            raise UsageError(f"submit takes no {key!r}{nearest(key, OPTIONS)}", hint=f"options: {', '.join(OPTIONS)}")
    folder = state_folder(state)
    closure = {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "data": data,
        "steps": steps,
        "options": options,
    }
    spec = Submission(
        kind="closure",
        name=name,
        queue=queue,
        recipe=str(_write(folder / "closures", closure)),
        folder=os.getcwd(),
        on=on,
        steps=steps,
        min_devices=min_devices,
        max_devices=max_devices,
        types=tuple(types),
        priority=priority,
        deadline_s=deadline_s,
    )
    return str(call(folder, {"do": "submit", "job": spec.to_json()})["job"]["id"])


def read_closure(path: Path) -> dict[str, Any]:
    """What :func:`submit` wrote; raise :class:`UsageError` for a file that somebody else could have written."""
    import cloudpickle

    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UsageError(f"{str(path)!r} is not read: others than user {os.geteuid()} could have written it")
    with open(path, "rb") as file:
        closure = cloudpickle.load(file)
    assert isinstance(closure, dict)
    return closure


def problem_of(path: Path) -> "tuple[Problem, int | None]":
    """What the closure trains, abstractly, and its number of microbatches."""
    from arena_jax.compiler import make_problem
    from arena_jax.data import as_loader
    from arena_jax.runtime.feed import Feed

    closure = read_closure(path)
    options = {key: value for key, value in closure["options"].items() if key in _PROBLEM}
    batch = Feed(as_loader(closure["data"])).peek()
    problem = make_problem(closure["model"], closure["optimizer"], closure["loss_fn"], batch, **options)
    return problem, closure["options"].get("num_microbatches")


def run_closure(task: Mapping[str, Any], signals: "StopSignals", pace: "Callback") -> int:
    """Train it until it ends or is stopped; returns an exit code as ``arena-jax train`` does."""
    from arena_jax.control import ControlSocket
    from arena_jax.fit import CheckpointOptions, fit

    closure = read_closure(Path(task["recipe"]))
    options = dict(closure["options"])
    callbacks = (*options.pop("callbacks", ()), pace)
    folder = Path(task["folder"]) / "fit"
    folder.mkdir(parents=True, exist_ok=True)
    steps = int(closure["steps"])
    signals.check("loading")
    hook = ControlSocket(folder)
    try:
        result = fit(
            closure["model"],
            closure["optimizer"],
            closure["loss_fn"],
            closure["data"],
            steps=steps,
            grid=task["grid"],
            checkpoint=CheckpointOptions(directory=folder, every=max(1, steps // _SAVES)),
            resume="auto",
            hook=hook,
            callbacks=callbacks,
            **options,
        )
    finally:
        hook.close()
    made = result.history
    losses = f", loss {made[0].loss:.4g} -> {made[-1].loss:.4g}" if made else ""
    print(f"{result.stop_reason} after step {result.step}{losses}; kept in {folder}", flush=True)
    codes = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_RESUMABLE, "stopped": EXIT_RESUMABLE}
    return codes.get(result.stop_reason, 0)


def _write(folder: Path, closure: Mapping[str, Any]) -> Path:
    import cloudpickle

    try:
        data = cloudpickle.dumps(dict(closure))
    except Exception as error:  # what a user's object raises when it is pickled has no common base
        raise UsageError(
            f"the training cannot be carried to another process: {error}",
            hint="give a factory for what cannot be pickled: model as a function of rngs, data as an object that opens "
            "its files when it is iterated",
        ) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.pkl"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)
    return path
