"""What it costs to change the number of processes of a job: 1 -> 2 -> 4 -> 2, ``gpt_tiny`` on CPU devices.

``python -m benchmarks.relaunch [--write]``. The job is supervised as by ``arena-jax train --processes``. The first
round fills the compile cache. Then the same changes are made twice: with the processes of the new plan started
while the old ones train ("ahead"), and after they have ended ("after"). Downtime is the time from the end of the last
step under the old plan until the state is in place under the new one; first step is the time to the end of
the next step.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arena_jax.events import read_events
from arena_jax.grid import GridShape, Request, StepReport, Stop
from arena_jax.processes.group import Work
from arena_jax.processes.supervisor import Supervisor
from arena_jax.runtime.rundir import open_run
from arena_jax.runtime.signals import StopSignals
from benchmarks import _report

GRIDS = ("cpu:1/s1", "cpu:2x1/s1", "cpu:4x1/s1", "cpu:2x1/s1")
OVERRIDES = ("tracking.enabled=false", "eval.every=0", "hook.socket=off", "checkpoint.every=1000")


class Tour:
    """A scheduler that goes on to the next grid after some steps on each."""

    def __init__(self, steps: int) -> None:
        self._left = list(GRIDS[1:])
        self._steps = steps
        self._grid = GRIDS[0]
        self._since: int | None = None
        self._ask: Request | None = None

    def poll(self, step: int) -> Request | None:
        asked, self._ask = self._ask, None
        return asked

    def report(self, report: StepReport) -> None:
        if report.state != "running" or str(report.grid) != self._grid:
            return
        self._since = report.step if self._since is None else self._since
        if report.step - self._since < self._steps:
            return
        self._since = None
        if not self._left:
            self._ask = Request(target=Stop())
            self._grid = ""
            return
        self._grid = self._left.pop(0)
        self._ask = Request(target=GridShape.parse(self._grid), reason="tour")

    def prepare(self) -> list[GridShape]:
        return []


def tour(folder: Path, *, ahead: bool, steps: int) -> list[dict[str, Any]]:
    """One round; the changes as measured."""
    run = open_run(folder, name="gpt_tiny", resume="never")
    work = Work(
        recipe="gpt_tiny",
        overrides=(*OVERRIDES, "seed=0"),
        num_steps=100_000,
        run_path=run.path,
        run_id=run.run_id,
        num_devices=1,
    )
    with StopSignals() as signals:
        target = GridShape.parse(GRIDS[0])
        supervisor = Supervisor(work, target=target, signals=signals, hook=Tour(steps), overlap=ahead, say=print)
        ended = supervisor.run()
    run.close()
    assert ended.code == 75, ended
    events = list(read_events(run.path))
    found = []
    for i, event in enumerate(events):
        if event["kind"] != "swap":
            continue
        first = next(e for e in events[i:] if e["kind"] == "step")
        last = [e for e in events[:i] if e["kind"] == "step"][-1]
        found.append(
            {
                "from": event["from"],
                "to": event["to"],
                "background_s": event["background_s"],
                "downtime_s": event["stall_s"],
                "first_step_s": first["time"] - last["time"],
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relaunch", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps on each grid")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results")
    options = parser.parse_args(argv)
    rounds: dict[str, list[dict[str, Any]]] = {}
    began_s = time.time()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARENA_JAX_HOME"] = str(Path(folder) / "home")
        for name, ahead in (("cold cache, ahead", True), ("warm cache, ahead", True), ("warm cache, after", False)):
            rounds[name] = tour(Path(folder) / name.replace(" ", "-"), ahead=ahead, steps=options.steps)
            print(name, rounds[name], file=sys.stderr, flush=True)
    rows = [
        (name, f"{c['from']} -> {c['to']}", *(f"{c[k]:.1f}" for k in ("background_s", "downtime_s", "first_step_s")))
        for name, changes in rounds.items()
        for c in changes
    ]
    head = ["round", "change", "background, s", "downtime, s", "to the end of the next step, s"]
    lines = _report.table(head, rows)
    if options.write:
        data = {"rounds": rounds, "seconds": time.time() - began_s}
        _report.write("relaunch", title="Changing the number of processes of gpt_tiny", lines=lines, data=data)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
