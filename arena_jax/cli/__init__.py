"""The command line. One module per verb, imported when that verb is used."""

from arena_jax.cli.app import main as main
