"""Best plans of GPT 1.3B and BERT 2.6B as XLA's CUDA and TPU compilers build them, against the estimates.

Needs the extras ``[cuda-aot]`` and ``[tpu-aot]``, and no accelerator. Layers run as one scan, so that a
stage's programs compile in seconds whatever its depth; the plans are those of the same search.

    python -m benchmarks.deviceless [--only NAME]... [--cache DIR] [--report-only]

Cases are kept one by one and taken up again; delete the cache after a change of the model.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from arena_jax.compiler import Constraints
from arena_jax.compiler.analysis import Analysis, analyse
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.inter_op.grid_search import plan_grid
from arena_jax.compiler.search import UNLIMITED_BYTES, plan_problem
from arena_jax.deviceless.client import CompiledPlan, compile_plans
from arena_jax.deviceless.correction import Corrected, correct, moved_bytes
from arena_jax.deviceless.extras import what_is_wrong
from arena_jax.errors import ArenaError
from arena_jax.grid import CATALOGUE, Allocation, GridShape, IndexRow
from arena_jax.job import build
from arena_jax.planner import constraints_of
from arena_jax.recipe import load_recipe
from benchmarks._report import table, write

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("gpt_1_3b", "bert_2_6b")
TYPES = ("a100-80", "h100-sxm", "v100-32", "tpu-v5e")
DEVICES = (8, 16)


def overrides_of(device_type: str) -> list[str]:
    """TPUs have no float16; the pins of the paper's artifact (remat on, no ZeRO) are of GPUs of 40 GB."""
    free = ["model.scan_layers=true", "plan.remat=search", "plan.zero=search"]
    return [*free, "precision.compute=bfloat16"] if CATALOGUE[device_type].platform == "tpu" else free


def allocation_of(device_type: str, num_devices: int) -> Allocation:
    per_node = min(num_devices, 8, CATALOGUE[device_type].devices_per_node)
    return Allocation(device_type, num_devices // per_node, per_node)


def sent_bytes(by_kind: Mapping[str, float]) -> float:
    """Bytes that a device sends, up to (n - 1) / n: an all-reduce is a scatter and a gather of as many, and XLA
    makes one of the other where it likes."""
    return sum(num_bytes * (2 if kind == "all_reduce" else 1) for kind, num_bytes in by_kind.items())


def built_bytes(compiled: CompiledPlan) -> list[float]:
    """Bytes that a step's collectives send, stage by stage."""
    return [sent_bytes(moved_bytes(stage, compiled.plan.num_microbatches)) for stage in compiled.stages]


def off(estimated: float, compiled: float) -> float:
    """Relative error; two zeros agree."""
    return 0.0 if estimated == compiled == 0 else estimated / max(compiled, 1.0) - 1


def facts_of(recipe: str, row: IndexRow, compiled: CompiledPlan, corrected: Corrected) -> dict[str, Any]:
    estimate = row.estimate
    assert estimate is not None
    planned = [sent_bytes(stage.collective_bytes) for stage in estimate.stages]
    # A program that the compiler refuses has no collectives.
    refused = any(stage.message for stage in compiled.stages)
    built = built_bytes(compiled)
    memory = [
        max(stage.memory_bytes, estimate.device_memory_bytes + stage.missing_bytes if stage.message else 0)
        for stage in compiled.stages
    ]
    fresh = [program for program in compiled.programs if not program.known]
    return {
        "recipe": recipe,
        "grid": str(row.grid),
        "meshes": " ".join(f"{s.dp}x{s.tp}" + "r" * s.remat + f"z{s.zero}" for s in compiled.plan.stages),
        "num_microbatches": row.num_microbatches,
        "memory_bytes": memory,
        "estimated_memory_bytes": [stage.memory_bytes for stage in estimate.stages],
        "peak_off": off(estimate.memory_bytes, max(memory)),
        "collective_bytes": built,
        "planned_collective_bytes": planned,
        "by_kind": [
            {"planned": dict(s.collective_bytes), "built": moved_bytes(c, compiled.plan.num_microbatches)}
            for s, c in zip(estimate.stages, compiled.stages, strict=True)
        ],
        "collectives_off": None if refused else off(sum(planned), sum(built)),
        "missing_bytes": corrected.missing_bytes,
        "step_time_s": None if corrected.row.estimate is None else corrected.row.estimate.step_time_s,
        "estimated_step_time_s": estimate.step_time_s,
        "hidden": corrected.hidden_s / corrected.communication_s if corrected.communication_s else 0.0,
        "programs": len(compiled.programs),
        "compiled": len(fresh),
        "compile_s": sum(program.compile_s for program in fresh),
    }


def analyses(recipe: str, device_type: str) -> tuple[Analysis, Constraints, int | None]:
    return analysis_with(recipe, tuple(overrides_of(device_type)))


@cache
def analysis_with(recipe: str, overrides: tuple[str, ...]) -> tuple[Analysis, Constraints, int | None]:
    loaded = load_recipe(recipe, overrides)
    return analyse(build(loaded).problem()), constraints_of(loaded.plan), loaded.plan.num_microbatches


def measure(recipe: str, device_type: str, num_devices: int) -> dict[str, Any]:
    """Search, compile and compare."""
    analysis, pins, num_microbatches = analyses(recipe, device_type)
    allocation = allocation_of(device_type, num_devices)
    index = plan_problem(
        analysis.problem, [allocation], constraints=pins, num_microbatches=num_microbatches, analysis=analysis
    )
    row = index.best(allocation)
    assert row is not None
    assert row.plan is not None
    started = time.perf_counter()
    (compiled,) = compile_plans(recipe, overrides_of(device_type), [row.plan])
    wall_s = time.perf_counter() - started
    corrected = correct(row, compiled, hardware_of(allocation))
    return facts_of(recipe, row, compiled, corrected) | {"wall_s": wall_s}


def refusal(device_type: str) -> dict[str, Any]:
    """Pure data parallelism of GPT 1.3B on 8 devices, planned as if memory were endless."""
    analysis, _, _ = analyses("gpt_1_3b", device_type)
    grid = GridShape(allocation_of(device_type, 8), 1)
    hardware = hardware_of(grid.allocation)
    endless = replace(hardware, device=replace(hardware.device, memory_bytes=UNLIMITED_BYTES))
    row = plan_grid(analysis, grid, endless, Constraints(stages=1, dp=8, tp=1, zero=0, remat="off"), 2)
    assert row.plan is not None
    (compiled,) = compile_plans("gpt_1_3b", overrides_of(device_type), [row.plan])
    corrected = correct(row, compiled, hardware)
    return {
        "type": device_type,
        "memory_bytes": corrected.memory_bytes,
        "usable_bytes": hardware.usable_bytes,
        "missing_bytes": corrected.missing_bytes,
        "said_by": "the compiler" if compiled.stages[0].message else "comparing",
        "message": compiled.stages[0].message,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this case alone, and report nothing")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/benchmarks/deviceless")
    parser.add_argument("--report-only", action="store_true", help="report what the cache holds")
    args = parser.parse_args()
    cases: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        f"{recipe}-{device_type}-{number}": (device_type, partial(measure, recipe, device_type, number))
        for recipe in RECIPES
        for device_type in TYPES
        for number in DEVICES
    }
    cases |= {f"refused-{name}": (name, partial(refusal, name)) for name in ("v100-32", "tpu-v5e")}
    args.cache.mkdir(parents=True, exist_ok=True)
    for name in args.only or cases:
        path = args.cache / f"{name}.json"
        wrong = what_is_wrong(CATALOGUE[cases[name][0]].platform)
        if wrong:
            print(f"{name} is left out: {wrong}")
        elif not path.exists() and not args.report_only:
            part = path.with_suffix(".part")
            try:
                part.write_text(json.dumps(cases[name][1]()))
            except ArenaError as error:  # the other cases are worth having
                print(f"{name}: {error}", file=sys.stderr)
                continue
            os.replace(part, path)
    known = {name: json.loads(p.read_text()) for name in cases if (p := args.cache / f"{name}.json").exists()}
    if args.only or not known:
        print(json.dumps({name: known[name] for name in args.only or () if name in known}, indent=1))
        return
    found = [facts for name, facts in known.items() if not name.startswith("refused")]
    refused = [facts for name, facts in known.items() if name.startswith("refused")]
    lines = [*_plans(found), *_programs(found), *(_refused(refused) if refused else ())]
    title = "Best plans as XLA's compilers build them, against the estimates"
    write("deviceless", title=title, lines=lines, data={"plans": found, "refused": refused})


def _plans(found: Sequence[dict[str, Any]]) -> list[str]:
    head = ["recipe", "grid", "dp x tp", "micro", "GiB est.", "compiled", "off %", "GB sent est.", "compiled", "off %"]
    rows = []
    for f in found:
        at = max(range(len(f["memory_bytes"])), key=lambda s: f["memory_bytes"][s])
        rows.append(
            [
                f["recipe"],
                f["grid"],
                f["meshes"],
                f["num_microbatches"],
                f"{f['estimated_memory_bytes'][at] / 2**30:.2f}",
                f"{f['memory_bytes'][at] / 2**30:.2f}",
                f"{100 * f['peak_off']:+.1f}",
                f"{sum(f['planned_collective_bytes']) / 1e9:.2f}",
                "-" if f["collectives_off"] is None else f"{sum(f['collective_bytes']) / 1e9:.2f}",
                "-" if f["collectives_off"] is None else f"{100 * f['collectives_off']:+.1f}",
            ]
        )
    return table(head, rows)


def _programs(found: Sequence[dict[str, Any]]) -> list[str]:
    head = ["recipe", "grid", "programs", "compiled", "known", "s each", "wall s", "hidden %", "step est.", "corrected"]
    rows = [
        [
            f["recipe"],
            f["grid"],
            f["programs"],
            f["compiled"],
            f["programs"] - f["compiled"],
            f"{f['compile_s'] / max(f['compiled'], 1):.1f}",
            f"{f['wall_s']:.0f}",
            f"{100 * f['hidden']:.0f}",
            f"{f['estimated_step_time_s']:.3f}",
            "does not fit" if f["step_time_s"] is None else f"{f['step_time_s']:.3f}",
        ]
        for f in found
    ]
    return ["", "## Programs, and what they do to the estimate", "", *table(head, rows)]


def _refused(found: Sequence[dict[str, Any]]) -> list[str]:
    head = ["type", "needs bytes", "usable", "missing", "said by"]
    rows = [
        [f["type"], f"{f['memory_bytes']:,}", f"{f['usable_bytes']:,}", f"{f['missing_bytes']:,}", f["said_by"]]
        for f in found
    ]
    title = "## Refused: GPT 1.3B, dp 8, no ZeRO, no rematerialisation, 2 microbatches"
    return ["", title, "", *table(head, rows)]


if __name__ == "__main__":
    main()
