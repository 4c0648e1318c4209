"""What the training loop costs: a ``Trainer`` with data, events and MLflow on, against bare steps.

The loop draws its batches from the real corpus, writes the event log, fetches the metrics of every
step, and its tracker's thread feeds a SQLite store of MLflow, as in ``arena-jax train``. The bare loop
calls ``program.step`` on one batch that is there already, and waits at its end. Both run the same
program on the same state, a stretch of steps each in turn. What the tracker has not sent when its
stretch ends it sends before the bare one begins, and the processor time of that is added to the loop's.

    python -m benchmarks.loop_overhead [--steps 20] [--pairs 24]
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from arena_jax.events import Event, EventLog
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.contract import Compiled, LoopOptions
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.trainer import Trainer
from arena_jax.tracking import MLflowTracker, Sink
from benchmarks._ours import Ours
from benchmarks._pairs import Pairs
from benchmarks._report import table, write
from benchmarks.step_overhead import LONG

LIMIT = 0.03
# The shortest step that the limit is for, about 100 ms, on which the loop weighs most.
TASK = replace(LONG, global_batch=16)
CATCH_UP_TIMEOUT_S = 120.0


class Watched:
    """A tracker, with the number of steps it has taken and its thread's processor time for them."""

    def __init__(self, inner: MLflowTracker) -> None:
        self._inner = inner
        self.num_steps = 0
        self.cpu_s = 0.0

    def open(self, run_start: Event) -> None:
        self._inner.open(run_start)

    def write(self, events: Sequence[Event]) -> None:
        began = time.thread_time()
        self._inner.write(events)
        self.cpu_s += time.thread_time() - began
        self.num_steps += sum(event["kind"] == "step" for event in events)

    def close(self) -> None:
        self._inner.close()


class Loop:
    """One training in stretches, each run by a new ``Trainer``."""

    def __init__(self, ours: Ours, folder: Path) -> None:
        self._ours = ours
        self._step = 0
        sizes = [f"global_batch={TASK.global_batch}", f"model.sequence_length={TASK.config.sequence_length}"]
        self._feed = Feed(build(load_recipe("gpt_tiny", sizes)).make_data())
        self._compiled = Compiled(program=ours.program)
        log = EventLog(folder / "events.jsonl")
        self._journal = Journal(log)
        self._journal.emit("run_start", run_id="loop-overhead", name="loop_overhead")
        self._journal.plan(ours.program.plan, step=0, reason="start", compiled=self._compiled)
        self.tracker = Watched(MLflowTracker(uri=f"sqlite:///{folder / 'mlflow.db'}"))
        self.sink = Sink(self.tracker, log)

    def stretch_s(self, num_steps: int) -> float:
        """Seconds of that many steps, the tracker's late work included."""
        options = LoopOptions(
            num_steps=self._step + num_steps,
            items_per_step=TASK.global_batch * TASK.config.sequence_length,
            item_unit="tokens",
        )
        trainer = Trainer(
            compiled=self._compiled, feed=self._feed, options=options, journal=self._journal, describe=_no_checkpoint
        )
        began = time.perf_counter()
        outcome = trainer.run(self._ours.state, first_step=self._step)
        jax.block_until_ready(outcome.state)
        elapsed_s, sent_s = time.perf_counter() - began, self.tracker.cpu_s
        self._ours.state, self._step = outcome.state, outcome.step
        self._wait_for_tracker()
        return elapsed_s + self.tracker.cpu_s - sent_s

    def _wait_for_tracker(self) -> None:
        deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
        while self.tracker.num_steps < self._step:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the tracker took {self.tracker.num_steps} of {self._step} steps")
            time.sleep(0.05)


def bare_s(ours: Ours, batch: Any, num_steps: int) -> float:
    """Seconds of that many steps and nothing else."""
    began = time.perf_counter()
    for _ in range(num_steps):
        ours.step(batch)
    jax.block_until_ready(ours.state)
    return time.perf_counter() - began


def measure(num_pairs: int, num_steps: int) -> tuple[Pairs, dict[str, float]]:
    """Pairs of stretches, and what the tracker's thread spent per step."""
    ours = Ours(TASK, ((1, 1),))
    batch = TASK.batch(0)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(ours, Path(folder))
        loop.stretch_s(num_steps)  # mlflow is imported and its store made meanwhile
        bare_s(ours, batch, num_steps)
        cpu_s = loop.tracker.cpu_s
        loops: list[tuple[float, float, float]] = []
        bares: list[tuple[float, float, float]] = []
        for i in range(num_pairs):
            for kind in ("bare", "loop") if i % 2 else ("loop", "bare"):
                cpu, thread = time.process_time(), time.thread_time()
                wall = loop.stretch_s(num_steps) if kind == "loop" else bare_s(ours, batch, num_steps)
                spent = time.process_time() - cpu, time.thread_time() - thread
                (loops if kind == "loop" else bares).append((wall, *spent))
        tracker_s = (loop.tracker.cpu_s - cpu_s) / (num_pairs * num_steps)
        loop.sink.close()
    a, b = np.array(loops) / num_steps, np.array(bares) / num_steps
    pairs = Pairs(ours_s=a[:, 0], ours_cpu_s=a[:, 1], theirs_s=b[:, 0], theirs_cpu_s=b[:, 1])
    thread_s = float(np.median(a[:, 2]) - np.median(b[:, 2]))
    return pairs, {"tracker_cpu_per_step_s": tracker_s, "loop_thread_cpu_per_step_s": thread_s}


def _no_checkpoint(step: int, program: Any, position: Any) -> CheckpointInfo:
    raise AssertionError("nothing is saved here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of a stretch")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of stretches")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    pairs, extra = measure(args.pairs, args.steps)
    low, high = pairs.interval()
    step_s, bare_step_s = float(np.median(pairs.ours_s)), float(np.median(pairs.theirs_s))
    rows = [
        ["step in the loop, ms", f"{1e3 * step_s:.1f}"],
        ["bare step, ms", f"{1e3 * bare_step_s:.1f}"],
        ["overhead, median of the pairs", f"{100 * (pairs.ratio - 1):.1f} %"],
        ["its 95 % interval", f"{100 * (low - 1):.1f} to {100 * (high - 1):.1f} %"],
        ["overhead in processor time", f"{100 * (pairs.cpu_ratio - 1):.1f} %"],
        ["processor time the loop's thread adds, ms per step", f"{1e3 * extra['loop_thread_cpu_per_step_s']:.2f}"],
        ["processor time of the tracker's thread, ms per step", f"{1e3 * extra['tracker_cpu_per_step_s']:.2f}"],
        ["limit", f"{100 * LIMIT:.0f} %: {'within' if pairs.ratio - 1 < LIMIT else 'MISSED'}"],
    ]
    lines = [
        (
            f"`Trainer` with data, event log and MLflow (SQLite) against bare `program.step` calls; {args.pairs} "
            f"interleaved pairs of {args.steps} steps of one device's program, global batch {TASK.global_batch}."
        ),
        "",
        *table(["", ""], rows),
    ]
    if args.write:
        data = {"limit": LIMIT, "steps_per_stretch": args.steps, "pairs": pairs.to_json(), **extra}
        write("loop_overhead", title="What the loop adds to a step", lines=lines, data=data)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
