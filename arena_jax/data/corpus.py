"""Token streams: Python's own source code, a user's text files, or a file of token ids."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arena_jax.errors import DataError

NUM_BYTES = 256
MAX_STDLIB_BYTES = 8_000_000

# Installed packages, tests, compiled parts, and tables that a program wrote.
_SKIPPED_FOLDERS = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__", "lib-dynload", "__phello__"),
        *("test", "tests", "idle_test", "encodings", "pydoc_data"),
    }
)
_SKIPPED_FILES = frozenset({"stringprep.py", "html/entities.py"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

# Files above this are fingerprinted by size and evenly spaced blocks, not read in full at start.
_FULL_HASH_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_NUM_BLOCKS = 256


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A stream of token ids.

    Attributes:
        tokens: one-dimensional integer array; may be memory-mapped.
        vocabulary: every id is below this.
        fingerprint: hash of the content; a checkpoint made with another one is refused.
        origin: where it came from, for messages.
    """

    tokens: NDArray[Any]
    vocabulary: int
    fingerprint: str
    origin: str


def standard_library(root: str | Path | None = None, max_bytes: int = MAX_STDLIB_BYTES) -> Corpus:
    """Return the source files of the running Python's standard library, as bytes.

    Files are sorted by relative path and joined up to ``max_bytes``. Another Python release gives
    another corpus, and its fingerprint says so.
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = sorted(_source_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    return _byte_corpus(files, origin=f"the standard library in {folder}", max_bytes=max_bytes)


def text_files(patterns: Sequence[str], base: str | Path = ".") -> Corpus:
    """Return the user's own files as bytes; globs (``**`` too) are relative to ``base``."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = {Path(name) for name in glob.glob(str(Path(base) / pattern), recursive=True)}
        matches = {path for path in matches if path.is_file()}
        if not matches:
            raise DataError(f"no file matches {pattern!r}", hint=f"patterns are relative to {Path(base).resolve()}")
        found |= matches
    if not found:
        raise DataError("no text files were named", hint='write data.files: ["texts/**/*.txt"]')
    return _byte_corpus(sorted(found), origin=", ".join(patterns), max_bytes=None)


def token_file(path: str | Path, *, dtype: str = "uint16", vocabulary: int | None = None) -> Corpus:
    """Memory-map a ``.npy`` array or a raw ``.bin`` file of token ids.

    Args:
        path: the file.
        dtype: integer dtype of a ``.bin`` file; a ``.npy`` file carries its own.
        vocabulary: bound on the ids; ``None`` takes the largest id found.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".bin":
            tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
        else:
            raise DataError(f"{str(path)!r} is neither .npy nor .bin", hint="text goes under data.kind: text")
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:  # empty, pickled, truncated, or a dtype numpy does not know
        if isinstance(error, DataError):
            raise
        raise DataError(f"{str(path)!r} holds no tokens: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{str(path)!r} holds {tokens.dtype} of shape {tokens.shape}; tokens are one row of integers")
    if tokens.size == 0:
        raise DataError(f"{str(path)!r} is empty")
    if vocabulary is None:
        vocabulary = int(tokens.max()) + 1
    return Corpus(tokens=tokens, vocabulary=vocabulary, fingerprint=_hash_file(path), origin=str(path))


def _source_files(folder: Path) -> Iterable[Path]:
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if relative.as_posix() in _SKIPPED_FILES or not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        if not relative.parts[0].startswith(_SKIPPED_PREFIXES):
            yield path


def _byte_corpus(files: Sequence[Path], *, origin: str, max_bytes: int | None) -> Corpus:
    pieces: list[bytes] = []
    size = 0
    for path in files:
        try:
            text = path.read_bytes() + b"\n"
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error
        pieces.append(text)
        size += len(text)
        if max_bytes is not None and size >= max_bytes:
            break
    content = b"".join(pieces)[:max_bytes]
    if size == len(files):  # nothing but the newlines added above
        raise DataError(f"{origin}: no data", hint="the files are missing or all empty")
    return Corpus(
        tokens=np.frombuffer(content, dtype=np.uint8),
        vocabulary=NUM_BYTES,
        fingerprint=hashlib.blake2b(content, digest_size=16).hexdigest(),
        origin=origin,
    )


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _FULL_HASH_BYTES:
            digest.update(file.read())
        else:
            for i in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
