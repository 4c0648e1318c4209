"""Errors a user can act on, and the exit codes that go with them.

Every error states what was violated, what was received, and (``hint``) the nearest thing that
would have worked. The command line prints the message and exits with :attr:`ArenaError.exit_code`;
an error that is not an :class:`ArenaError` is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INFEASIBLE = 3
EXIT_RESUMABLE = 75
# Under a supervisor only: the state is handed over, start the process that the hand-over names.
EXIT_RELAUNCH = 76
EXIT_INTERRUPTED = 130


class ArenaError(Exception):
    """Base of all user errors.

    Args:
        message: what was violated and the values received.
        hint: the nearest thing that would work, as a sentence; may be empty.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def one_line(self) -> str:
        """Message and hint on one line, for reports and logs."""
        return self.message + (f" (hint: {self.hint})" if self.hint else "")

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(ArenaError, ValueError):
    """An argument, override or combination of them that cannot be meant."""

    exit_code = EXIT_USAGE


class RecipeError(UsageError):
    """A recipe that does not validate; ``errors`` holds every fault found, one line each."""

    def __init__(self, message: str, *, errors: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errors = tuple(errors)


class InfeasibleError(ArenaError, ValueError):
    """No plan fits: the model, the batch or the pins exclude every candidate."""

    exit_code = EXIT_INFEASIBLE


class PlanError(UsageError):
    """A plan that is malformed or was made for another model, batch or format."""


class ModelError(UsageError):
    """A model, loss or optimizer that asks for something refused by name."""


class DataError(UsageError):
    """Training data that is empty, malformed, or not what a checkpoint was made with."""


class CheckpointError(ArenaError):
    """A checkpoint that is missing, incomplete, foreign, or of another model."""


class StateLostError(ArenaError):
    """A change of plan failed half way, and so did the way back; the last checkpoint is what there is."""


class NonFiniteLossError(ArenaError):
    """The loss became NaN or infinite; ``step`` names the step."""

    def __init__(self, message: str, *, step: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``' (did you mean X?)'`` for the closest known name, or an empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``'1 layer'``, ``'2 layers'``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
