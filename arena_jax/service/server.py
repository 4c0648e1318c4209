"""The owner-only Unix socket: bounded in size, in time, in rate and in number of connections."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.errors import UsageError
from arena_jax.owner_socket import OwnerSocket, peer_of
from arena_jax.service.protocol import FILE_NAME, MAX_REQUEST_BYTES, SOCKET_NAME

# A request must have arrived, and its answer been taken, within so long.
READ_S, WRITE_S = 5.0, 10.0
MAX_CONNECTIONS = 64
RATE_PER_S, BURST = 200.0, 400.0

Answer = Callable[[Any], dict[str, Any]]


class Server:
    """Listens in the state folder until :meth:`close`; answers on a thread of its own, one request at a time.

    Args:
        answer: from a request to its answer; what it raises becomes a message to the client and a call of ``note``.

    Raises:
        UsageError: another service listens there, or the socket cannot be made.
    """

    def __init__(self, state: Path, answer: Answer, *, note: Callable[[str], None] = lambda text: None) -> None:
        self._answer, self._note = answer, note
        self._open = 0
        self._tokens, self._refilled_s = BURST, time.monotonic()
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if state.stat().st_uid != os.geteuid():
            raise UsageError(f"{str(state)!r} belongs to user {state.stat().st_uid}", hint="use another --state folder")
        os.chmod(state, 0o700)
        self._place = OwnerSocket(state, SOCKET_NAME, FILE_NAME)
        # The service holds a lock on its state folder, so what lies here was left by a killed one.
        with suppress(OSError):
            self.path.unlink()
        self._socket = self._place.listen(MAX_CONNECTIONS, hint="use a --state folder on a local disk")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="service-socket", daemon=True)
        ready = threading.Event()
        self._loop.call_soon_threadsafe(ready.set)
        self._thread.start()
        ready.wait(10)

    def close(self) -> None:
        """Take no more requests, and remove the socket."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._socket.close()
        self._place.remove()

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._place.path

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_unix_server(self._serve, sock=self._socket, limit=MAX_REQUEST_BYTES)
        )
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with suppress(Exception):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            answer = await self._read_and_answer(reader, writer)
            if answer is not None:
                writer.write(json.dumps(answer).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), WRITE_S)
        except (OSError, TimeoutError):
            pass
        finally:
            self._open -= 1
            writer.close()

    async def _read_and_answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any] | None:
        user = peer_of(writer.get_extra_info("socket"))
        if user is not None and user not in (os.geteuid(), 0):
            return {"error": f"this service is user {os.geteuid()}'s; you are user {user}"}
        if self._open > MAX_CONNECTIONS or not self._token():
            return {"error": "the service is asked too much at once", "busy": True}
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), READ_S)
        except TimeoutError:
            return {"error": f"no request came within {READ_S:g} s"}
        except asyncio.LimitOverrunError:
            return {"error": f"a request is one line of at most {MAX_REQUEST_BYTES:,} bytes"}
        except asyncio.IncompleteReadError as error:
            return {"error": "a request is one line of JSON"} if error.partial else None
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"error": "a request is one line of JSON"}
        try:
            return self._answer(request)
        except Exception as error:  # ours, not the client's: it is told, and the service lives on
            self._note(f"a request failed: {type(error).__name__}: {error}")
            return {"error": f"the service failed: {type(error).__name__}: {error}"}

    def _token(self) -> bool:
        now_s = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now_s - self._refilled_s) * RATE_PER_S)
        self._refilled_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
