"""What is said over the service's socket: one line of JSON each way, then the connection is closed.

A request is ``{"do": VERB, ...}``; an answer holds what was asked for, or ``{"error": ..., "hint": ...}``.
The socket is for its owner alone; nothing that arrives is unpickled. Where it is, ``service.json`` in the
state folder says.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from arena_jax.errors import ArenaError, UsageError
from arena_jax.owner_socket import announced, read_line

ENV_STATE = "ARENA_JAX_SERVICE"
FILE_NAME, SOCKET_NAME = "service.json", "service.sock"
# A recipe is the longest thing anybody sends; characters outside of ASCII take six bytes.
MAX_REQUEST_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 26
TIMEOUT_S = 10.0
_BUSY_WAIT_S = 0.2


class ServiceError(ArenaError):
    """The service cannot be reached, or cannot do what was asked."""


class BusyError(ServiceError):
    """The service is asked more than it answers; ask again a little later."""


def state_folder(given: str | Path | None = None) -> Path:
    """The service's state: what was given, else ``$ARENA_JAX_SERVICE``, else the platform's user state folder."""
    chosen = given or os.environ.get(ENV_STATE)
    return Path(chosen).expanduser().absolute() if chosen else user_state_path("arena-jax") / "service"


def call(state: Path, request: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Send one request and return its answer; waits while the service is busy.

    Raises:
        ServiceError: nobody listens there, or it does not answer in time.
        UsageError: it refuses.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _call(state, request, timeout_s)
        except BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(_BUSY_WAIT_S)


def _call(state: Path, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    path = _socket_of(state)
    line = json.dumps(dict(request)).encode() + b"\n"
    if len(line) > MAX_REQUEST_BYTES:
        raise UsageError(f"the request has {len(line):,} bytes; the service takes {MAX_REQUEST_BYTES:,}")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
            client.sendall(line)
            answer = json.loads(read_line(client, MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ServiceError(f"the service in {str(state)!r} does not answer: {why}", hint=_HOW_TO_START) from error
    if not isinstance(answer, dict):
        raise ServiceError(f"the service in {str(state)!r} answers with no object")
    if answer.get("busy"):
        raise BusyError(str(answer.get("error")))
    if "error" in answer:
        raise UsageError(str(answer["error"]), hint=str(answer.get("hint") or ""))
    return answer


_HOW_TO_START = "start one: arena-jax serve --cluster cluster.toml"


def _socket_of(state: Path) -> Path:
    try:
        path, owner = announced(state / FILE_NAME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"no service runs with its state in {str(state)!r}", hint=_HOW_TO_START) from error
    if owner != os.geteuid():
        raise ServiceError(f"the service in {str(state)!r} is user {owner}'s; you are user {os.geteuid()}")
    return path
