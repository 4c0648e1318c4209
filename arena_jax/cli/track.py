"""``arena-jax track sync``: send what a tracker missed."""

from pathlib import Path

import click

from arena_jax.cli import console
from arena_jax.errors import ArenaError, counted
from arena_jax.events import EXPERIMENT


@click.group()
def command() -> None:
    """Send a run's event log to its tracker."""


@command.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--uri", help="Tracking URI; by default the one the run used.")
@click.option("--experiment", help="Experiment; by default the one the run used.")
@console.json_option
def sync(run: Path, uri: str | None, experiment: str | None, as_json: bool) -> None:
    """Send the events of the run folder RUN that its tracker has not seen, each exactly once.

    Another tracker than the one the run used gets all of them.
    """
    from arena_jax.tracking import MLflowTracker, short_reason, stored_state
    from arena_jax.tracking import sync as send

    known = stored_state(run)
    chosen_uri, chosen_experiment = uri or known.get("uri"), experiment or known.get("experiment") or EXPERIMENT
    tracker = MLflowTracker(chosen_uri, experiment=chosen_experiment)
    try:
        num_events = send(run, tracker, from_start=known.get("uri") != tracker.uri)
    except ArenaError:
        raise
    except Exception as error:  # mlflow's, requests' and SQLAlchemy's errors have no common base
        raise ArenaError(
            f"{tracker.uri} did not take the events of {str(run)!r}: {short_reason(error)}",
            hint="nothing is lost; run this again when the server is up, or name another with --uri",
        ) from error
    if as_json:
        console.emit_json({"num_events": num_events, "uri": tracker.uri})
    else:
        console.note(f"{counted(num_events, 'event')} sent to {tracker.uri}")
        console.note(f"to look at them: {tracker.how_to_open()}")
