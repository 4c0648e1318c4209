"""The line between a supervisor and a process it started: JSON objects, one a line, over a socket pair.

A worker inherits its end as a file descriptor. When either side dies, the other reads an end of file.
"""

import json
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_CHUNK_BYTES = 1 << 16


class Line:
    """One end. Sending is safe from several threads; receiving is for one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._rest = b""
        self.closed = False

    @classmethod
    def pair(cls) -> tuple["Line", socket.socket]:
        """An end to keep, and the socket to pass on."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; one to a dead process is lost."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._socket.sendall(data)

    def receive(self) -> list[Message]:
        """The messages of one read, which waits for bytes; marks the line as closed at its end."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def messages(self) -> Iterator[Message]:
        """Every message until the other end is closed."""
        while not self.closed:
            yield from self.receive()

    def drain(self) -> list[Message]:
        """What has arrived, without waiting."""
        found: list[Message] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self.closed and selector.select(0):
                found += self.receive()
        return found

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        with suppress(OSError):
            self._socket.close()
