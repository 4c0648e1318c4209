"""One process of a group, as a supervisor or Slurm starts it; nobody types this.

A supervisor gives its orders as JSON in the first argument. ``{"job": "plan"}`` plans for a target and ends;
``{"job": "train"}`` compiles its part of the plan it is given, says so, waits to hear where to begin, and trains.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.errors import EXIT_FAILED, EXIT_RESUMABLE, ArenaError
from arena_jax.grid import GridShape, Plan
from arena_jax.processes.coordination import Board
from arena_jax.processes.line import Line
from arena_jax.processes.post import Post, RelayHook
from arena_jax.warm import end_with_parent

if TYPE_CHECKING:
    from arena_jax.job import Job
    from arena_jax.planner import Planner
    from arena_jax.runtime.contract import Compiled
    from arena_jax.runtime.peers import Peers
    from arena_jax.runtime.rundir import RunDirectory
    from arena_jax.runtime.signals import StopSignals

_BYE_S = 30.0


def main(task: dict[str, Any]) -> None:
    """Do the task and end the process."""
    end_with_parent(task["parent"], "SIGKILL")
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where it is, into its log
    line = Line(socket.socket(fileno=task["line"]))
    code = 0
    try:
        if task["job"] == "plan":
            _plan(task, line)
        else:
            _train(task, line)
    except ArenaError as error:
        code = error.exit_code
        line.send(say="end", code=code, error=error.message, hint=error.hint)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
        line.send(say="end", code=code, stop_reason="terminated", report={})
    except KeyboardInterrupt:
        code = 130
        line.send(say="end", code=code, stop_reason="interrupted", report={})
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # No exit handlers: some wait for peers that may be gone.
    os._exit(code)


def _plan(task: dict[str, Any], line: Line) -> None:
    from arena_jax.grid import parse_target
    from arena_jax.job import build
    from arena_jax.planner import candidate_of, candidate_rows, choose
    from arena_jax.processes.assign import assignable, check_assignable
    from arena_jax.recipe import load_recipe
    from arena_jax.recipe_run import make_planner
    from arena_jax.start import start_jax

    start_jax(task["num_devices"])
    planner = make_planner(build(load_recipe(task["recipe"], task["overrides"])))
    if task["num_microbatches"] is not None:
        planner.settle(task["num_microbatches"])
    target = parse_target(task["target"])
    index = planner.search(target)
    row = assignable(index, target)
    if row is None:  # says what is wrong with the rows there are
        check_assignable(choose(index, target).plan)
    assert row is not None
    candidate = candidate_of(row)
    line.send(
        say="planned",
        plan=candidate.plan.to_json(),
        estimated_step_time_s=candidate.estimated_step_time_s,
        engine=candidate.engine,
        rows=candidate_rows(index, candidate.plan),
    )


def _train(task: dict[str, Any], line: Line) -> None:
    post = Post(line)  # beats from now on; importing jax takes seconds
    from arena_jax.processes.elsewhere import OtherProcesses
    from arena_jax.runtime.hooks import ScriptedHook
    from arena_jax.runtime.rundir import RunDirectory
    from arena_jax.runtime.signals import StopSignals

    rank, count = task["rank"], task["num_processes"]
    plan = Plan.from_json(task["plan"])
    board = None if count == 1 else Board(task["coordinator"], rank, count)
    with StopSignals(lambda number: os._exit(EXIT_RESUMABLE)) as signals:
        if rank:  # the leader hears signals for all
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        part = prepare(task["recipe"], task["overrides"], plan, task["num_devices"], rank, board, **task["facts"])
        post.watched = part.peers
        line.send(say="ready")
        go = post.wait("go")
        assert go is not None
        run = RunDirectory(path=Path(task["run_path"]), run_id=task["run_id"], resume_step=go["resume_step"])
        script = part.job.recipe.hook.script
        hook: Any = None
        if rank == 0:
            hook = RelayHook(post)
            if script:
                hook = ScriptedHook(script, wait=part.job.recipe.hook.script_waits)
        code, report = part.train(
            run,
            signals,
            num_steps=task["num_steps"],
            hook=hook,
            elsewhere=OtherProcesses(post, part.peers, run_path=run.path, run_id=run.run_id),
            resume_from=go["resume_from"],
            resumption=_resumption(go["arrival"], plan) if go["arrival"] else None,
            given=(task["recipe"], task["overrides"]),
            on_step=post.note,
        )
    line.send(say="end", code=code, stop_reason=report["stop_reason"], steps=report["steps"], report=report)
    post.wait("bye", _BYE_S)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process's part of a training, compiled."""

    job: "Job"
    planner: "Planner"
    compiled: "Compiled"
    peers: "Peers | None"

    def train(
        self,
        run: "RunDirectory",
        signals: "StopSignals",
        *,
        num_steps: int | None,
        hook: Any,
        elsewhere: Any,
        resume_from: str | None = None,
        resumption: Any = None,
        given: tuple[str, Sequence[str]] | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Train to the end; the exit code and the report of ``train --json``."""
        from arena_jax.cli.train import train_job
        from arena_jax.training import Supervised
        from arena_jax.warm import warm_process

        supervised = Supervised(
            compiled=self.compiled,
            peers=self.peers,
            elsewhere=elsewhere,
            resume_from=None if resume_from is None else Path(resume_from),
            resumption=resumption,
        )
        return train_job(
            self.job,
            self.planner,
            self.compiled.plan.grid,
            None,
            run,
            self.job.steps if num_steps is None else num_steps,
            signals,
            hook,
            warm_process(self.planner.devices, given if self.peers is None else None),
            supervised=supervised,
            callbacks=() if on_step is None else (on_step,),
        )


def prepare(
    recipe: str,
    overrides: Sequence[str],
    plan: Plan,
    num_devices: int,
    rank: int,
    board: Board | None,
    *,
    estimated_step_time_s: float | None = None,
    engine: str = "",
) -> Part:
    """Build the job and compile this process's part of the plan.

    Args:
        num_devices: CPU devices of this process.
        board: connected; ``None`` for one process.
    """
    from arena_jax.job import build
    from arena_jax.planner import Candidate
    from arena_jax.recipe import load_recipe
    from arena_jax.recipe_run import make_planner
    from arena_jax.runtime.peers import Peers
    from arena_jax.start import start_jax

    peers, one_runtime = None, True
    if board is not None:
        one_runtime = plan.grid.num_stages == 1
        peers = Peers(board, rank, plan.grid.allocation.num_nodes, one_runtime=one_runtime)
        if one_runtime:
            board.join_runtime()
    start_jax(num_devices)
    job = build(load_recipe(recipe, overrides))
    candidate = Candidate(plan=plan, estimated_step_time_s=estimated_step_time_s, engine=engine)
    if board is None or one_runtime:
        planner = make_planner(job)
        planner.settle(plan.num_microbatches)
        return Part(job=job, planner=planner, compiled=planner.compile(candidate), peers=peers)
    import jax

    from arena_jax.processes.assign import processes_of_stages
    from arena_jax.runtime.links import WireLinks

    links = WireLinks(processes_of_stages(plan), rank, board, host=board.own_host())
    # Nothing is made on the stages of others; this process's devices stand in for theirs.
    planner = make_planner(job, jax.local_devices() * plan.grid.allocation.num_nodes)
    planner.settle(plan.num_microbatches)
    return Part(job=job, planner=planner, compiled=planner.compile(candidate, links=links), peers=peers)


def _resumption(data: dict[str, Any], plan: Plan) -> Any:
    from arena_jax.runtime.contract import Swap
    from arena_jax.training import Resumption

    swap = None
    if data["swap"] is not None:
        swap = Swap(
            step=0,
            source=GridShape.parse(data["swap"]["from"], None),
            target=plan.grid,
            reason=data["swap"]["reason"],
            background_s=data["swap"]["background_s"],
            stall_s=0.0,
            prepared=data["swap"]["prepared"],
            difference="in other processes",
        )
    return Resumption(swap=swap, left_s=data["left_s"], why=data["why"], request_id=data.get("id"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
