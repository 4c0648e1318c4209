"""``python -m arena_jax``: the command line, where the script is not on the path."""

import sys

from arena_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
