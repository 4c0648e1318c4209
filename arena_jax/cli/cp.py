"""``arena-jax cp``: a recipe of one's own to edit."""

import os
from pathlib import Path

import click

from arena_jax.cli import console
from arena_jax.errors import UsageError


@click.command()
@click.argument("recipe", metavar="RECIPE", shell_complete=console.complete_recipe)
@click.argument("dest", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite DEST.")
def command(recipe: str, dest: Path, force: bool) -> None:
    """Copy RECIPE to the file or folder DEST. An existing file is kept unless --force is given."""
    from arena_jax.recipe import recipe_text

    source, text = recipe_text(recipe)
    if dest.is_dir():
        dest = dest / source.name
    if not dest.parent.is_dir():
        raise UsageError(f"no folder {str(dest.parent)!r} to copy into", hint=f"mkdir -p {dest.parent}")
    scratch = dest.with_name(f".{dest.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        if force:
            scratch.replace(dest)
        else:
            dest.hardlink_to(scratch)  # unlike a rename, refuses an existing file
    except FileExistsError as error:
        raise UsageError(f"{str(dest)!r} exists", hint="choose another name, or --force to overwrite it") from error
    finally:
        scratch.unlink(missing_ok=True)
    console.note(f"{dest}: edit it, then arena-jax validate {dest}")
