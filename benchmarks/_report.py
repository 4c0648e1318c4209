"""What benchmarks share in reporting: results as JSON for programs and Markdown for people."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._machine import describe

RESULTS = Path(__file__).resolve().parent / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table, padded so that it reads well in a terminal too."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def write(name: str, *, title: str, lines: Sequence[str], data: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Write ``name.json`` and ``name.md`` with the machine in both; print the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {title}", "", f"{describe()}.", "", *lines]) + "\n"
    replace_text(folder / f"{name}.json", json.dumps({"machine": describe(), **data}, indent=1) + "\n")
    replace_text(folder / f"{name}.md", text)
    print(text)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)
