"""A Unix socket for its owner alone, with a file beside it that says where it is."""

import json
import os
import shutil
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.errors import UsageError

# What the kernel takes is about 108 bytes; a longer path is replaced by one in the temporary folder.
_MAX_PATH_BYTES = 100
_CHUNK_BYTES = 1 << 16


class OwnerSocket:
    """Where a socket is, and the file that announces it.

    Args:
        folder: holds the socket, unless its path is too long there, and the file.
        name: of the socket.
        file_name: of the file: JSON with the ``socket`` and the ``pid`` of who listens.
        path: of the socket, in place of ``folder / name``; taken as it is.
    """

    def __init__(self, folder: Path, name: str, file_name: str, path: Path | None = None) -> None:
        self._file = folder / file_name
        self._own_folder: Path | None = None
        self.path = path or folder / name
        if path is None and len(os.fsencode(self.path.absolute())) > _MAX_PATH_BYTES:
            self._own_folder = Path(tempfile.mkdtemp(prefix="arena-jax-"))
            self.path = self._own_folder / name

    def listen(self, backlog: int, *, hint: str) -> socket.socket:
        """Bind, and tell where. Nothing may be in the socket's place.

        Raises:
            UsageError: it cannot be made, with the hint.
        """
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(str(self.path))
            # Between the two calls others could connect where the folder lets them; each peer is checked, too.
            os.chmod(self.path, 0o600)
            server.listen(backlog)
            temporary = self._file.with_name(f"{self._file.name}.tmp")
            temporary.write_text(
                json.dumps({"socket": str(self.path.absolute()), "pid": os.getpid()}), encoding="utf-8"
            )
            temporary.replace(self._file)
        except OSError as error:
            server.close()
            raise UsageError(f"cannot listen on {str(self.path)!r}: {error.strerror or error}", hint=hint) from error
        return server

    def remove(self) -> None:
        """Remove the socket and the file."""
        for file in (self.path, self._file):
            with suppress(OSError):
                file.unlink()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def announced(file: Path) -> tuple[Path, int]:
    """The socket that a file announces, and the user it belongs to.

    Raises:
        OSError, ValueError, KeyError, TypeError: nobody listens, or the file is not one of these.
    """
    path = Path(json.loads(file.read_text(encoding="utf-8"))["socket"])
    return path, path.stat().st_uid


def read_line(connection: socket.socket, most_bytes: int) -> bytes:
    """The first line that arrives, without its end.

    Raises:
        ValueError: the other end hung up before, or more than ``most_bytes`` came.
        OSError: nothing came in time.
    """
    parts: list[bytes] = []
    length = 0
    while not parts or b"\n" not in parts[-1]:
        part = connection.recv(_CHUNK_BYTES)
        if not part:
            raise ValueError("it hung up")
        length += len(part)
        if length > most_bytes:
            raise ValueError("the line is too long")
        parts.append(part)
    return b"".join(parts).partition(b"\n")[0]


def peer_of(connection: Any) -> int | None:
    """User id of who is at the other end; ``None`` where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None  # not Linux: the socket's mode must do
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
