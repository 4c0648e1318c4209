"""A running training as another terminal sees it: a Unix socket that its owner alone can use.

:class:`ControlSocket` is a scheduler hook; :func:`ask` speaks to it, as ``arena-jax resize`` does. Both ends
send one line of JSON. This module needs no jax.

Asked for                                     answered
``{"target": "cpu:4/s2", "deadline_s": 30}``  ``{"id": "resize-1"}``, or ``{"error": ..., "hint": ...}``
``{"prepare": ["cpu:8/s1"]}``                 ``{"prepare": [...]}``
``{"state": "resize-1"}``                     the latest report, and ``outcome``: ``pending``, ``done`` or
                                              ``refused``
"""

import json
import os
import socket
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport, Stop, as_target
from arena_jax.owner_socket import OwnerSocket, announced, peer_of, read_line

FILE_NAME = "control.json"
_SOCKET_NAME = "control.sock"
_MAX_LINE_BYTES = 1 << 16
_TIMEOUT_S = 5.0
_KEYS = {"target", "devices", "deadline_s", "reason", "wait"}


class ControlSocket:
    """A scheduler hook that takes its requests from a Unix socket.

    Args:
        folder: the run's directory; ``control.json`` in it says where the socket is.
        path: of the socket; by default ``control.sock`` in the folder.
        pending: a request of a socket before this one, which brought the training here.

    Raises:
        UsageError: the socket cannot be made, or another user's or a living one is in its place.
    """

    def __init__(self, folder: str | Path, path: str | Path | None = None, *, pending: Request | None = None) -> None:
        self._place = OwnerSocket(Path(folder), _SOCKET_NAME, FILE_NAME, None if path is None else Path(path))
        self._lock = threading.Lock()
        self._request: Request | None = None
        self._latest: tuple[str, Request] | None = None
        self._outcome = ""
        self._why: tuple[str, ...] = ()
        self._count = 0
        if pending is not None and pending.id is not None:
            self._latest, self._outcome = (pending.id, pending), "pending"
            self._count = int(pending.id.rpartition("-")[2])
        self._prepare: list[GridShape] = []
        self._report: StepReport | None = None
        _clear_place(self.path)
        self._server = self._place.listen(8, hint="set hook.socket to a short path on a local disk, or to off")
        threading.Thread(target=self._serve, name="control-socket", daemon=True).start()

    # The hook.

    def poll(self, step: int) -> Request | None:
        """The latest request that was not given yet."""
        with self._lock:
            request, self._request = self._request, None
        return request

    def report(self, report: StepReport) -> None:
        """Keep the report, and find out what has become of the latest request."""
        with self._lock:
            self._report = report
            if self._latest is None or self._outcome != "pending" or report.request_id != self._latest[0]:
                return
            if report.errors:
                self._outcome, self._why = "refused", report.errors
            elif _met(self._latest[1].target, report):
                self._outcome = "done"

    def prepare(self) -> list[GridShape]:
        """What was asked to be compiled ahead."""
        with self._lock:
            return list(self._prepare)

    def close(self) -> None:
        """Take no more requests, and remove the socket."""
        with suppress(OSError):
            self._server.close()
        self._place.remove()

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._place.path

    # The server.

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError, ValueError):
                connection.settimeout(_TIMEOUT_S)
                try:
                    user = peer_of(connection)
                    if user not in (None, os.geteuid(), 0):
                        raise UsageError(f"user {user} may not resize a training of user {os.geteuid()}")
                    answer = self._answer(_read(connection))
                except ArenaError as error:
                    answer = {"error": error.message, "hint": error.hint}
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if "state" in asked:
            return self._state(asked["state"])
        if "prepare" in asked:
            grids = [GridShape.parse(str(text)) for text in asked["prepare"]]
            with self._lock:
                self._prepare = grids
            return {"prepare": [str(grid) for grid in grids]}
        request = read_request(asked)
        with self._lock:
            self._count += 1
            name = f"resize-{self._count}"
            request = replace(request, id=name)
            self._request, self._latest, self._outcome, self._why = request, (name, request), "pending", ()
        return {"id": name}

    def _state(self, name: Any) -> dict[str, Any]:
        with self._lock:
            report, latest = self._report, self._latest
            outcome = "replaced" if latest is not None and name not in (None, latest[0]) else self._outcome
            why = self._why
        said: dict[str, Any] = {"outcome": outcome, "errors": list(why)}
        if report is not None:
            said |= {
                "step": report.step,
                "num_steps": report.num_steps,
                "grid": str(report.grid),
                "plan_id": report.plan_id,
                "state": report.state,
            }
        return said


def ask(folder: str | Path, message: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Send one message to the training in ``folder``, and return its answer.

    Raises:
        UsageError: nobody listens there, the socket is another user's, or the training refuses.
    """
    path = _socket_of(Path(folder))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
            client.sendall(json.dumps(dict(message)).encode() + b"\n")
            answer = _read(client)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"the training in {str(folder)!r} does not answer: {why}", hint="it may have ended"
            ) from error
    if "error" in answer:
        raise UsageError(str(answer["error"]), hint=str(answer.get("hint") or ""))
    return answer


def read_request(fields: Mapping[str, Any]) -> Request:
    """A request from its JSON form; raises :class:`UsageError` for what is none."""
    unknown = sorted(set(fields) - _KEYS)
    if unknown or "target" not in fields:
        what = f"an unknown key {unknown[0]!r}" if unknown else "no target"
        raise UsageError(f"the request has {what}", hint=f"keys: {', '.join(sorted(_KEYS))}")
    target = as_target(str(fields["target"]))
    devices, deadline_s = fields.get("devices"), fields.get("deadline_s")
    if devices is not None:
        if not isinstance(devices, list) or not all(type(d) is int and d >= 0 for d in devices):
            raise UsageError(f"devices is {devices!r}", hint="give a list of device numbers")
        if isinstance(target, GridShape | Allocation) and len(set(devices)) != target.num_devices:
            raise UsageError(f"{target} needs {target.num_devices} devices, {devices} names {len(set(devices))}")
    if deadline_s is not None and (
        not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or deadline_s < 0
    ):
        raise UsageError(f"deadline_s is {deadline_s!r}", hint="give seconds, 0 or more")
    return Request(
        target=target,
        devices=None if devices is None else tuple(devices),
        deadline_s=None if deadline_s is None else float(deadline_s),
        reason=str(fields.get("reason", "")),
        wait=bool(fields.get("wait", False)),
    )


def find_training(path: str | Path) -> Path:
    """The run directory meant: ``path`` itself, or the newest in it that listens.

    Raises:
        UsageError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} is no run directory", hint="name the directory that `train` printed")
    if (path / FILE_NAME).is_file():
        return path
    below = sorted((entry.parent for entry in path.glob(f"*/{FILE_NAME}")), reverse=True)
    if below:
        return below[0]
    raise UsageError(
        f"no training listens in {str(path)!r}",
        hint="it has ended, or was started with hook.socket=off, hook.script or hook.file",
    )


def _met(target: Any, report: StepReport) -> bool:
    if isinstance(target, Pause):
        return report.state == "paused"
    if isinstance(target, Stop):
        return report.state == "stopped"
    if report.state not in ("running", "finished"):
        return False
    return bool(report.grid == target or report.grid.allocation == target)


def _socket_of(folder: Path) -> Path:
    try:
        path, owner = announced(folder / FILE_NAME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"no training listens in {str(folder)!r}", hint="it has ended, or was started without a socket"
        ) from error
    if owner != os.geteuid():
        raise UsageError(
            f"the socket {str(path)!r} belongs to user {owner}, you are user {os.geteuid()}",
            hint="ask as the user that trains",
        )
    return path


def _clear_place(path: Path) -> None:
    """Remove a socket that a killed training left; refuse anything else that is in the way."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot use the socket {str(path)!r}: {error.strerror}") from error
    if found.st_uid != os.geteuid():
        raise UsageError(f"{str(path)!r} belongs to user {found.st_uid}", hint="set hook.socket to another path")
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{str(path)!r} is in the way: it is no socket", hint="set hook.socket to another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise UsageError(f"another training listens on {str(path)!r}", hint="set hook.socket to another path")


def _read(connection: socket.socket) -> dict[str, Any]:
    try:
        message = json.loads(read_line(connection, _MAX_LINE_BYTES))
    except ValueError as error:
        raise UsageError("a message is one line of JSON") from error
    if not isinstance(message, dict):
        raise UsageError("a message is a JSON object")
    return message
