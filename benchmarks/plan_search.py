"""How fast the plan search is, and what its shortcuts cost.

Three tables: the search of all grids of one 16-device allocation and of five device types, cold and from
the store; shardings with repeated layers tied against untied ones, without and with a memory cap; and the
search at few numbers of stages (1, and from as many as nodes to twice that) against all of them.
How the engines compare is `benchmarks.engine_agreement`.

    python -m benchmarks.plan_search [--recipe gpt_1_3b]...
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from arena_jax.compiler import Analysis, Problem, analyse
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.engines import engine
from arena_jax.compiler.intra_op.prices import prices_of
from arena_jax.compiler.intra_op.sharding import RELATIVE_GAP, TiedSpace
from arena_jax.compiler.search import plan_problem
from arena_jax.compiler.stored import StoredSearch
from arena_jax.grid import Allocation, GridShape, PlanIndex, PlanStore, Submesh
from arena_jax.job import build
from arena_jax.recipe import load_recipe
from benchmarks._report import table, write

NAME = "plan_search"
RECIPES = ("gpt_1_3b", "gpt_2_6b", "gpt_6_7b", "bert_1_3b", "bert_2_6b", "bert_6_7b", "moe_10b", "wide_resnet_2b")
ONE = Allocation.parse("a100:2x8")
TYPES = ("a100", "h100", "v100", "l20", "l40s")
MANY = tuple(Allocation.parse(f"{t}:{n}") for t in TYPES for n in ("1", "2", "4", "8", "2x8"))
MESHES = ((1, 8), (2, 4), (4, 2))
LIMIT_ONE_S, LIMIT_MANY_S, LIMIT_WARM_S, LIMIT_LOSS = 20.0, 90.0, 1.0, 0.01


def problem_of(recipe: str) -> Problem:
    job = build(load_recipe(recipe, []))
    return job.problem()


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, wall seconds, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def search_times(recipe: str) -> dict[str, Any]:
    """The whole way, tracing included: cold, from the store, and for five device types."""
    found: dict[str, Any] = {"recipe": recipe}
    with tempfile.TemporaryDirectory() as folder:
        store = PlanStore(Path(folder) / "plans.sqlite")
        for name in ("cold", "warm"):
            _, wall, cpu = timed(lambda: StoredSearch(problem_of(recipe), store).plan([ONE]))
            found |= {f"{name}_s": wall, f"{name}_cpu_s": cpu}
    _, wall, cpu = timed(lambda: plan_problem(problem_of(recipe), MANY))
    return found | {"many_s": wall, "many_cpu_s": cpu}


def best_s(index: PlanIndex) -> float:
    return min((row.step_time_s for row in index if row.step_time_s is not None), default=float("inf"))


def pruned(recipe: str, problem: Problem) -> dict[str, Any]:
    """Few numbers of stages against all, each with an analysis of its own."""
    few = [GridShape(ONE, s) for s in (1, *range(ONE.num_nodes, 2 * ONE.num_nodes + 1))]
    every, all_s, all_cpu = timed(lambda: plan_problem(problem, [ONE], analysis=analyse(problem)))
    some, few_s, few_cpu = timed(lambda: plan_problem(problem, few, analysis=analyse(problem)))
    _one, one_s, one_cpu = timed(lambda: plan_problem(problem, few[1:2], analysis=analyse(problem)))
    return {
        "recipe": recipe,
        "all_s": all_s,
        "few_s": few_s,
        "one_s": one_s,
        "ratio": all_cpu / few_cpu,
        "ratio_one": all_cpu / one_cpu,
        "loss": best_s(some) / best_s(every) - 1,
    }


def tied(recipe: str, analysis: Analysis) -> list[dict[str, Any]]:
    """The same integer programs with and without tying repeated layers."""
    rows = []
    solver = engine("highs")
    for dp, tp in MESHES:
        ratios = analysis.ratios
        hardware = hardware_of(Allocation.parse("a100:8"))
        prices = prices_of(hardware, Submesh(1, 8), dp, tp, update_ratio=ratios.update, parameter_memory=ratios.held)
        spaces = {name: analysis.shardings.space(dp, tp) for name in ("tied",)}
        spaces["untied"] = TiedSpace(spaces["tied"].strategies, len(analysis.graph.nodes), tie=False)
        free = solver.solve_strategies(spaces["tied"].problem(prices))
        assert free is not None
        least = sum(float(memory.min()) for memory in spaces["tied"].problem(prices).memory)
        for cap_name, cap in (("none", None), ("binding", least + 0.25 * (free.memory_bytes - least))):
            row: dict[str, Any] = {"recipe": recipe, "mesh": f"{dp}x{tp}", "cap": cap_name}
            for name, space in spaces.items():
                problem = space.problem(prices, cap)
                solution, wall, _ = timed(
                    lambda problem=problem: solver.solve_strategies(
                        problem, time_limit_s=30.0, relative_gap=RELATIVE_GAP
                    )
                )
                row |= {
                    f"{name}_s": wall,
                    f"{name}_nodes": problem.num_nodes,
                    f"{name}_objective": solution.objective if solution else None,
                    f"{name}_gap": solution.gap if solution else None,
                }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    recipes = args.recipe or RECIPES
    times, ties, prunes = [], [], []
    for recipe in recipes:
        times.append(search_times(recipe))
        problem = problem_of(recipe)
        ties += tied(recipe, analyse(problem))
        prunes.append(pruned(recipe, problem))
        print(times[-1], prunes[-1], flush=True)
    report(times, ties, prunes)


def report(times: list[dict[str, Any]], ties: list[dict[str, Any]], prunes: list[dict[str, Any]]) -> None:
    losses = [
        r["tied_objective"] / r["untied_objective"] - 1 for r in ties if r["tied_objective"] and r["untied_objective"]
    ]
    lines = [
        f"Seconds, tracing included; limits {LIMIT_ONE_S:g} s, {LIMIT_WARM_S:g} s and {LIMIT_MANY_S:g} s of wall time.",
        "",
        *table(
            ["recipe", f"{ONE}", "(cpu)", "again", "5 types x 5 sizes", "(cpu)"],
            [
                [r["recipe"], *(f"{r[k]:.1f}" for k in ("cold_s", "cold_cpu_s", "warm_s", "many_s", "many_cpu_s"))]
                for r in times
            ],
        ),
        "",
        f"Tied against untied: worst loss {max(losses):.2%}, at a gap of {RELATIVE_GAP:g}.",
        "",
        *table(
            ["recipe", "mesh", "memory cap", "nodes", "untied", "tied s", "untied s", "tied / untied objective"],
            [
                [
                    r["recipe"],
                    r["mesh"],
                    r["cap"],
                    r["tied_nodes"],
                    r["untied_nodes"],
                    f"{r['tied_s']:.2f}",
                    f"{r['untied_s']:.2f}",
                    f"{r['tied_objective'] / r['untied_objective']:.5f}"
                    if r["tied_objective"] and r["untied_objective"]
                    else "-",
                ]
                for r in ties
            ],
        ),
        "",
        (
            f"Few numbers of stages against all on {ONE}: worst loss {max(r['loss'] for r in prunes):.2%}"
            f" (limit {LIMIT_LOSS:.0%}); ratios of processor time."
        ),
        "",
        *table(
            ["recipe", "all / few", "all / one grid", "loss of few"],
            [[r["recipe"], f"{r['ratio']:.1f}", f"{r['ratio_one']:.1f}", f"{r['loss']:.2%}"] for r in prunes],
        ),
        "",
        f"Median ratio {np.median([r['ratio'] for r in prunes]):.1f}.",
    ]
    write(NAME, title="The plan search", lines=lines, data={"times": times, "tied": ties, "pruned": prunes})


if __name__ == "__main__":
    main()
