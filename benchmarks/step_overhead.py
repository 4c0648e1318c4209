"""A compiled plan's step against the same step written by hand, as interleaved pairs in one process.

Both train the same GPT with AdamW behind clipping by the global norm, donate what can be donated,
take the same numpy batches, and are held to the same losses before they are timed. Every timed call
waits for its whole result, so that dispatch which a training loop would hide counts too.

    python -m benchmarks.step_overhead [--only PATTERN] [--pairs 60]

Comparisons that ``--only`` leaves out keep what the result file says of them.
"""

import argparse
import fnmatch
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from arena_jax.grid import AXES
from benchmarks._dispatch import interleaved, taken_apart
from benchmarks._handwritten import Jitted, OneFOneB, Permuted, Task
from benchmarks._ours import Meshes, Ours
from benchmarks._pairs import Pairs, interleave
from benchmarks._report import RESULTS, table, write
from models.gpt import Config

NAME = "step_overhead"

# A step of at least 100 ms on two cores of a server, and one of a few ms.
LONG = Task(
    config=Config(vocabulary=256, sequence_length=64, hidden=128, num_layers=4, num_heads=4, tie_embeddings=False),
    global_batch=32,
)
SHORT = Task(config=replace(LONG.config, sequence_length=16, hidden=32, num_layers=2), global_batch=16)

NUM_CHECKED_STEPS = 5
TOLERANCE = 1e-4  # of a float32 loss after some steps


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ours and theirs on one layout.

    Attributes:
        theirs: makes the step written by hand, given ours.
        limit: what the median ratio may be at most. Of the comparisons of one ``group`` only the one
            whose hand-written step is the fastest is held to it.
    """

    name: str
    group: str
    against: str
    task: Task
    meshes: Meshes
    theirs: Callable[[Task, Ours], Any]
    limit: float


def comparisons() -> list[Comparison]:
    microbatched, stages = replace(LONG, num_microbatches=4), ((1, 1), (1, 1))
    found = [
        Comparison(
            name=name, group=name, against="one jax.jit", task=task, meshes=((dp, tp),), theirs=by_jit, limit=1.02
        )
        for name, task, dp, tp in (
            ("one device", LONG, 1, 1),
            ("one device, 4 microbatches", microbatched, 1, 1),
            ("dp2", LONG, 2, 1),
            ("tp2", LONG, 1, 2),
        )
    ]
    found.append(
        Comparison(
            name="two stages, 1F1B",
            group="1F1B",
            against="1F1B by jit and device_put",
            task=microbatched,
            meshes=stages,
            theirs=by_hand,
            limit=1.03,
        )
    )
    for remat, unroll, skip in product((False, True), repeat=3):
        found.append(
            Comparison(
                name=f"two stages, ppermute{', remat' * remat}{', unrolled' * unroll}{', idle skipped' * skip}",
                group="ppermute",
                against="shard_map and ppermute",
                task=microbatched,
                meshes=stages,
                theirs=permuted(remat=remat, unroll=unroll, skip=skip),
                limit=1.05,
            )
        )
    return found


def by_jit(task: Task, ours: Ours) -> Jitted:
    """With the plan's own parameter shardings."""
    stage = ours.program.plan.stages[0]
    devices = np.array(jax.devices()[: stage.dp * stage.tp]).reshape(stage.dp, stage.tp)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Jitted(task, mesh, {name: P(*spec) for name, spec in stage.parameters.items()})


def by_hand(task: Task, ours: Ours) -> OneFOneB:
    return OneFOneB(task, jax.devices())


def permuted(**switches: bool) -> Callable[[Task, Ours], Permuted]:
    return lambda task, ours: Permuted(task, jax.devices(), **switches)


def compare(case: Comparison, num_pairs: int) -> Pairs:
    ours = Ours(case.task, case.meshes)
    return time_both(case.task, ours, case.theirs(case.task, ours), num_pairs)


def time_both(task: Task, ours: Ours, theirs: Any, num_pairs: int) -> Pairs:
    check_equal(task, ours, theirs)
    batch = task.batch(0)
    return interleave(lambda: finish(ours, batch), lambda: finish(theirs, batch), num_pairs=num_pairs)


def finish(stepper: Any, batch: Any) -> None:
    loss = stepper.step(batch)
    jax.block_until_ready((loss, stepper.state))


def check_equal(task: Task, ours: Ours, theirs: Any) -> None:
    """Raise unless both have the same losses over some steps, every one of which uses all updates before it."""
    for seed in range(NUM_CHECKED_STEPS):
        batch = task.batch(seed)
        a, b = float(ours.step(batch)), float(theirs.step(batch))
        if abs(a - b) > TOLERANCE * abs(b):
            raise AssertionError(f"step {seed + 1}: our loss is {a}, by hand it is {b}")


def dispatch_costs(num_steps: int) -> list[dict[str, Any]]:
    """Host time of a short step by number of programs, ours and by hand."""
    rows = []
    for name, meshes, make in (("one stage", ((1, 1),), by_jit), ("two stages", ((1, 1), (1, 1)), by_hand)):
        for count in (1, 4, 8):
            task = replace(SHORT, num_microbatches=count)
            ours = Ours(task, meshes)
            theirs: Any = make(task, ours)
            check_equal(task, ours, theirs)
            times = interleaved(ours, theirs, task.batch(0), num_steps)
            host_s, step_s = ({who: float(np.median(t[:, i])) for who, t in times.items()} for i in (0, 1))
            rows.append(
                {
                    "plan": name,
                    "num_microbatches": count,
                    "step_s": step_s,
                    "step_ratio": float(np.median(times["ours"][:, 1] / times["by_hand"][:, 1])),
                    "host_s": host_s,
                    "host_ratio": float(np.median(times["ours"][:, 0] / times["by_hand"][:, 0])),
                    "num_programs_by_hand": theirs.num_programs,
                    **taken_apart(ours, task.batch(0), num_steps),
                }
            )
    return rows


# The report.


def report(results: dict[str, Any]) -> list[str]:
    measured = [(case, results["pairs"][case.name]) for case in comparisons() if case.name in results["pairs"]]
    best: dict[str, float] = {}
    for case, found in measured:
        best[case.group] = min(best.get(case.group, np.inf), found["theirs_median_s"])
    rows = []
    for case, found in measured:
        held = found["theirs_median_s"] == best[case.group]
        low, high = found["ratio_interval_95"]
        rows.append(
            [
                case.name,
                case.against,
                f"{found['ratio']:.3f}",
                f"{low:.3f} - {high:.3f}",
                f"{found['cpu_time_ratio']:.3f}",
                f"{1e3 * found['ours_median_s']:.0f}",
                f"{1e3 * found['theirs_median_s']:.0f}",
                found["num_pairs"],
                f"<= {case.limit}" if held else "",
                ("yes" if found["ratio"] <= case.limit else "NO") if held else "",
            ]
        )
    head = ["plan", "against", "ratio", "95 %", "cpu ratio", "ours ms", "theirs ms", "pairs", "limit", "within"]
    lines = [
        (
            f"GPT of {LONG.config.num_layers} layers, width {LONG.config.hidden}, sequence "
            f"{LONG.config.sequence_length}, global batch {LONG.global_batch}; two CPU devices; pipelines with 4 "
            "microbatches. Ratio: median over interleaved pairs of our wall time over theirs, with its bootstrap "
            "interval; cpu ratio: the same of processor time, which other processes disturb less. Of the ppermute "
            "pipelines the fastest is held to the limit."
        ),
        "",
        *table(head, rows),
    ]
    if results.get("dispatch"):
        lines += ["", "## Dispatch at a short step", "", *_dispatch_lines(results["dispatch"])]
    return lines


def _dispatch_lines(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            f"{row['plan']}, {row['num_microbatches']}",
            *(f"{1e3 * row['step_s'][who]:.1f}" for who in ("ours", "by_hand")),
            f"{row['step_ratio']:.2f}",
            *(f"{1e3 * row['host_s'][who]:.1f}" for who in ("ours", "by_hand")),
            f"{row['host_ratio']:.2f}",
            f"{row['num_programs']:.0f} ({row['num_programs_by_hand']})",
            f"{1e6 * row['host_s']['ours'] / row['num_programs']:.0f}",
            f"{1e6 * row['python_per_program_s']:.0f}",
            f"{1e6 * row['call_per_program_s']:.0f}",
            f"{row['num_transfers']:.0f}",
            f"{1e6 * row['per_transfer_s']:.0f}",
        ]
        for row in rows
    ]
    head = ["plan, microbatches", "step ms", "by hand", "ratio", "host ms", "by hand", "ratio", "programs (by hand)",
            "host us/program", "our Python us/program", "in calls us/program", "transfers", "us each"]  # fmt: skip
    return [
        (
            f"GPT of {SHORT.config.num_layers} layers, width {SHORT.config.hidden}, global batch "
            f"{SHORT.global_batch}. Host: from calling `step` with idle devices until it returns. Programs: compiled "
            "programs issued per step. On CPU jax runs small programs inside the call that issues them, so the time "
            "in calls, and with it host time, holds their computation; our Python is what remains of host time "
            "outside program calls and transfers."
        ),
        "",
        *table(head, cells),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern over the names of the comparisons, and 'dispatch'")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    file = RESULTS / f"{NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"pairs": {}}
    for case in comparisons():
        if fnmatch.fnmatch(case.name, args.only):
            pairs = compare(case, args.pairs)
            results["pairs"][case.name] = pairs.to_json()
            print(f"{case.name}: {pairs.ratio:.3f}, cpu {pairs.cpu_ratio:.3f}", flush=True)
    if fnmatch.fnmatch("dispatch", args.only):
        results["dispatch"] = dispatch_costs(args.pairs)
    if args.write:
        write(NAME, title="A step against the same step by hand", lines=report(results), data=results)
    else:
        print("\n".join(report(results)))


if __name__ == "__main__":
    main()
