"""``arena-jax ls``: the recipes, found on disk."""

import sys

import click

from arena_jax.cli import console


@click.command()
@console.json_option
def command(as_json: bool) -> None:
    """List the recipes that are found on disk."""
    from arena_jax.recipe import find_recipes

    recipes = list(find_recipes())
    if as_json:
        rows = [{"name": info.name, "path": str(info.path), "summary": info.summary} for info in recipes]
        console.emit_json({"recipes": rows})
        return
    name_width = max((len(info.name) for info in recipes), default=0)
    room = console.width() - name_width - 2 if sys.stdout.isatty() else 1000
    for info in recipes:
        console.data(f"{info.name:{name_width}}  {_shorten(info.summary, room)}".rstrip())


def _shorten(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3].rstrip() + "..."
