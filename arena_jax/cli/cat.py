"""``arena-jax cat``: the text of a recipe, or what it comes to."""

import click

from arena_jax.cli import console


@click.command()
@console.recipe_arguments
@click.option("--resolved", is_flag=True, help="With defaults filled in and overrides applied.")
def command(recipe: str, overrides: tuple[str, ...], resolved: bool) -> None:
    """Print a recipe as it is written; with --resolved, or with overrides, as it will run."""
    from arena_jax.recipe import load_recipe, recipe_text

    text = load_recipe(recipe, overrides).to_yaml() if resolved or overrides else recipe_text(recipe)[1]
    console.data(text.rstrip("\n"))
