"""MLflow as a tracker: a run per training, and inside it a run per plan segment.

What went wrong with simpler ways, and what is done here instead:

- mlflow takes seconds to import and its first SQLite store seconds more: both happen in
  :meth:`MLflowTracker.open`, on the sink's thread.
- A synchronous ``log_metrics`` costs tens of milliseconds: values go out with ``log_batch``, many
  steps a call, through a client of our own; mlflow's global state is left as it is.
- A dead server blocks for minutes by default: the HTTP time-outs are shortened unless the user set them.
- Logging another value for a logged param raises: a param that changed on resume becomes a tag.
- A call that failed may have arrived. Metrics carry the event's time, and MLflow's store keeps one
  of two equal (key, time, step, value); runs are found again by our tags before one is created;
  artifacts have names that repeat. So sending events twice changes nothing.
"""

import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from arena_jax.events import EXPERIMENT, Event

HTTP_TIMEOUT_S = 5
HTTP_RETRIES = 1
BATCH = 1000  # what MLflow's server takes in one call
MAX_PARAMS = 100
MAX_PARAM_CHARS = 6000
MAX_KEY_CHARS = 250

TAG_RUN = "arena.run_id"
TAG_SEGMENT = "arena.segment"

# What of a swap becomes tags of the plan that follows it, and of the whole run.
_SWAP_TAGS = ("from", "to", "reason", "background_s", "stall_s", "prepared", "difference")

_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLflowTracker:
    """Logs a training to MLflow.

    Args:
        uri: tracking URI. ``None`` takes ``MLFLOW_TRACKING_URI``, what the script set with
            ``mlflow.set_tracking_uri``, or MLflow's own default, ``mlflow.db`` in the working folder.
        experiment: name of the experiment, made when missing.
        run_id: an MLflow run to log into. ``None`` joins the run that is active in the calling
            thread (or ``MLFLOW_RUN_ID``), and makes one when there is none. A joined run is not ended.
    """

    def __init__(self, uri: str | None = None, experiment: str = EXPERIMENT, run_id: str | None = None) -> None:
        self.uri = _resolve_uri(uri)
        self.experiment = experiment
        self.joined = run_id or _active_run_id() or os.environ.get("MLFLOW_RUN_ID") or None
        self.state: dict[str, Any] = {"uri": self.uri, "experiment": experiment}
        self._client: Any = None

    def open(self, run_start: Event) -> None:
        """Find or create the run, and log what is known at the start: params, recipe, versions."""
        client = self.connect()
        state = self.state
        if state.get("arena_run_id") != run_start.get("run_id"):
            state = {"uri": self.uri, "experiment": self.experiment, "arena_run_id": run_start.get("run_id")}
        experiment_id = state.get("experiment_id") or self._experiment_id()
        name = str(run_start.get("name", "training"))
        parent = state.get("parent") or self.joined
        if parent is None:
            parent = self._find_or_create(experiment_id, name, {TAG_RUN: str(run_start.get("run_id"))})
        else:
            experiment_id = client.get_run(parent).info.experiment_id
        joined = state.get("joined", parent == self.joined)
        self.state = {**state, "experiment_id": experiment_id, "parent": parent, "joined": joined}
        if not joined:
            client.update_run(parent, status="RUNNING")
        self._log_start(parent, run_start)

    def write(self, events: Sequence[Event]) -> None:
        """Log events in as few calls as they allow. All or, after an exception, to be repeated."""
        saved = deepcopy(self.state)
        try:
            metrics: list[tuple[str, Event]] = []
            for event in events:
                if event["kind"] in ("plan", "run_end", "candidates"):
                    self._flush(metrics)
                    metrics = []
                    getattr(self, f"_on_{event['kind']}")(event)
                elif event["kind"] in ("step", "eval", "checkpoint", "swap"):
                    if event["kind"] == "swap":  # the plan that comes next tells of it, too
                        self.state["swap"] = {k: event[k] for k in _SWAP_TAGS if event.get(k) not in (None, "")}
                    metrics += [(run, event) for run in self._current_runs()]
            self._flush(metrics)
        except BaseException:
            self.state = saved
            raise

    def close(self) -> None:
        """Nothing is held open."""

    def log_run(
        self, name: str, params: Mapping[str, Any], metrics: Mapping[str, float | None], artifacts: Sequence[str] = ()
    ) -> None:
        """Log something finished, which is no training, as one run: a metric that is ``None`` is left out."""
        from mlflow.entities import Metric, Param

        client, now = self.connect(), int(1000 * time.time())
        self.state.setdefault("experiment_id", self._experiment_id())
        run = client.create_run(self.state["experiment_id"], run_name=name).info.run_id
        values = [(_key(key), _number(value)) for key, value in metrics.items()]
        client.log_batch(
            run,
            metrics=[Metric(key, value, now, 0) for key, value in values if value is not None],
            params=[Param(key, _text(value)) for key, value in _flat(params)],
        )
        for artifact in artifacts:
            client.log_artifact(run, artifact)
        client.set_terminated(run)

    def how_to_open(self) -> str:
        """The command or address that shows this run."""
        if self.uri.startswith("http"):
            experiment, run = self.state.get("experiment_id"), self.state.get("parent")
            return f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{run}" if run else self.uri
        return f"{_mlflow_command()} ui --backend-store-uri {self.uri}"

    def connect(self) -> Any:
        """The ``MlflowClient``, made on first use."""
        if self._client is None:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(HTTP_TIMEOUT_S))
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(HTTP_RETRIES))
            # It greets the end of every run on stdout, which is ours for data.
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            for noisy in ("alembic", "mlflow.store.db.utils"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    def _experiment_id(self) -> str:
        client = self.connect()
        found = client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        # Beside the database, wherever the process happens to be when the store is opened.
        database = _sqlite_file(self.uri)
        location = None if database is None else (database.parent / "mlruns" / self.experiment).as_uri()
        return str(client.create_experiment(self.experiment, artifact_location=location))

    def _find_or_create(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
        client = self.connect()
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = client.search_runs([experiment_id], filter_string=query, max_results=1)
        if found:
            return str(found[0].info.run_id)
        run = client.create_run(experiment_id, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def _log_start(self, parent: str, run_start: Event) -> None:
        from mlflow.entities import Param, RunTag

        client = self.connect()
        logged = client.get_run(parent).data.params
        params, tags = [], [RunTag(TAG_RUN, str(run_start.get("run_id")))]
        for key, value in _flat(run_start.get("params") or {}):
            text = _text(value)
            if key not in logged:
                params.append(Param(key, text))
            elif logged[key] != text:
                tags.append(RunTag(f"arena.changed.{key}"[:MAX_KEY_CHARS], text))
        tags += [
            RunTag(f"arena.{part}.{k}", _text(v))
            for part in ("versions", "host")
            for k, v in _flat(run_start.get(part) or {})
        ]
        if run_start.get("command"):
            tags.append(RunTag("arena.command", _text(run_start["command"])))
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(parent, params=params[first : first + MAX_PARAMS])
        for first in range(0, len(tags), MAX_PARAMS):
            client.log_batch(parent, tags=tags[first : first + MAX_PARAMS])
        if run_start.get("recipe"):
            client.log_text(parent, str(run_start["recipe"]), "recipe.yaml")

    def _on_candidates(self, event: Event) -> None:
        rows = event.get("rows") or []
        if not rows:
            return
        count = self.state.get("num_tables", 0)
        name = f"candidates-{count}.json" if count else "candidates.json"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[row.get(key) for key in columns] for row in rows]}
        client, parent = self.connect(), self.state["parent"]
        client.log_text(parent, json.dumps(table), name)
        tables = [*self.state.get("tables", []), name]
        # The tag by which MLflow's page knows that a JSON file is a table.
        shown = json.dumps([{"path": table_name, "type": "table"} for table_name in tables])
        client.set_tag(parent, "mlflow.loggedArtifacts", shown)
        self.state |= {"num_tables": count + 1, "tables": tables}

    def _on_plan(self, event: Event) -> None:
        from mlflow.entities import RunTag

        client, parent = self.connect(), self.state["parent"]
        self._end_segment("FINISHED")
        number = self.state.get("num_segments", 0)
        tags = {"mlflow.parentRunId": parent, TAG_SEGMENT: str(number)}
        segment = self._find_or_create(self.state["experiment_id"], str(event.get("grid", "plan")), tags)
        facts = {key: _text(event[key]) for key in ("plan_id", "grid", "engine", "reason") if event.get(key)}
        described = [RunTag(f"arena.{key}", value) for key, value in facts.items()]
        swap = self.state.pop("swap", None) or {}
        described += [RunTag(f"arena.swap.{key}", _text(value)) for key, value in swap.items()]
        client.log_batch(segment, tags=[*described, RunTag("arena.first_step", str(event.get("step", 0)))])
        client.log_batch(parent, tags=described)
        if event.get("plan"):
            client.log_text(segment, json.dumps(event["plan"], indent=1, sort_keys=True), "plan.json")
            client.log_text(
                parent, json.dumps(event["plan"], indent=1, sort_keys=True), f"plans/{event.get('plan_id')}.json"
            )
        self.state |= {"num_segments": number + 1, "segment": segment}

    def _on_run_end(self, event: Event) -> None:
        reason = str(event.get("stop_reason", ""))
        status = end_status(reason)
        client, parent = self.connect(), self.state["parent"]
        client.set_tag(parent, "arena.stop_reason", reason)
        if event.get("message"):
            client.set_tag(parent, "arena.message", _text(event["message"]))
        self._end_segment(status)
        if not self.state["joined"]:
            client.set_terminated(parent, status=status, end_time=_milliseconds(event))

    def _end_segment(self, status: str) -> None:
        segment = self.state.get("segment")
        if segment is not None:
            self.connect().set_terminated(segment, status=status)
            self.state["segment"] = None

    def _current_runs(self) -> list[str]:
        segment = self.state.get("segment")
        return [self.state["parent"], *([segment] if segment else [])]

    def _flush(self, events: Sequence[tuple[str, Event]]) -> None:
        from mlflow.entities import Metric

        by_run: dict[str, list[Any]] = {}
        for run, event in events:
            step, time = int(event.get("step") or 0), _milliseconds(event)
            values = by_run.setdefault(run, [])
            values += [Metric(key, value, time, step) for key, value in metrics_of(event)]
        for run, values in by_run.items():
            for first in range(0, len(values), BATCH):
                self.connect().log_batch(run, metrics=values[first : first + BATCH])


def metrics_of(event: Event) -> Iterator[tuple[str, float]]:
    """Names and values of the numbers in a ``step``, ``eval``, ``checkpoint`` or ``swap`` event."""
    kind = event["kind"]
    named: dict[str, Any] = {}
    if kind == "step":
        named = {**(event.get("metrics") or {}), "loss": event.get("loss"), "step_time_s": event.get("step_time_s")}
        named[f"{event.get('rate_unit') or 'samples'}_per_s"] = event.get("rate")
        named["estimated_step_time_s"] = event.get("estimated_step_time_s")
        measured, estimated = _number(event.get("step_time_s")), _number(event.get("estimated_step_time_s"))
        if measured and estimated:
            named["estimated_over_measured"] = estimated / measured
    elif kind == "eval":
        named = {f"eval_{key}": value for key, value in (event.get("metrics") or {}).items()}
    elif kind == "checkpoint":
        named = {"checkpoint_s": event.get("seconds")}
    elif kind == "swap":
        named = {"swap_background_s": event.get("background_s"), "swap_stall_s": event.get("stall_s")}
        named |= {"swap_move_s": event.get("move_s"), "swap_moved_bytes": event.get("moved_bytes")}
    for key, value in named.items():
        number = _number(value)
        if number is not None:
            yield _key(key), number


def end_status(stop_reason: str) -> str:
    """MLflow's run status for the stop reason of a run."""
    words = stop_reason.lower()
    if any(word in words for word in ("fail", "error", "nonfinite", "nan")):
        return "FAILED"
    if any(word in words for word in ("interrupt", "resum", "stop", "sig", "paus", "term", "preempt")):
        return "KILLED"
    return "FINISHED"


def _number(value: Any) -> float | None:
    """A float, also from the log's ``nan`` and ``inf``; ``None`` for what is no number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _key(f"{prefix}{name}"), value


def _key(name: str) -> str:
    return _FORBIDDEN.sub("_", name).strip("/")[:MAX_KEY_CHARS]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:MAX_PARAM_CHARS]


def _milliseconds(event: Event) -> int:
    return math.floor(1000 * event["time"])


def _resolve_uri(uri: str | None) -> str:
    """The absolute tracking URI, without importing mlflow unless the script has."""
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not chosen and (module := sys.modules.get("mlflow")) is not None:
        chosen = str(module.get_tracking_uri())
    database = _sqlite_file(chosen or "sqlite:///mlflow.db")
    return f"sqlite:///{database}" if database is not None else str(chosen)


def _sqlite_file(uri: str) -> Path | None:
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).expanduser().absolute() if uri.startswith(prefix) else None


def _active_run_id() -> str | None:
    """The run active in this thread; there is none when the script never imported mlflow."""
    module = sys.modules.get("mlflow")
    run = None if module is None else module.active_run()
    return None if run is None else str(run.info.run_id)


def _mlflow_command() -> str:
    """``mlflow`` when it is on the path, else the one beside this interpreter."""
    if shutil.which("mlflow"):
        return "mlflow"
    beside = Path(sys.executable).parent / "mlflow"
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
