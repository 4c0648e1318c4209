"""What a person sees of a signal, and how a second one ends a training of the command line."""

import os
import signal
import sys

from arena_jax.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE


def noted(number: signal.Signals) -> None:
    """Written past Python's buffers, for a handler may interrupt a write."""
    os.write(2, f"\n{number.name}: stopping after this step or phase; a second one leaves at once\n".encode())


def leave(number: int) -> None:
    """A second signal: without waiting for threads or exit handlers. What is being saved stays unfinished.

    Events are in the log as soon as they are emitted, so there is nothing to flush.
    """
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor that the progress hid
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE)
