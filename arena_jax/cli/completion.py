"""``arena-jax completion``: the script that teaches a shell our words."""

import click
from click.shell_completion import get_completion_class

from arena_jax.cli import console

PROGRAM = "arena-jax"
VARIABLE = "_ARENA_JAX_COMPLETE"
_WHERE = {
    "bash": 'eval "$(arena-jax completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(arena-jax completion zsh)" in ~/.zshrc',
    "fish": "arena-jax completion fish > ~/.config/fish/completions/arena-jax.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(sorted(_WHERE)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for bash, fish or zsh.

    Use it with: eval "$(arena-jax completion bash)"
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    console.data(completion_class(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
    if console.color_wanted():
        console.note(_WHERE[shell])
