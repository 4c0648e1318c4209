"""``arena-jax validate``: every fault of a recipe at once."""

import click

from arena_jax.cli import console
from arena_jax.errors import EXIT_USAGE, RecipeError, UsageError


@click.command()
@console.recipe_arguments
@console.json_option
@click.pass_context
def command(ctx: click.Context, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check RECIPE with its overrides and name every fault. Exit code 2 when there is one."""
    from arena_jax.recipe import load_recipe

    errors: list[str] = []
    try:
        load_recipe(recipe, overrides)
    except RecipeError as error:
        errors = list(error.errors) or [str(error)]
    except UsageError as error:
        errors = [str(error)]
    if as_json:
        console.emit_json({"valid": not errors, "errors": errors})
    elif not errors:
        console.data(f"{recipe}: valid")
    for error_line in errors:
        console.error(error_line)
    if errors:
        ctx.exit(EXIT_USAGE)
