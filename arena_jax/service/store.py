"""The state of the service in SQLite: every change is committed here before it is acted on.

Only the reconcile loop writes what a job has become. Requests add rows that it takes up: a job, or a
*wish* (cancel, resize, drain). So neither waits for the other, and what was acknowledged survives a kill.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.service.job import ENDED, Job, Submission

_VERSION = 1
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, phase TEXT, data TEXT);
CREATE INDEX jobs_by_phase ON jobs (phase);
CREATE TABLE wishes (seq INTEGER PRIMARY KEY AUTOINCREMENT, data TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, job TEXT, kind TEXT, data TEXT);
CREATE INDEX events_by_job ON events (job, seq);
CREATE TABLE points (job INTEGER, step INTEGER, time REAL, loss REAL, step_time_s REAL, PRIMARY KEY (job, step))
WITHOUT ROWID;
CREATE TABLE indexes (key TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE measured (key TEXT, allocation TEXT, step_time_s REAL, PRIMARY KEY (key, allocation));
CREATE TABLE nodes (name TEXT PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE charges (seq INTEGER PRIMARY KEY AUTOINCREMENT, cause TEXT, seconds REAL);
"""


class StateError(ArenaError):
    """The state cannot be read or written; what was to be written did not happen."""


Point = tuple[int, float, float | None, float | None]
"""Step, time, loss, seconds of the step."""
Event = tuple[float, str, str, Mapping[str, Any]]
"""Time, id of a job or nothing, kind, and what else there is to say."""


class Store:
    """One file. Safe to share between threads: each gets a connection of its own.

    Raises:
        ArenaError: the file cannot be opened, or is not of this version. It is then left as it is.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._local = threading.local()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ArenaError(f"cannot create {str(self.path.parent)!r}: {error.strerror}") from error
        with self.transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise ArenaError(
                    f"the state in {str(self.path)!r} has version {version}, this release reads {_VERSION}",
                    hint="use another --state folder, or the release that wrote it",
                )
            if version == 0:
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it is committed, or on an exception none."""
        try:
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        except sqlite3.Error as error:
            opened = getattr(self._local, "db", None)
            if opened is not None and opened.in_transaction:  # a COMMIT that failed, as on a full disk
                opened.rollback()
            raise StateError(
                f"the state in {str(self.path)!r} cannot be written: {error}", hint="is the disk full?"
            ) from error

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing; a power cut the last moment, and the jobs as well.
            db.execute("PRAGMA synchronous = NORMAL")
            self._local.db = db
        return db

    def _read(self, query: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection().execute(query, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise StateError(f"the state in {str(self.path)!r} cannot be read: {error}") from error

    def close(self) -> None:
        """Close this thread's connection."""
        db = getattr(self._local, "db", None)
        if db is not None:
            db.close()
            self._local.db = None

    # What requests write.

    def submit(self, spec: Submission, now: float) -> Job:
        """Add a job, and return it with its number."""
        with self.transaction() as db:
            number = int(db.execute("INSERT INTO jobs (phase) VALUES ('planning')").lastrowid or 0)
            job = Job(number=number, id=f"{spec.name}-{number}", spec=spec, submitted_at=now)
            db.execute("UPDATE jobs SET id = ?, data = ? WHERE number = ?", (job.id, json.dumps(job.to_json()), number))
            add_event(db, now, job.id, "submit", {"queue": spec.queue, "what": spec.kind})
        return job

    def wish(self, wish: Mapping[str, Any]) -> None:
        """Note a request for the reconcile loop."""
        with self.transaction() as db:
            db.execute("INSERT INTO wishes (data) VALUES (?)", (json.dumps(dict(wish)),))

    # What the reconcile loop writes.

    def save(
        self,
        jobs: Iterable[Job],
        events: Iterable[Event] = (),
        *,
        points: Mapping[int, Iterable[Point]] | None = None,
        taken: int = 0,
    ) -> None:
        """Commit jobs and what happened to them, as (time, job, kind, data); drop wishes up to ``taken``."""
        rows = [(str(job.phase), json.dumps(job.to_json()), job.number) for job in jobs]
        with self.transaction() as db:
            db.executemany("UPDATE jobs SET phase = ?, data = ? WHERE number = ?", rows)
            for event in events:
                add_event(db, *event)
            for number, of_job in (points or {}).items():
                db.executemany(
                    "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?)", [(number, *point) for point in of_job]
                )
            if taken:
                db.execute("DELETE FROM wishes WHERE seq <= ?", (taken,))

    def put_index(self, key: str, rows: Mapping[str, Any]) -> None:
        """Keep a plan index."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO indexes VALUES (?, ?)", (key, json.dumps(dict(rows))))

    def put_measured(self, key: str, allocation: str, step_time_s: float) -> None:
        """Keep a measured step time."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO measured VALUES (?, ?, ?)", (key, allocation, step_time_s))

    def put_node(self, name: str, state: str) -> None:
        """Keep whether a node is ``up`` or ``drained``."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (name, state))

    def put_charge(self, cause: str, seconds: float) -> None:
        """Keep what a change has cost."""
        with self.transaction() as db:
            db.execute("INSERT INTO charges (cause, seconds) VALUES (?, ?)", (cause, seconds))

    def put_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    # What everybody reads.

    def meta(self, key: str, default: Any = None) -> Any:
        """A value of :meth:`put_meta`."""
        rows = self._read("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else default

    def wishes(self) -> list[tuple[int, dict[str, Any]]]:
        """Wishes not yet taken, in order."""
        return [(seq, json.loads(data)) for seq, data in self._read("SELECT seq, data FROM wishes ORDER BY seq")]

    def jobs_after(self, number: int) -> list[Job]:
        """Jobs that have not ended, from the next number on."""
        ended = ", ".join(f"'{phase}'" for phase in sorted(ENDED))
        return self._jobs(f"number > ? AND phase NOT IN ({ended})", (number,))

    def jobs(self, *, ended: int | None = None) -> list[Job]:
        """All jobs in order, or all that have not ended and the last ``ended`` of the others."""
        if ended is None:
            return self._jobs("1")
        done = ", ".join(f"'{phase}'" for phase in sorted(ENDED))
        recent = f"SELECT number FROM jobs WHERE phase IN ({done}) ORDER BY number DESC LIMIT ?"
        return self._jobs(f"phase NOT IN ({done}) OR number IN ({recent})", (ended,))

    def job(self, name: str) -> Job | None:
        """A job by its id or number."""
        found = self._jobs("id = ? OR number = ?", (name, int(name) if name.isdecimal() and len(name) < 16 else -1))
        return found[0] if found else None

    def _jobs(self, where: str, values: Iterable[Any] = ()) -> list[Job]:
        rows = self._read(f"SELECT data FROM jobs WHERE {where} ORDER BY number", values)
        return [Job.from_json(json.loads(data)) for (data,) in rows]

    def counts(self) -> dict[str, int]:
        """Number of jobs by phase."""
        return dict(self._read("SELECT phase, COUNT(*) FROM jobs GROUP BY phase"))

    def index(self, key: str) -> dict[str, Any] | None:
        """A plan index."""
        rows = self._read("SELECT data FROM indexes WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else None

    def measured(self, key: str) -> dict[str, float]:
        """Measured step times by allocation."""
        return dict(self._read("SELECT allocation, step_time_s FROM measured WHERE key = ?", (key,)))

    def nodes(self) -> dict[str, str]:
        """States of the nodes that somebody has set."""
        return dict(self._read("SELECT name, state FROM nodes"))

    def charges(self, cause: str, last: int = 20) -> list[float]:
        """What the last changes of a cause have cost, seconds."""
        rows = self._read("SELECT seconds FROM charges WHERE cause = ? ORDER BY seq DESC LIMIT ?", (cause, last))
        return [seconds for (seconds,) in rows]

    def events(self, *, after: int = 0, last: int = 1000, job: str = "") -> list[dict[str, Any]]:
        """The latest events after a number, oldest first."""
        where, values = "seq > ?", [after]
        if job:
            where, values = where + " AND job = ?", [after, job]  # type: ignore[list-item]
        rows = self._read(
            f"SELECT seq, time, job, kind, data FROM events WHERE {where} ORDER BY seq DESC LIMIT ?", [*values, last]
        )
        return [
            {"seq": seq, "time": time, "job": name, "kind": kind, **json.loads(data)}
            for seq, time, name, kind, data in reversed(rows)
        ]

    def event_counts(self) -> dict[str, int]:
        """Number of events by kind."""
        return dict(self._read("SELECT kind, COUNT(*) FROM events GROUP BY kind ORDER BY kind"))

    def points(self, number: int) -> list[Point]:
        """Progress of a job by step."""
        return self._read(  # type: ignore[return-value]
            "SELECT step, time, loss, step_time_s FROM points WHERE job = ? ORDER BY step", (number,)
        )


def add_event(db: sqlite3.Connection, time: float, job: str, kind: str, data: Mapping[str, Any]) -> None:
    """Add one event inside a transaction."""
    db.execute(
        "INSERT INTO events (time, job, kind, data) VALUES (?, ?, ?, ?)", (time, job, kind, json.dumps(dict(data)))
    )
