"""Small files of JSON that are there whole or not at all."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file for this user alone."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(dict(value), file)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote; empty where there is none."""
    value: Any = None
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
