"""What an exported plan costs: its step, which needs jax alone, against the package's own step.

For each tiny recipe the plan that the search chooses among one-stage plans of an allocation is written as Python
(`Plan.export("jax")`), loaded as a module of its own, and trains the same model on the same batches. The losses
are compared first, then the steps are timed as interleaved pairs in one process; every timed call waits for its
whole result.

    python -m benchmarks.exported_plan [--recipe gpt_tiny]... [--on cpu:2]... [--pairs 20]
"""

import argparse
import importlib.util
import json
import os
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from flax import nnx

from arena_jax.compiler import Constraints, analyse, plan_problem
from arena_jax.grid import Allocation, GridShape, Plan
from arena_jax.job import Job, build
from arena_jax.recipe import load_recipe
from arena_jax.runtime import compile_program
from arena_jax.start import start_jax
from arena_jax.values import Weighted
from benchmarks._pairs import interleave
from benchmarks._report import RESULTS, table, write
from benchmarks.plan_quality import RECIPES

NAME = "exported_plan"
ALLOCATIONS = ("cpu:2", "cpu:8")
LIMIT = 1.02
NUM_CHECKED_STEPS = 3
TOLERANCE = 1e-4  # of a float32 loss after some steps


def loaded(plan: Plan, folder: Path) -> ModuleType:
    """The exported plan as a module."""
    path = folder / "exported.py"
    path.write_text(plan.export("jax"))
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Exported:
    """Training as the head of the exported file says, with Flax NNX."""

    def __init__(self, job: Job, module: ModuleType, *, independent_rows: bool) -> None:
        graphdef, params, state = nnx.split(job.make_model(nnx.Rngs(job.seed)), nnx.Param, ...)

        def loss_fn(params: Any, state: Any, batch: Any) -> Any:
            model = nnx.merge(graphdef, params, state)
            value = job.loss_fn(model, batch)
            loss = value[0] if isinstance(value, tuple) and isinstance(value[1], dict) else value
            loss = (loss.sum, loss.weight) if isinstance(loss, Weighted) else loss
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        mesh = module.make_mesh()
        self.place = lambda batch: module.place_batch(batch, mesh)
        self.params = module.place(params, mesh)
        self.opt_state = module.init_optimizer(job.optimizer, self.params, mesh)
        self.model_state = jax.device_put(state, module.replicated(mesh))
        self.run = module.make_train_step(loss_fn, job.optimizer, mesh, independent_rows=independent_rows)

    def step(self, batch: Any) -> jax.Array:
        self.params, self.opt_state, self.model_state, loss = self.run(
            self.params, self.opt_state, self.model_state, self.place(batch)
        )
        return loss


class Ours:
    """The same under the package's runtime."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.program = compile_program(job.problem(), plan)
        self.state = self.program.init()

    def step(self, batch: Any) -> jax.Array:
        self.state, metrics = self.program.step(self.state, batch)
        return metrics["loss"]


def compare(recipe: str, on: str, num_pairs: int) -> dict[str, Any]:
    job = build(load_recipe(recipe, list(RECIPES[recipe])))
    problem = job.problem()
    analysis = analyse(problem)
    index = plan_problem(problem, [GridShape(Allocation.parse(on), 1)], constraints=Constraints(), analysis=analysis)
    (row,) = index
    assert row.plan is not None, row.reason
    batches = [batch for batch, _ in zip(job.make_data(), range(NUM_CHECKED_STEPS), strict=False)]
    with tempfile.TemporaryDirectory() as folder:
        exported = loaded(row.plan, Path(folder))
        ours = Ours(job, row.plan)
        theirs = Exported(job, exported, independent_rows=analysis.row_shards)
        losses = [(float(ours.step(b)), float(theirs.step(b))) for b in batches]
    worst = max(abs(a - b) / abs(a) for a, b in losses)
    if worst > TOLERANCE:
        raise SystemExit(f"{recipe} on {on}: losses {losses} differ by {worst:.1e}")

    def run(side: Ours | Exported) -> Any:
        return lambda: jax.block_until_ready((side.step(batches[0]), side.__dict__))

    pairs = interleave(run(theirs), run(ours), num_pairs=num_pairs)
    stage = row.plan.stages[0]
    return {
        "recipe": recipe,
        "on": on,
        "plan": f"{stage.dp}x{stage.tp} M{row.plan.num_microbatches} zero{stage.zero}",
        "loss_difference": worst,
        **pairs.to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--on", action="append")
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    start_jax(8)
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    found = {(r["recipe"], r["on"]): r for r in known}
    for recipe in args.recipe or RECIPES:
        for on in args.on or ALLOCATIONS:
            found[recipe, on] = compare(recipe, on, args.pairs)
            report(list(found.values()))


def report(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            r["recipe"],
            r["on"],
            r["plan"],
            f"{r['loss_difference']:.1e}",
            f"{r['theirs_median_s'] * 1e3:.1f}",
            f"{r['ours_median_s'] * 1e3:.1f}",
            f"{r['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*r["ratio_interval_95"]),
            f"{r['cpu_time_ratio']:.3f}",
        ]
        for r in results
    ]
    head = ["recipe", "on", "plan", "losses differ by", "package, ms", "exported, ms", "ratio", "95 %", "cpu ratio"]
    lines = [*table(head, rows), "", f"Ratio: exported over the package's own, median of pairs (limit {LIMIT:g})."]
    write(NAME, title="The step of an exported plan", lines=lines, data={"results": results})


if __name__ == "__main__":
    main()
