"""The frame of a report: one HTML file with its style inside, no script and nothing from outside."""

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from arena_jax.errors import UsageError

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --rule: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --rule: #3a3a3a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1200px;
       margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; overflow-wrap: normal; }
th, td { padding: 3px 7px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child, .left { text-align: left; } td small { opacity: .65; } .best { font-weight: 700; }
svg { width: 100%; max-width: 860px; min-width: 560px; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: .6; } .axis { stroke: var(--ink); }
.legend { margin: 0 0 1rem; font-size: 13px; } .key { margin-right: 1.1rem; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
pre { font-size: 13px; } details { margin: .6rem 0; } summary { cursor: pointer; }
"""


def document(title: str, parts: Iterable[str], *, refresh_s: int | None = None) -> str:
    """The page of these parts, each HTML already; ``refresh_s`` has a browser fetch it again so often."""
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}<style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where it is too wide.

    Args:
        head: column titles, text.
        rows: cells, each HTML; one that begins with ``<td`` is taken whole.
    """
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def folded(title: str, body: str, opened: bool) -> str:
    """A part that opens on a click."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def check_writable(path: str | Path, *, what: str = "report") -> None:
    """Raise :class:`UsageError` where a file cannot be written: before the work that would fill it."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write the {what} {str(path)!r}: {str(folder)!r} is no folder to write in")


def write_file(path: str | Path, text: str, *, what: str = "report") -> None:
    """Write a text file whole or not at all.

    Raises:
        UsageError: it cannot be written there; ``what`` names it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write the {what} {str(path)!r}: {error.strerror}") from error
