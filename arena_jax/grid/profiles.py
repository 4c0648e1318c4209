"""The profile store: measured times of small pieces, each under everything that decides it.

A piece is a layer's program at local shapes (its forward pass, or both), all layers as one program of
one device, the optimizer's update of what a layer owns, a matrix product, a collective of one size on
one topology, a transfer between devices, the issue of a program, memory that has to be found first,
or a whole step on one device. It is measured on one device (a collective on one group), cached for
everyone, and replaces what the cost model computes for exactly that piece; what it says of
unmeasured pieces of its kind is one factor, see :meth:`ProfileStore.corrections`.

Beside pieces the store holds what training runs measured, of which :mod:`.feedback` learns.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arena_jax.errors import UsageError, nearest
from arena_jax.grid.feedback import Run, learn
from arena_jax.grid.store_file import StoreFile

_SCHEMA_VERSION = 1
_TABLES = (
    """CREATE TABLE profiles (digest TEXT PRIMARY KEY, device_type TEXT NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL, checksum TEXT NOT NULL, measured_at REAL NOT NULL)""",
)
# A training run, which corrects estimates as a whole and is no piece.
RUN = "run"
KINDS = (
    *("layer", "chain", "update", "dot", "conv", "stream", "collective", "transfer", "dispatch", "fresh", "step"),
    RUN,
)
_EXPORT_FORMAT = "arena_jax profiles"
# One factor for a kind is believed within these bounds; beyond them a measurement is of something else.
_LEAST, _MOST = 0.1, 10.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One measured piece.

    Attributes:
        device_type: name in the hardware catalogue.
        kind: one of :data:`KINDS`.
        piece: what was run: key of a layer's program and pass, dtype and shape of a product, bytes of a
            stream, collective with bytes, size and stride, or model, batch and grid of a step. JSON only.
        environment: what else decides the time: driver, versions of jax and jaxlib, XLA flags, cores.
        seconds: the low quantile of the repeats.
        computed_s: what the cost model said without this measurement.
        noise: spread of the repeats over ``seconds``.
        num_repeats: how often it was run.
        measured_at: Unix seconds, for people: what is newer is known by the order of storing.
        parts: of a run, seconds of its estimate by cause, without what was learnt before.
    """

    device_type: str
    kind: str
    piece: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    seconds: float
    computed_s: float
    noise: float = 0.0
    num_repeats: int = 1
    measured_at: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown kind of profile {self.kind!r}{nearest(self.kind, KINDS)}", hint=", ".join(KINDS))
        for name in ("seconds", "computed_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"a profile's {name} must be a number above 0, got {value!r}")
        if not isinstance(self.device_type, str) or not self.device_type:
            raise UsageError(f"a profile's device_type must be a name, got {self.device_type!r}")
        tables = self.piece, self.environment, self.parts
        if not all(isinstance(table, Mapping) for table in tables):
            raise UsageError("a profile's piece, environment and parts must be tables")
        for value in self.parts.values():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(f"a part of a profile must be a number of seconds, got {value!r}")

    @property
    def digest(self) -> str:
        """Of what decides the time; two profiles of one digest are measurements of the same thing."""
        return _digest([self.device_type, self.kind, dict(self.piece), dict(self.environment)])


class ProfileStore:
    """A SQLite file of profiles; many readers and writers at once (WAL).

    A row whose checksum does not fit, or that does not read, is as good as not stored.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = StoreFile(path, name="profile store", schema_version=_SCHEMA_VERSION, tables=_TABLES)
        self.path = self._file.path
        self.set_aside = self._file.set_aside

    def put(self, profiles: Iterable[Profile]) -> None:
        """Insert or replace; either all are stored or none."""
        rows = []
        for profile in profiles:
            data = json.dumps(asdict(profile), sort_keys=True, allow_nan=False)
            rows.append((profile.digest, profile.device_type, profile.kind, data, _checksum(data), profile.measured_at))
        with self._file.connect() as db:
            db.executemany("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?, ?, ?)", rows)

    def profiles(self, device_type: str | None = None, kind: str | None = None) -> tuple[Profile, ...]:
        """All that are sound, oldest first, of a device type and kind where given."""
        with self._file.connect() as db:
            found = db.execute(
                "SELECT data, checksum FROM profiles WHERE (?1 IS NULL OR device_type = ?1)"
                " AND (?2 IS NULL OR kind = ?2) ORDER BY rowid",  # clocks jump, and the last one stored is the newest
                (device_type, kind),
            ).fetchall()
        read = (_read(data, checksum) for data, checksum in found)
        return tuple(profile for profile in read if profile is not None)

    def prune(self, *, device_type: str | None = None, older_than_s: float | None = None) -> int:
        """Delete profiles of a type, older than some seconds, or both; return how many.

        Rows that are not sound go with any call.
        """
        before = None if older_than_s is None else time.time() - older_than_s
        with self._file.connect() as db:
            rows = db.execute("SELECT digest, data, checksum, device_type, measured_at FROM profiles").fetchall()
            gone = [
                digest
                for digest, data, checksum, of_type, at in rows
                if _read(data, checksum) is None
                or (
                    (device_type is not None or before is not None)
                    and device_type in (None, of_type)
                    and (before is None or at < before)
                )
            ]
            db.executemany("DELETE FROM profiles WHERE digest = ?", [(digest,) for digest in gone])
        return len(gone)

    def corrections(self, device_type: str) -> dict[str, float]:
        """Measured over computed seconds by kind, the median over its pieces; ``step`` is of every kind."""
        ratios: dict[str, list[float]] = {}
        for profile in self.profiles(device_type):
            ratio = profile.seconds / profile.computed_s
            if _LEAST <= ratio <= _MOST and profile.kind != RUN:
                ratios.setdefault(profile.kind, []).append(ratio)
        return {kind: statistics.median(values) for kind, values in ratios.items()}

    def bias(self, device_type: str) -> dict[str, dict[str, float]]:
        """What runs teach, by whether their estimates were mostly ``measured`` or ``computed``: cause -> factor."""
        runs: dict[str, list[Run]] = {}
        for profile in self.profiles(device_type, RUN):
            runs.setdefault(str(profile.environment.get("estimate")), []).append(Run(profile.parts, profile.seconds))
        return {estimate: learnt for estimate, of in sorted(runs.items()) if (learnt := learn(of))}

    def generation(self, device_type: str) -> str:
        """Changes whenever a piece of a type does, or what runs have taught; other plans are not served."""
        with self._file.connect() as db:
            rows = db.execute(
                "SELECT digest, checksum FROM profiles WHERE device_type = ? AND kind != ? ORDER BY digest",
                (device_type, RUN),
            ).fetchall()
        learnt = self.bias(device_type)
        return _digest([rows, learnt]) if rows or learnt else ""


def to_json(profiles: Iterable[Profile]) -> str:
    """The exported form, for another machine's store."""
    return json.dumps({"format": _EXPORT_FORMAT, "version": 1, "profiles": [asdict(p) for p in profiles]}, indent=1)


def from_json(text: str, *, source: str) -> list[Profile]:
    """Read an export; raise :class:`UsageError` that names what is wrong in ``source``."""
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _EXPORT_FORMAT or data.get("version") != 1:
        raise UsageError(f"{source} holds no profiles", hint="a file that `arena-jax profile export` wrote")
    rows = data.get("profiles")
    if not isinstance(rows, list):
        raise UsageError(f"{source}: profiles must be a list")
    found = []
    for i, row in enumerate(rows):
        try:
            found.append(Profile(**row))
        except UsageError as error:
            raise UsageError(f"{source}: profiles[{i}]: {error.message}") from error
        except TypeError as error:
            raise UsageError(f"{source}: profiles[{i}] has missing or unknown keys: {error}") from error
    return found


def _read(data: str, checksum: str) -> Profile | None:
    if _checksum(data) != checksum:
        return None
    try:
        return Profile(**json.loads(data))
    except (ValueError, TypeError):  # a UsageError is a ValueError
        return None


def _checksum(data: str) -> str:
    return hashlib.blake2b(data.encode(), digest_size=8).hexdigest()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
