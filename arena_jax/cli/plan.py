"""``arena-jax plan``: every grid of some allocations, planned; ``plan ls``: what is planned already."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arena_jax import home
from arena_jax.cli import console
from arena_jax.cli.plan_ls import command as ls_command
from arena_jax.errors import EXIT_INFEASIBLE, InfeasibleError, counted
from arena_jax.grid import Allocation, GridShape, IndexRow, PlanIndex

if TYPE_CHECKING:
    from arena_jax.compiler import Constraints
    from arena_jax.compiler.stored import StoredSearch
    from arena_jax.job import Job
    from arena_jax.recipe import Recipe


class PlanCommand(click.Command):
    """``plan RECIPE``, except that ``plan ls`` is a verb of its own (a recipe of that name is ``./ls``)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["ls"]:
            return ls_command.make_context(f"{info_name} ls", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=PlanCommand,
    short_help="Plan a recipe on every grid of some allocations.",
    epilog="`arena-jax plan ls [RECIPE]` shows what is planned already.",
)
@console.recipe_arguments
@click.option(
    "--on", "specs", multiple=True, metavar="SPEC", help="Allocation (a100:2x8) or grid (a100:2x8/s2); may be repeated."
)
@click.option(
    "--stages", multiple=True, type=click.IntRange(min=1), help="Only this number of stages; may be repeated."
)
@click.option("--engine", type=click.Choice(["highs", "alpa", "both"]), help="Solver; this release has highs.")
@click.option("--save", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write a plan file per grid.")
@console.json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    specs: tuple[str, ...],
    stages: tuple[int, ...],
    engine: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Find the best plan of RECIPE on every grid of some allocations, on hardware that need not be here.

    Without --on, the recipe's plan.grid is planned, or its cpu_devices. Plans are kept, and the next
    call with the same recipe and options finds them. Exit code 3 when nothing fits anywhere.
    """
    from arena_jax.recipe import load_recipe

    if engine is not None:
        overrides = (*overrides, f"plan.engine={engine}")
    loaded = load_recipe(recipe, overrides)
    targets = targets_of(loaded, specs, stages)
    start_jax()
    from arena_jax.cli.plan_report import report_of, table_lines
    from arena_jax.job import build

    job = build(loaded)
    search, constraints = _search(job)
    index = search.plan(targets, constraints=constraints, num_microbatches=loaded.plan.num_microbatches)
    report = report_of(job, search.problem, index)
    for line in table_lines(report, job.items_per_batch[1]):
        console.data(line)
    console.note(_how(index))
    if folder is not None:
        save_plans(folder, job.name, index)
    if not report["best"]:
        error = _nothing_fits(search, index, constraints, loaded.plan.num_microbatches)
        console.error(str(error))
        report["error"] = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    if as_json:
        console.emit_json(report)
    ctx.exit(0 if report["best"] else EXIT_INFEASIBLE)


def targets_of(recipe: "Recipe", specs: Sequence[str], stages: Sequence[int]) -> list[Allocation | GridShape]:
    """The allocations and grids to plan; ``stages`` narrows allocations, a grid says its own number."""
    texts = list(specs) or [recipe.plan.grid or f"cpu:{recipe.cpu_devices}"]
    counts = list(stages) or ([recipe.plan.stages] if recipe.plan.stages is not None else [])
    targets: dict[Allocation | GridShape, None] = {}
    for text in texts:
        if "/" in text:
            targets[GridShape.parse(text)] = None
            continue
        allocation = Allocation.parse(text)
        if not counts:
            targets[allocation] = None
        targets.update({GridShape(allocation, count): None for count in counts})
    return list(targets)


def start_jax() -> None:
    """Plan on the CPU whatever there is: planning needs no accelerator and should not take its memory."""
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        with suppress(RuntimeError):  # jax is running already
            jax.config.update("jax_platforms", "cpu")


def save_plans(folder: Path, name: str, index: PlanIndex) -> None:
    """Write ``NAME-TYPE-NxD-sS.json`` for every grid that has a plan, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in index:
        if row.plan is None:
            continue
        allocation = row.grid.allocation
        shape = f"{allocation.num_nodes}x{allocation.devices_per_node}-s{row.grid.num_stages}"
        path = folder / f"{name}-{allocation.device_type}-{shape}.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(row.plan.dumps(), encoding="utf-8")
        temporary.replace(path)
        console.note(f"wrote {path}")


def _search(job: "Job") -> "tuple[StoredSearch, Constraints]":
    from arena_jax.compiler import make_problem
    from arena_jax.compiler.stored import StoredSearch
    from arena_jax.planner import constraints_of, plan_store

    problem = make_problem(
        job.make_model, job.optimizer, job.loss_fn, job.example_batch, precision=job.precision, seed=job.seed
    )
    # The targets say the numbers of stages.
    constraints = replace(constraints_of(job.recipe.plan), stages=None)
    return StoredSearch(problem, plan_store(), name=job.name), constraints


def _how(index: PlanIndex) -> str:
    solved = index.num_programs_solved
    how = f"{counted(solved, 'program')} solved" if solved else f"all from {home.plan_index()}"
    return f"{counted(len(index), 'grid')} in {index.search_s:.1f} s, {how}"


def _nothing_fits(
    search: "StoredSearch", index: PlanIndex, constraints: "Constraints", num_microbatches: int | None
) -> InfeasibleError:
    """Say which grid comes closest, by how much it misses, and what would fit."""
    from arena_jax.compiler.cost import hardware_of
    from arena_jax.compiler.suggest import nearest_fits
    from arena_jax.planner import remedy

    def misses(row: IndexRow) -> int:
        assert row.least_memory_bytes is not None
        return row.least_memory_bytes - hardware_of(row.grid.allocation).usable_bytes

    short = [row for row in index if row.least_memory_bytes is not None]
    row = min(short, key=misses) if short else next(iter(index))
    console.note("looking for what would fit")
    fits = nearest_fits(
        search,
        row.grid.allocation,
        constraints=constraints,
        num_microbatches=num_microbatches,
        grow=bool(short),
    )
    if not short:
        hint = f"it fits with {fits[0]}" if fits else remedy(index)
        return InfeasibleError(f"no plan fits; {row.grid}: {row.reason}", hint=hint)
    return InfeasibleError(
        f"no plan fits; {row.grid} comes closest and misses {misses(row):,} bytes a device",
        hint=f"it fits with {' or '.join(fits)}" if fits else "use a type with more memory, or a smaller model",
    )
