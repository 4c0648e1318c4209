"""What a change of plan costs a running training, prepared and not, against checkpoint and restart.

The training is the real loop with the real hook; the plan asked for is planned and compiled as in
`arena-jax train`, by another process first, with empty caches. Prepared changes go back and forth
between plans that have been compiled.

    python -m benchmarks.hot_swap [--recipe gpt_tiny] [--no-restart]
    python -m benchmarks.hot_swap --resize cpu:4        # only what the grid prunes

What the grid prunes at a resize is measured beside it: planning and compiling the one grid that an index names,
against planning every grid of the allocation and compiling the best plan of each, as who has no index must to know
which is fastest.

For gpt_100m the batch is cut to what two cores can step in seconds; the state that moves stays as large.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import RESULTS, table, write

NUM_DEVICES = 8
# First steps of a run that say nothing of its step time: memory is found for them.
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Task:
    """One recipe: where it begins, whereto it changes, and how long it stays.

    Attributes:
        unprepared, prepared: grids to go to, one after the other; those of ``prepared`` have been compiled.
        settle: steps before each request.
    """

    recipe: str
    overrides: tuple[str, ...]
    start: str
    unprepared: tuple[str, ...]
    prepared: tuple[str, ...]
    settle: int


TASKS = {
    "gpt_tiny": Task(
        recipe="gpt_tiny",
        overrides=(),
        start="cpu:8/s1",
        unprepared=("cpu:4/s2", "cpu:4/s1"),
        prepared=("cpu:8/s1", "cpu:4/s2") * 3,
        settle=10,
    ),
    "gpt_100m": Task(
        recipe="gpt_100m",
        overrides=("global_batch=8", "model.sequence_length=64", "plan.zero=3", "plan.num_microbatches=1"),
        start="cpu:4/s1",
        unprepared=("cpu:2/s1",),
        prepared=("cpu:4/s1", "cpu:2/s1") * 2,
        settle=9,
    ),
}


class Driver:
    """Asks for one grid after the other, each a number of steps after the change before it."""

    def __init__(self, grids: Sequence[str], settle: int, limit_s: float) -> None:
        self._grids = list(grids)
        self._until_s = time.monotonic() + limit_s
        self._settle = settle
        self._since: int | None = 0
        self._done = False

    def poll(self, step: int) -> Any:
        from arena_jax.grid import GridShape, Request, Stop

        if time.monotonic() > self._until_s:
            return Request(target=Stop())
        if self._since is None or step - self._since < self._settle:
            return None
        self._since = None
        if not self._grids:
            return Request(target=Stop())
        return Request(target=GridShape.parse(self._grids.pop(0)), reason="benchmark")

    def report(self, report: Any) -> None:
        if report.errors:
            raise SystemExit(f"refused: {report.errors}")

    def prepare(self) -> list[Any]:
        return []

    def on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "swap":
            self._since = event["step"]


def measure(name: str, limit_s: float) -> dict[str, Any]:
    """All changes of one task, or those that fit in so many seconds, in this process."""
    began_s = time.monotonic()
    import jax

    from arena_jax.grid import GridShape
    from arena_jax.job import build
    from arena_jax.planner import choose
    from arena_jax.recipe import load_recipe
    from arena_jax.recipe_run import make_planner
    from arena_jax.runtime.contract import LoopOptions
    from arena_jax.runtime.feed import Feed
    from arena_jax.runtime.journal import Journal
    from arena_jax.runtime.trainer import Trainer
    from arena_jax.start import start_jax
    from arena_jax.warm import WarmProcess

    task = TASKS[name]
    start_jax(NUM_DEVICES)
    job = build(load_recipe(task.recipe, task.overrides))
    planner = make_planner(job)
    start = GridShape.parse(task.start)
    compiled = planner.compile(choose(planner.search(start), start))
    planner.settle(compiled.program.plan.num_microbatches)
    driver = Driver([*task.unprepared, *task.prepared], task.settle, limit_s - (time.monotonic() - began_s))
    events: list[dict[str, Any]] = []
    trainer = Trainer(
        compiled=compiled,
        feed=Feed(job.make_data()),
        options=LoopOptions(num_steps=1_000_000, items_per_step=job.items_per_batch[0]),
        journal=Journal(None, [events.append, driver.on_event]),
        describe=lambda *_: None,  # type: ignore[arg-type, return-value]
        hook=driver,
        recompile=planner.recompile,
        warm=WarmProcess(task.recipe, task.overrides, NUM_DEVICES),
    )
    outcome = trainer.run(compiled.program.init(job.seed))
    rate = device_rate(jax.devices()[:2], [a.nbytes for a in outcome.state.arrays if a.nbytes])
    return {"task": name, "overrides": list(task.overrides), "rate": rate, "swaps": read(events)}


def device_rate(devices: Sequence[Any], sizes: Sequence[int]) -> float:
    """Bytes per second of plain copies between two devices, of arrays of the state's sizes, median of 5."""
    import jax
    import numpy as np

    chosen, total = [], 0
    for size in sorted(sizes, reverse=True):
        if total < 1 << 28:
            chosen.append(size)
            total += size
    sources = jax.device_put([np.ones(size, np.uint8) for size in chosen], devices[0])
    jax.block_until_ready(sources)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(sources, devices[1]))
        times.append(time.perf_counter() - began)
    return total / statistics.median(times)


def read(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each change cost, from the events of the run."""
    steps = {e["step"]: e["step_time_s"] for e in events if e["kind"] == "step"}
    swaps = [e for e in events if e["kind"] == "swap"]
    requests = [e for e in events if e["kind"] == "request"]
    rows = []
    ends = [swap["step"] for swap in swaps[1:]] + [max(steps)]
    for swap, request, end in zip(swaps, requests[: len(swaps)], ends, strict=True):
        asked, at = request["step"], swap["step"]
        # The step in flight at the request belongs to neither side.
        before = [steps[s] for s in range(max(WARM_UP, asked - 10), asked - 1) if s in steps]
        during = [steps[s] for s in range(asked + 1, at + 1)]
        after = [steps[s] for s in range(at + 2, min(end, at + 12)) if s in steps]
        if not before or not after:
            continue
        normal, usual = statistics.median(before), statistics.median(after)
        rows.append(
            {
                "from": swap["from"],
                "to": swap["to"],
                "prepared": swap["prepared"],
                "background_s": swap["background_s"],
                "stall_s": swap["stall_s"],
                "stall_and_first_step_s": swap["stall_s"] + max(0.0, steps[at + 1] - usual),
                "move_s": swap["move_s"],
                "moved_bytes": swap["moved_bytes"],
                "step_before_s": normal,
                "step_after_s": usual,
                "steps_during": len(during),
                "slowed_median": statistics.median(during) / normal if len(during) > 2 else None,
                "slowed_max": max(during) / normal if len(during) > 2 else None,
                "steps_during_s": during,
            }
        )
    return rows


def resize(allocation: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds of planning and compiling gpt_tiny for an allocation, pruned by the grid and not; nothing cached."""
    import jax

    from arena_jax.grid import Allocation
    from arena_jax.job import build
    from arena_jax.planner import Planner, candidate_of, choose
    from arena_jax.recipe import load_recipe
    from arena_jax.start import start_jax

    start_jax(NUM_DEVICES)
    jax.config.update("jax_enable_compilation_cache", False)
    job = build(load_recipe("gpt_tiny", overrides))
    target = Allocation.parse(allocation)

    def timed(do: Any) -> tuple[Any, dict[str, float]]:
        jax.clear_caches()
        planner = Planner(job.problem(), name=job.name)
        began, began_cpu = time.perf_counter(), time.process_time()
        done = do(planner)
        return done, {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}

    def every(planner: Any) -> Any:
        index = planner.search(target)
        rows = [row for row in index if row.feasible]
        for row in rows:
            planner.compile(candidate_of(row))
        return index, rows

    timed(lambda planner: planner.search(target))  # imports, measurements of the node
    (index, rows), unpruned = timed(every)
    grid = choose(index, target).plan.grid
    _, pruned = timed(lambda planner: planner.recompile(grid))
    _, planned = timed(lambda planner: planner.search(grid))
    _, planned_all = timed(lambda planner: planner.search(target))
    return {
        "allocation": allocation,
        "overrides": list(overrides),
        "grid": str(grid),
        "grids": len(rows),
        "pruned": pruned,
        "unpruned": unpruned,
        "planning_pruned": planned,
        "planning_unpruned": planned_all,
    }


def restart(name: str, folder: Path) -> float:
    """Seconds from the command of a resumed training to its first step, with warm caches."""
    task = TASKS[name]
    common = [sys.executable, "-m", "arena_jax", "train", task.recipe, *task.overrides, "tracking.enabled=false"]
    common += [f"checkpoint.dir={folder}", "eval.every=0", f"plan.grid={task.start}"]
    for steps in ("2", "4"):  # the first fills the caches
        began = time.time()
        subprocess.run([*common, "--steps", steps], check=True, capture_output=True)
    log = sorted(folder.glob("*/events.jsonl"))[-1]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    saved = [e["seconds"] for e in events if e["kind"] == "checkpoint"]
    first = next(e["time"] for e in events if e["kind"] == "step" and e["step"] == 3)
    return float(first - began + saved[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=sorted(TASKS), help="only this one; the others' results stay")
    parser.add_argument("--measure", choices=sorted(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--no-restart", action="store_true", help="leave out checkpoint and restart")
    parser.add_argument("--override", action="append", default=[], help="of gpt_tiny at a --resize, like a recipe's")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which a recipe changes no more")
    parser.add_argument("--resize", metavar="ALLOCATION", help="only planning and compiling at a resize to it")
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure(options.measure, options.limit)))
        return 0
    results = _earlier()
    if options.resize or not options.recipe:
        results["resize"] = resize(options.resize or "cpu:4", options.override)
        report(results)
    names = [] if options.resize else [options.recipe] if options.recipe else list(TASKS)
    for name in names:
        with tempfile.TemporaryDirectory() as home:  # empty caches
            environment = os.environ | {"ARENA_JAX_HOME": home, "JAX_PLATFORMS": "cpu"}
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.hot_swap", "--measure", name, "--limit", str(options.limit)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            results[name] = json.loads(done.stdout.splitlines()[-1])
            results[name]["load"] = os.getloadavg()[1]
            if not options.no_restart:
                os.environ.update(environment)
                results[name]["restart_s"] = restart(name, Path(home) / "runs")
        report(results)
    return 0


def _earlier() -> dict[str, Any]:
    try:
        return dict(json.loads((RESULTS / "hot_swap.json").read_text())["tasks"])
    except (OSError, ValueError, KeyError):
        return {}


def report(results: dict[str, Any]) -> None:
    """Write the table: medians over the changes of a kind."""
    head = ["recipe", "change", "n", "stall", "with first step", "limit", "step", "moved", "GB/s", "slowed median, max"]
    rows, notes = [], []
    for name, result in results.items():
        if name == "resize":
            continue
        for prepared in (False, True):
            swaps = [s for s in result["swaps"] if s["prepared"] == prepared]
            if not swaps:
                continue
            stall = statistics.median(s["stall_s"] for s in swaps)
            whole = statistics.median(s["stall_and_first_step_s"] for s in swaps)
            step = statistics.median(s["step_after_s"] for s in swaps)
            moved = statistics.median(s["moved_bytes"] for s in swaps)
            speed = statistics.median(s["moved_bytes"] / max(s["move_s"], 1e-9) for s in swaps)
            limit = step + moved / result["rate"] * (1.5 if name == "gpt_100m" else 1.0)
            slowed = [s for s in swaps if s["slowed_median"] is not None]
            slow = "-"
            if slowed:
                slow = f"{statistics.median(s['slowed_median'] for s in slowed):.2f}"
                slow += f", {max(s['slowed_max'] for s in slowed):.2f}"
            rows.append(
                [
                    *(name, "prepared" if prepared else "unprepared", len(swaps), _ms(stall), _ms(whole), _ms(limit)),
                    *(_ms(step), f"{moved / 2**20:.1f} MiB", f"{speed / 1e9:.2f}", slow),
                ]
            )
        notes.append(f"{name}: measured at a load average of {result['load']:.1f} (the run's own included);")
        background = [s["background_s"] for s in result["swaps"] if not s["prepared"]]
        if background:
            notes.append(f"{name}: planned and compiled in the background in {statistics.median(background):.1f} s;")
        notes.append(f"{name}: plain copies between two devices ran at {result['rate'] / 1e9:.2f} GB/s;")
        if "restart_s" in result:
            stalls = [s["stall_and_first_step_s"] for s in result["swaps"] if s["prepared"]]
            notes.append(
                f"{name}: checkpoint and restart took {result['restart_s']:.1f} s, "
                f"{result['restart_s'] / statistics.median(stalls):.0f} times the median prepared change;"
            )
    if "resize" in results:
        notes.append(_resize_note(results["resize"]))
    lines = [
        *table(head, rows),
        "",
        "`stall`: from the end of the last step under the old plan until the next could begin. `with first step`: and",
        "what the first step under the new plan took beyond the median of those after it. `limit`: one step and the",
        "bytes written at the measured rate between two devices (gpt_100m: 1.5 times that). `slowed`: steps between",
        "request and change, against the ten before the request.",
        "",
        *(f"- {note.rstrip(';')}" for note in notes),
    ]
    write("hot_swap", title="Changing the plan of a running training", lines=lines, data={"tasks": results})


def _resize_note(found: dict[str, Any]) -> str:
    few, every = found["pruned"], found["unpruned"]
    plan, plan_all = found["planning_pruned"], found["planning_unpruned"]
    changed = "".join(f" {override}" for override in found["overrides"])
    return (
        f"gpt_tiny{changed}, resize to {found['allocation']}: planning and compiling {few['wall_s']:.1f} s with the "
        f"grid ({found['grid']}) given, {every['wall_s']:.1f} s without ({found['grids']} grids), "
        f"{every['wall_s'] / few['wall_s']:.1f} times (processor time {few['cpu_s']:.1f} s and {every['cpu_s']:.1f} s, "
        f"{every['cpu_s'] / few['cpu_s']:.1f} times); planning alone {plan['wall_s']:.1f} s and "
        f"{plan_all['wall_s']:.1f} s;"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


if __name__ == "__main__":
    raise SystemExit(main())
