"""A SQLite file that many processes read and write: made once, checked when opened, set aside when foreign."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from arena_jax.errors import ArenaError


class StoreFile:
    """A file of tables of one schema version.

    A file that is damaged, of something else or of a newer version is set aside under another name
    and a new one begun; it is never trusted and never deleted.

    Args:
        name: what people call it in messages.
        schema_version: stored in the file; another number is foreign.
        tables: the statements that make the tables.

    Attributes:
        set_aside: where a foreign file was moved to, if one was.
    """

    def __init__(self, path: str | Path, *, name: str, schema_version: int, tables: Sequence[str]) -> None:
        self.path = Path(path)
        self.name = name
        self.set_aside: Path | None = None
        self._schema_version = schema_version
        self._tables = tables
        self._prepare()

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is committed, or on an exception none."""
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
                yield db
        except sqlite3.Error as error:
            full = any(word in str(error) for word in ("full", "disk I/O"))
            hint = "free space on the disk and run this again; what was stored before is kept" if full else ""
            raise ArenaError(f"{self.name} {str(self.path)!r}: {error}", hint=hint) from error

    def _prepare(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArenaError(f"cannot create {str(self.path.parent)!r}: {error.strerror}") from error
        try:
            self._create()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise ArenaError(f"cannot open {self.name} {str(self.path)!r}: {error}") from error
            self._move_away()
            self._create()

    def _create(self) -> None:
        """Make the tables where there are none; raise ``sqlite3.DatabaseError`` for a file that is not ours."""
        with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as db:
            if self._is_ours(db, "BEGIN"):
                return
            # Of several that begin at once, one makes the tables and the others find them.
            if not self._is_ours(db, "BEGIN IMMEDIATE", keep=True):
                for statement in self._tables:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {self._schema_version}")
            db.execute("COMMIT")
            with suppress(sqlite3.OperationalError):  # another one may be at work already; it is only faster
                db.execute("PRAGMA journal_mode = WAL")

    def _is_ours(self, db: sqlite3.Connection, begin: str, *, keep: bool = False) -> bool:
        """Whether the tables are there, as of one moment; ``keep`` leaves the transaction open."""
        db.execute(begin)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version not in (0, self._schema_version) or (version == 0 and tables):
            raise sqlite3.DatabaseError("foreign or newer")
        if not keep:
            db.execute("ROLLBACK")
        return bool(version == self._schema_version)

    def _move_away(self) -> None:
        self.set_aside = self.path.with_name(f"{self.path.name}.set-aside-{time.time_ns()}")
        with suppress(FileNotFoundError):  # another one has just set it aside
            self.path.rename(self.set_aside)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
