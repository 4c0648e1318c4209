"""``arena-jax doctor``: what is here, what is missing, how to get it."""

import sys
import textwrap
from dataclasses import asdict

import click

from arena_jax.cli import console
from arena_jax.errors import EXIT_FAILED

_MARKS = {"ok": ("ok", "green"), "note": ("--", "cyan"), "warning": ("!!", "yellow"), "broken": ("XX", "red")}


@click.command()
@click.option("--install-alpa", is_flag=True, help="First install the alpa solver into a folder of its own.")
@console.json_option
@click.pass_context
def command(ctx: click.Context, install_alpa: bool, as_json: bool) -> None:
    """Say what is installed, what is missing and how to get it.

    Exit code 1 when something that every run needs is broken.
    """
    from arena_jax.cli.health import checks

    if install_alpa:
        from arena_jax.solver_setup import install_alpa as install

        console.note(f"alpa installed in {install(force=True)}")
    found = []
    for check in checks():
        found.append(check)
        if not as_json:
            mark, color = _MARKS[check.status]
            shown = click.style(mark, fg=color) if console.color_wanted() and sys.stdout.isatty() else mark
            console.data(f"{shown}  {check.name:<18} {_folded(check.detail)}")
            if check.hint:
                console.data(f"{'':23}{_folded('get it: ' + check.hint)}")
    if as_json:
        console.emit_json({"checks": [asdict(check) for check in found]})
    if any(check.status == "broken" for check in found):
        ctx.exit(EXIT_FAILED)


def _folded(text: str) -> str:
    """Break at the terminal's width, continuing under its own column; a command stays in one piece."""
    lines = textwrap.wrap(text, console.width() - 23, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':23}".join(lines)
