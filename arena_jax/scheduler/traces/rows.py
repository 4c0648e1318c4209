"""Reading rows with every fault kept: line numbers first, all of them at once."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from arena_jax.errors import UsageError, counted, nearest

T = TypeVar("T")


class TraceError(UsageError):
    """A trace that does not parse; ``errors`` holds every fault, each with its line number."""

    def __init__(self, message: str, *, errors: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errors = tuple(errors)


@dataclass
class Faults:
    """Collects faults of one file; ``place`` and ``unit`` are what its rows are counted and called by."""

    source: str
    place: str = "line"
    unit: str = "row"
    errors: list[str] = field(default_factory=list)

    def add(self, line: int, what: object) -> None:
        self.errors.append(f"{self.place} {line}: {what}")

    def raise_any(self) -> None:
        """Raise :class:`TraceError` with all faults, if there are any."""
        if self.errors:
            raise TraceError(
                f"{self.source}: {counted(len(self.errors), f'malformed {self.unit}')}\n  " + "\n  ".join(self.errors),
                errors=self.errors,
            )


class Row:
    """One row with typed, checked access; problems become :class:`ValueError` naming the field."""

    def __init__(self, values: dict[str, Any], line: int) -> None:
        self.values, self.line = values, line

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if value is None or str(value).strip() == "":
            raise ValueError(f"{name} is empty")
        return str(value).strip()

    def optional(self, name: str) -> str | None:
        value = self.values.get(name)
        return None if value is None or str(value).strip() == "" else str(value).strip()

    def number(self, name: str, *, least: float = 0.0) -> float:
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{name} is not a number: {text!r}") from None
        if not math.isfinite(value) or value < least:
            raise ValueError(f"{name} must be a finite number of at least {least:g}, got {text}")
        return value

    def count(self, name: str, *, least: int = 1) -> int:
        value = self.number(name, least=least)
        if value != int(value):
            raise ValueError(f"{name} must be a whole number, got {value:g}")
        return int(value)


def read_text(path: str | Path, what: str = "trace") -> str:
    """The file's text; raise :class:`TraceError` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"cannot read {what} {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{what} {str(path)!r} is not UTF-8 text: {error}") from error


def csv_rows(text: str, *, delimiter: str = ",", fieldnames: Sequence[str] | None = None) -> Iterable[Row]:
    """Rows of a CSV text with their line numbers."""
    begin = text.lstrip()  # blank lines before the header
    skipped = text[: len(text) - len(begin)].count("\n")
    reader = csv.DictReader(io.StringIO(begin), delimiter=delimiter, fieldnames=fieldnames)
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise TraceError(f"line {skipped + reader.line_num + 1} is not CSV: {error}") from error
        if values is None:
            return
        row = {str(k).strip(): v for k, v in values.items() if k is not None}
        if None in values:
            row["__extra__"] = values[None]
        yield Row(row, skipped + reader.line_num)


def parse_rows(
    rows: Iterable[Row],
    parse: Callable[[Row], T | None],
    source: str,
    *,
    faults: Faults | None = None,
    what: str = "jobs",
) -> list[T]:
    """Parse every row, collect the faults of all, refuse doubled ids; ``None`` leaves a row out."""
    faults = faults or Faults(source)
    parsed: list[T] = []
    first_line: dict[str, int] = {}
    for row in rows:
        try:
            if "__extra__" in row.values:
                raise ValueError(f"{len(row.values['__extra__'])} cells too many")
            item = parse(row)
        except (ValueError, TypeError) as error:
            faults.add(row.line, error.message if isinstance(error, UsageError) else error)
            continue
        if item is None:
            continue
        name = getattr(item, "id", None)
        if name is not None and name in first_line:
            faults.add(row.line, f"id {name!r} was already used on {faults.place} {first_line[name]}")
            continue
        if name is not None:
            first_line[name] = row.line
        parsed.append(item)
    faults.raise_any()
    if not parsed:
        raise TraceError(f"{source} holds no {what}")
    return parsed


def require(found: Iterable[str], known: Iterable[str], source: str) -> None:
    """Refuse columns that mean nothing, with the nearest that does."""
    known = tuple(known)
    for name in found:
        if name not in known:
            raise TraceError(f"{source}: unknown column {name!r}{nearest(name, known)}")
