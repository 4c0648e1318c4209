"""Our engine against the real alpa, on the same integer programs and the same cuts into stages.

Strategy problems are those of the search: the recipes' models on several meshes, layers tied, at nominal
prices, without a memory cap and with one half-way and a tenth of the way between the least memory and what the
fastest sharding takes. Both engines solve to optimality. Stage problems have random times that grow with layers
and shrink with devices, from a fixed seed. Each is solved ``--repeats`` times by each engine, turn and turn about;
times are medians, and Alpa's include the pipe to its process, which has been warmed up.

    python -m benchmarks.engine_agreement [--repeats 3] [--limit-s 60]
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from arena_jax.compiler import analyse
from arena_jax.compiler.engines import StageProblem, StrategyProblem, cuts, highs
from arena_jax.compiler.engines import alpa as alpa_engine
from arena_jax.compiler.engines.alpa_process import alpa_process
from arena_jax.compiler.intra_op.prices import nominal_prices
from arena_jax.errors import ArenaError
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from benchmarks._report import table, write

RECIPES = ("gpt_1_3b", "bert_1_3b", "moe_690m", "wide_resnet_500m")
MESHES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2))
CAPS = (None, 0.5, 0.1)


def strategy_problems(recipe: str) -> Iterator[tuple[str, StrategyProblem]]:
    job = build(load_recipe(recipe, ()))
    analysis = analyse(job.problem())
    for dp, tp in MESHES:
        space = analysis.shardings.space(dp, tp)
        free = space.problem(nominal_prices())
        fastest = highs.solve_strategies(free)
        assert fastest is not None
        least = sum(float(memory.min()) for memory in free.memory)
        for share in CAPS:
            cap = None if share is None else least + share * (fastest.memory_bytes - least)
            yield f"{recipe} {dp}x{tp} cap {share}", space.problem(nominal_prices(), cap)


def stage_problems() -> Iterator[tuple[str, StageProblem]]:
    rng = np.random.default_rng(0)
    for num_layers, num_stages, total in ((8, 2, 8), (8, 4, 16), (16, 2, 16), (16, 4, 16), (16, 8, 16), (32, 8, 64)):
        sizes = tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= total - num_stages + 1)
        layers = np.cumsum(np.concatenate([[0.0], 1e-3 * (0.5 + rng.random(num_layers))]))
        runs = layers[None, 1:] - layers[:-1, None]
        noise = 1 + 0.2 * rng.random((num_stages, len(sizes), num_layers, num_layers))
        seconds = runs / np.array(sizes)[None, :, None, None] ** 0.9 * noise
        seconds[..., np.tri(num_layers, k=-1, dtype=bool)] = np.inf
        yield (
            f"{num_layers} layers, {num_stages} stages, {total} devices",
            StageProblem(
                num_microbatches=16,
                seconds=np.maximum.accumulate(seconds, axis=0),
                boundary_s=1e-5 * rng.random(num_layers),
                sizes=sizes,
                total=total,
            ),
        )


def compare(name: str, ours, theirs, repeats: int) -> dict[str, object]:
    row: dict[str, object] = {"problem": name}
    times: dict[str, list[float]] = {"highs": [], "alpa": []}
    for _ in range(repeats):
        for key, solve in (("highs", ours), ("alpa", theirs)):
            started = time.perf_counter()
            try:
                found = solve()
            except ArenaError as error:
                return row | {"failed": error.message}
            times[key].append(time.perf_counter() - started)
            row[key] = None if found is None else found.objective
    row |= {f"{key}_s": statistics.median(values) for key, values in times.items()}
    if row["highs"] is None or row["alpa"] is None:
        row["apart"] = 0.0 if row["highs"] == row["alpa"] else float("inf")
    else:
        row["apart"] = abs(row["highs"] - row["alpa"]) / abs(row["highs"])
    return row


def summary(rows: list[dict[str, object]]) -> list[object]:
    done = [row for row in rows if "apart" in row]
    ratios = [row["alpa_s"] / row["highs_s"] for row in done]
    return [
        len(rows),
        len(rows) - len(done),
        f"{max(row['apart'] for row in done):.1e}",
        f"{1e3 * statistics.median(row['highs_s'] for row in done):.1f}",
        f"{1e3 * max(row['highs_s'] for row in done):.0f}",
        f"{1e3 * statistics.median(row['alpa_s'] for row in done):.1f}",
        f"{1e3 * max(row['alpa_s'] for row in done):.0f}",
        f"{statistics.median(ratios):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=60.0, help="give Alpa's solve at most so long")
    args = parser.parse_args()
    worker = alpa_process()
    stages = []
    for name, problem in stage_problems():
        if not stages:
            alpa_engine.best_stages(worker, problem)
        stages.append(
            compare(
                name,
                lambda p=problem: cuts.best_stages(p),
                lambda p=problem: alpa_engine.best_stages(worker, p),
                args.repeats,
            )
        )
        print(stages[-1], flush=True)
    strategies = []
    for recipe in RECIPES:
        for name, problem in strategy_problems(recipe):
            strategies.append(
                compare(
                    name,
                    lambda p=problem: highs.solve_strategies(p),
                    lambda p=problem: alpa_engine.solve_strategies(worker, p, time_limit_s=args.limit_s),
                    args.repeats,
                )
            )
            print(strategies[-1], flush=True)
    head = [
        "level",
        "problems",
        "alpa failed",
        "apart at most",
        "highs ms",
        "worst",
        "alpa ms",
        "worst",
        "alpa / highs",
    ]
    kinds = {"strategies, no cap": [r for r in strategies if str(r["problem"]).endswith("None")]}
    kinds["strategies, capped"] = [r for r in strategies if r not in kinds["strategies, no cap"]]
    kinds["stages"] = stages
    lines = table(head, [[kind, *summary(rows)] for kind, rows in kinds.items()])
    write(
        "engine_agreement",
        title="Our engine against the real alpa",
        lines=[
            *lines,
            "",
            "Times are medians over problems, `worst` the slowest; `apart` is relative, in the objective.",
        ],
        data={"repeats": args.repeats, "strategies": strategies, "stages": stages},
    )


if __name__ == "__main__":
    main()
