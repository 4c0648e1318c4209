"""The ``arena-jax`` group: lazy verbs, and the one place where errors become exit codes."""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from arena_jax import __version__
from arena_jax.cli import console
from arena_jax.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ArenaError, RecipeError, nearest

# Verb to the line `--help` shows. The module `arena_jax.cli.VERB` exports `command`; it is imported
# only to run the verb or to show the verb's own help, so that the overview stays fast.
VERBS = {
    "ls": "List the recipes.",
    "cat": "Print a recipe.",
    "cp": "Copy a recipe to edit it.",
    "validate": "Check a recipe and name every fault.",
    "plan": "Plan a recipe on every grid of some allocations.",
    "profile": "Take, show and share measured pieces of models.",
    "train": "Train a recipe under a plan the compiler chose.",
    "resize": "Ask a running training to go on under another plan.",
    "serve": "Run the cluster service: a queue of jobs on a cluster.",
    "submit": "Give the service a job.",
    "status": "Show the service's jobs.",
    "top": "Show the service's nodes and what runs on them.",
    "logs": "Print what a job of the service has printed.",
    "cancel": "End jobs of the service.",
    "drain": "Take a node of the service out of use, or back.",
    "simulate": "Run scheduling policies on a job trace.",
    "track": "Send a run's event log to its tracker.",
    "doctor": "Say what is installed, what is missing, how to get it.",
    "completion": "Print the shell completion script.",
}

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f"arena_jax.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"no verb {args[0]!r}{nearest(args[0], VERBS)}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="A RECIPE is a name from `arena-jax ls` or a path; key=value after it overrides one value.",
)
@click.version_option(__version__, prog_name="arena-jax")
def group() -> None:
    """Train Flax models under plans compiled for the devices at hand."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Never raises, except for ``SystemExit`` of a verb."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in args
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = group.main(args, prog_name="arena-jax", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ArenaError as error:
        return _fail(_describe(error), str(error), error.exit_code, as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.UsageError as error:
        message = error.format_message()
        where = error.ctx.command_path if error.ctx is not None else "arena-jax"
        hint = f"{where} --help"
        description = {"type": "UsageError", "message": message, "hint": hint}
        return _fail(description, f"{message}\n  hint: {hint}", EXIT_USAGE, as_json)
    except click.ClickException as error:
        message = error.format_message()
        return _fail({"type": "UsageError", "message": message}, message, error.exit_code, as_json)
    except (KeyboardInterrupt, click.Abort):
        return _fail({"type": "Interrupted", "message": "interrupted"}, "interrupted", EXIT_INTERRUPTED, as_json)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`); keep the interpreter's own flush from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = f": {error.filename}" if error.filename else ""
            message = f"{error.strerror}{where}"
            return _fail({"type": "OSError", "message": message}, message, EXIT_FAILED, as_json)
        traceback.print_exc()
        description = {"type": type(error).__name__, "message": str(error)}
        return _fail(description, "this is a bug in arena_jax; please report the lines above", EXIT_FAILED, as_json)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Warnings meant for users go where everything for the person watching goes, without our line numbers."""
    if issubclass(category, UserWarning):
        console.warn(str(message))
    else:
        console.note(warnings.formatwarning(message, category, *where[:2]).rstrip())


def _describe(error: ArenaError) -> dict[str, Any]:
    description: dict[str, Any] = {"type": type(error).__name__, "message": error.message}
    if error.hint:
        description["hint"] = error.hint
    if isinstance(error, RecipeError) and error.errors:
        description["errors"] = list(error.errors)
    return description


def _fail(description: dict[str, Any], message: str, code: int, as_json: bool) -> int:
    if message:
        console.error(message)
    if as_json:
        console.emit_json({"error": description})
    return code
