"""What verbs share: stdout as data, stderr as talk, and the options many of them take.

A verb prints its result with :func:`data` or, under ``--json``, one object with :func:`emit_json`;
everything meant for a person watching goes through :func:`note`, :func:`warn` or :func:`error`.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Recipe names that begin with what was typed."""
    from arena_jax.recipe import find_recipes

    return [info.name for info in find_recipes() if info.name.startswith(incomplete)]


def recipe_arguments(function: F) -> F:
    """Add ``RECIPE [KEY=VALUE]...``: parameters ``recipe: str`` and ``overrides: tuple[str, ...]``."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipe)(function)


def data(text: str = "") -> None:
    """Print a result line to stdout."""
    click.echo(text)


def emit_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object as one line of stdout; non-finite numbers become ``null``."""
    click.echo(json.dumps(_plain(value), allow_nan=False))


def note(text: str) -> None:
    """Print a line for the person watching to stderr."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    click.echo(f"{styled('warning:', fg='yellow', bold=True)} {text}", err=True)


def error(text: str) -> None:
    """Print an error to stderr."""
    click.echo(f"{styled('error:', fg='red', bold=True)} {text}", err=True)


def styled(text: str, **style: Any) -> str:
    """Style a piece of text for stderr, unless it is no terminal or ``NO_COLOR`` is set."""
    return click.style(text, **style) if color_wanted() else text


def color_wanted() -> bool:
    """Whether stderr is a terminal that may be coloured."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy or jax scalar
        return _plain(value.item())
    return str(value)
