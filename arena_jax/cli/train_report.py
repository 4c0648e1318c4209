"""What ``arena-jax train`` says of a training: where it is, how it ended, and the object of ``--json``."""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.cli import console
from arena_jax.errors import EXIT_INTERRUPTED, EXIT_RELAUNCH, EXIT_RESUMABLE
from arena_jax.grid import Allocation, GridShape, Plan

if TYPE_CHECKING:
    from arena_jax.job import Job
    from arena_jax.planner import Planner
    from arena_jax.relaunch import Note
    from arena_jax.runtime.rundir import RunDirectory
    from arena_jax.tracking import MLflowTracker
    from arena_jax.training import Trained

_EXIT_CODES = {
    "interrupted": EXIT_INTERRUPTED,
    "terminated": EXIT_RESUMABLE,
    "stopped": EXIT_RESUMABLE,
    "paused": EXIT_RESUMABLE,
    "relaunch": EXIT_RELAUNCH,
}


def exit_code(stop_reason: str) -> int:
    """Of a training that ended for a reason; 0 where there is nothing left to do."""
    return _EXIT_CODES.get(stop_reason, 0)


def say_where(run: "RunDirectory") -> None:
    """The run's directory and where it resumes, on stderr."""
    console.note(f"run {run.path}" + (f", resuming at step {run.resume_step}" if run.resume_step is not None else ""))


def report_of(job: "Job", trained: "Trained", run: "RunDirectory", note: "Note | None") -> dict[str, Any]:
    """The object of ``--json``; ``losses`` has one entry per step of this invocation, in whatever processes."""
    outcome = trained.outcome
    plan = outcome.program.plan
    before = () if note is None else note.history
    times = [record.step_time_s for record in outcome.history]
    step_time_s = statistics.median(times) if times else None
    return {
        "steps": outcome.step,
        "first_step": trained.first_step if note is None else note.first_step,
        "losses": [*(loss for loss, _ in before), *(record.loss for record in outcome.history)],
        "step_time_s": step_time_s,
        "tokens_or_samples_per_s": job.items_per_batch[0] / step_time_s if step_time_s else None,
        "estimated_step_time_s": outcome.estimated_step_time_s,
        "plan_id": plan.plan_id,
        "grid": str(plan.grid),
        "swaps": [*(() if note is None else note.swaps), *(swap.to_json() for swap in outcome.swaps)],
        "run_id": trained.run_id,
        "run_dir": str(run.path),
        "checkpoint_dir": str(run.checkpoints),
        "stop_reason": outcome.stop_reason,
    }


def say_end(report: Mapping[str, Any], tracker: "MLflowTracker | None") -> None:
    """How it ended and where to look, on stderr."""
    losses = report["losses"]
    loss = f", loss {losses[0]:.4g} -> {losses[-1]:.4g}" if losses else ""
    console.note(f"{report['stop_reason']} after step {report['steps']}{loss}; kept in {report['run_dir']}")
    if report["stop_reason"] in _EXIT_CODES and Path(report["checkpoint_dir"]).is_dir():
        console.note("the same command goes on from here")
    if tracker is not None:
        console.note(f"to look at the curves: {tracker.how_to_open()}")


def show_plan(
    job: "Job", planner: "Planner", target: GridShape | Allocation, plan: Plan | None, *, as_json: bool
) -> dict[str, Any]:
    """Show the candidates and the chosen plan, and return the object of ``--json``."""
    from arena_jax.cli.progress import plan_summary, render_candidates
    from arena_jax.planner import candidate_rows, choose

    rows: list[dict[str, Any]] = []
    estimate = None
    if plan is None:
        index = planner.search(target)
        row = index.row(target) if isinstance(target, GridShape) else index.best(target)
        rows = candidate_rows(index, None if row is None else row.plan)
        render_candidates(rows)
        candidate = choose(index, target)
        estimate = row.estimate if row is not None else None
    else:
        candidate = planner.given(plan)
    if sys.stdout.isatty() and not as_json:
        for line in plan_summary(candidate.plan, estimate):
            console.data(line)
    else:
        console.data(candidate.plan.dumps().rstrip())
    return {
        "steps": 0,
        "losses": [],
        "estimated_step_time_s": candidate.estimated_step_time_s,
        "plan_id": candidate.plan.plan_id,
        "grid": str(candidate.plan.grid),
        "plan": candidate.plan.to_json(),
        "candidates": rows,
        "stop_reason": "dry_run",
    }
