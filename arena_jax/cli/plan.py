"""``arena-jax plan``: every grid of some allocations, planned; ``plan ls``: what is planned already."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from arena_jax import home
from arena_jax.cli import console
from arena_jax.cli.plan_ls import command as ls_command
from arena_jax.errors import EXIT_INFEASIBLE, EXIT_INTERRUPTED, InfeasibleError, UsageError, counted, nearest
from arena_jax.grid import CATALOGUE, Allocation, Catalogue, GridShape, IndexRow, PlanIndex, SearchInterrupted
from arena_jax.page.document import check_writable, write_file
from arena_jax.start import start_jax_to_plan

if TYPE_CHECKING:
    from arena_jax.cli.plan_explain import Named
    from arena_jax.compiler import Constraints
    from arena_jax.compiler.by_hand import HandWritten
    from arena_jax.compiler.stored import StoredSearch
    from arena_jax.job import Job
    from arena_jax.recipe import Recipe


# What people write by hand; compiler.by_hand says what each is, and imports jax.
HAND_WRITTEN = ("dp", "fsdp", "tp")
FILE = click.Path(dir_okay=False, path_type=Path)


class Plans(NamedTuple):
    """The plans of one call by name, and among them the best of each allocation."""

    all: "list[Named]"
    best: "list[Named]"


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
    "--cluster", type=FILE, metavar="CLUSTER.toml", help="Types, networks and sizes of nodes, as `simulate` takes them."
)
@click.option(
    "--stages", multiple=True, type=click.IntRange(min=1), help="Only this number of stages; may be repeated."
)
@click.option(
    "--engine", type=click.Choice(["highs", "alpa", "both"]), help="Solver: ours, Alpa's own, or both compared."
)
@click.option("--save", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write a plan file per grid.")
@click.option("--compare", metavar="dp,fsdp,tp", help="Also plans that one would write by hand, one stage each.")
@click.option("--explain", is_flag=True, help="Say where time and memory go, and what bound the best plan.")
@click.option("--against", metavar="OTHER", help="The plan to explain against: a grid, a plan id, or dp, fsdp, tp.")
@click.option("--aot", is_flag=True, help="Compile the best plans for their targets, and correct the estimates.")
@click.option("--report", "page", type=FILE, metavar="F.html", help="Write a self-contained page.")
@click.option("--trace", "trace", type=FILE, metavar="F.json", help="Write the predicted timeline for Perfetto.")
@console.json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    specs: tuple[str, ...],
    cluster: Path | None,
    stages: tuple[int, ...],
    engine: str | None,
    folder: Path | None,
    compare: str | None,
    explain: bool,
    against: str | None,
    aot: bool,
    page: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Find the best plan of RECIPE on every grid of some allocations, on hardware that need not be here.

    Without --on, the recipe's plan.grid is planned, or its cpu_devices. Plans are kept, and the next
    call with the same recipe and options finds them. Exit code 3 when nothing fits anywhere. Ctrl-C
    stops the search and shows the best so far.
    """
    from arena_jax.recipe import load_recipe

    if engine is not None:
        overrides = (*overrides, f"plan.engine={engine}")
    loaded = load_recipe(recipe, overrides)
    catalogue = CATALOGUE if cluster is None else _catalogue_of(cluster)
    targets = targets_of(loaded, specs, stages, catalogue)
    names = _hand_written_names(compare, against)
    for path, what in ((page, "report"), (trace, "trace")):
        if path is not None:
            check_writable(path, what=what)
    start_jax_to_plan()
    from arena_jax.cli.plan_report import engine_lines, report_of, table_lines
    from arena_jax.job import build

    job = build(loaded)
    search, constraints = _search(job, catalogue)
    num_microbatches = loaded.plan.num_microbatches
    interrupted = False
    compared: list[HandWritten] | None = None
    try:
        index = search.plan(targets, constraints=constraints, num_microbatches=num_microbatches)
    except SearchInterrupted as stopped:
        index, interrupted = stopped.index, True
    if names and not interrupted:
        from arena_jax.compiler.by_hand import compare as compare_with

        try:
            compared = compare_with(search, index, names, num_microbatches=num_microbatches, engine=constraints.engine)
        except KeyboardInterrupt:
            interrupted = True
    compiled: list[dict[str, Any]] = []
    if aot and not interrupted:
        from arena_jax.cli.plan_aot import compile_best

        index, compiled = compile_best(recipe, overrides, index, catalogue)
    report = report_of(job, search.problem, index, compared, catalogue)
    unit = job.items_per_batch[1]
    for line in table_lines(report, unit) if report["grids"] else ():
        console.data(line)
    for line in engine_lines(report):
        console.data(line)
    if aot:
        from arena_jax.cli.plan_aot import aot_lines

        report["compiled"] = compiled
        for line in aot_lines(compiled):
            console.data(line)
    console.note(_how(index))
    best = _best(index, compared or [])
    if (explain or against is not None) and not interrupted:
        report["explanations"] = _explain(search, best, against, constraints, num_microbatches, catalogue)
    if folder is not None:
        save_plans(folder, job.name, index)
    _write_files(job, search, report, best, page, trace)
    code = 0
    if interrupted:
        report["interrupted"] = _what_is_missing(index)
        code = EXIT_INTERRUPTED
    elif not report["best"]:
        error = _nothing_fits(search, index, constraints, num_microbatches, catalogue)
        console.error(str(error))
        report["error"] = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        code = EXIT_INFEASIBLE
    if as_json:
        console.emit_json(report)
    ctx.exit(code)


def targets_of(
    recipe: "Recipe", specs: Sequence[str], stages: Sequence[int], catalogue: Catalogue = CATALOGUE
) -> list[Allocation | GridShape]:
    """The allocations and grids to plan; ``stages`` narrows allocations, a grid says its own number."""
    texts = list(specs) or [recipe.plan.grid or f"cpu:{recipe.cpu_devices}"]
    counts = list(stages) or ([recipe.plan.stages] if recipe.plan.stages is not None else [])
    targets: dict[Allocation | GridShape, None] = {}
    for text in texts:
        if "/" in text:
            targets[GridShape.parse(text, catalogue)] = None
            continue
        allocation = Allocation.parse(text, catalogue)
        if not counts:
            targets[allocation] = None
        targets.update({GridShape(allocation, count): None for count in counts})
    return list(targets)


def _catalogue_of(cluster: Path) -> Catalogue:
    from arena_jax.scheduler.cluster import Cluster

    return Cluster.catalogue_of(cluster)


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


def _search(job: "Job", catalogue: Catalogue) -> "tuple[StoredSearch, Constraints]":
    from arena_jax.compiler.stored import StoredSearch
    from arena_jax.planner import constraints_of, plan_store

    problem = job.problem()
    # The targets say the numbers of stages.
    constraints = replace(constraints_of(job.recipe.plan), stages=None)
    return StoredSearch(problem, plan_store(), name=job.name, catalogue=catalogue), constraints


def _hand_written_names(compare: str | None, against: str | None) -> list[str]:
    """The hand-written plans that were asked for, each once, in order."""
    names = [name.strip() for name in (compare or "").split(",") if name.strip()]
    for name in names:
        if name not in HAND_WRITTEN:
            raise UsageError(
                f"--compare: no plan is called {name!r}{nearest(name, HAND_WRITTEN)}",
                hint=f"use some of {','.join(HAND_WRITTEN)}",
            )
    if against in HAND_WRITTEN:
        names.append(against)
    return list(dict.fromkeys(names))


def _best(index: PlanIndex, compared: "Sequence[HandWritten]") -> "Plans":
    from arena_jax.cli.plan_explain import named

    plans = named(index, compared)
    best = [index.best(allocation) for allocation in dict.fromkeys(row.grid.allocation for row in index)]
    return Plans(all=plans, best=[plan for plan in plans[: len(index)] if plan.row in best])


def _explain(
    search: "StoredSearch",
    plans: "Plans",
    against: str | None,
    constraints: "Constraints",
    num_microbatches: int | None,
    catalogue: Catalogue,
) -> list[dict[str, Any]]:
    """Explain the best plan of each allocation; print it, and return what ``--json`` says of it."""
    from arena_jax.cli.plan_explain import explain_lines, explanation, find_other
    from arena_jax.compiler.intra_op.binding import binding_constraints

    explanations = []
    for plan in plans.best:
        other = find_other(against, plan, plans.all, catalogue)
        bindings = binding_constraints(search.analysis, plan.row, constraints, num_microbatches, catalogue)
        explanations.append(explanation(plan, other, bindings))
        console.data()
        for line in explain_lines(explanations[-1]):
            console.data(line)
    return explanations


def _write_files(
    job: "Job", search: "StoredSearch", report: dict[str, Any], plans: "Plans", page: Path | None, trace: Path | None
) -> None:
    if page is not None:
        from arena_jax.cli.plan_page import render

        unit = job.items_per_batch[1]
        write_file(page, render(report, unit, plans.all, search.problem.leaves, plans.best))
        console.note(f"wrote {page}")
    if trace is not None:
        from arena_jax.cli.plan_trace import trace_text

        write_file(trace, trace_text(plan.row for plan in plans.best), what="trace")
        console.note(f"wrote {trace}")


def _what_is_missing(index: PlanIndex) -> dict[str, Any]:
    """Say which grids were not searched, and by how much they can still beat the best so far."""
    bounds = index.lower_bounds_s
    total = len(index) + len(bounds)
    message = f"interrupted after {len(index)} of {counted(total, 'grid')}"
    gaps: dict[str, float] = {}
    for allocation in dict.fromkeys(row.grid.allocation for row in index):
        row = index.best(allocation)
        if row is None or row.step_time_s is None:
            continue
        least = min([row.step_time_s, *(at for grid, at in bounds.items() if grid.allocation == allocation)])
        gaps[str(allocation)] = gap = row.step_time_s / least - 1
        far = f"takes at most {1 + gap:.2f} times as long as the best" if gap else "is the best"
        message += f"\n  {row.grid} {far} of {allocation}"
    console.error(message)
    return {"unfinished": [str(grid) for grid in bounds], "gap": gaps}


def _how(index: PlanIndex) -> str:
    solved = index.num_programs_solved
    how = f"{counted(solved, 'program')} solved" if solved else f"all from {home.plan_index()}"
    return f"{counted(len(index), 'grid')} in {index.search_s:.1f} s, {how}"


def _nothing_fits(
    search: "StoredSearch",
    index: PlanIndex,
    constraints: "Constraints",
    num_microbatches: int | None,
    catalogue: Catalogue,
) -> InfeasibleError:
    """Say which grid comes closest, by how much it misses, and what would fit."""
    from arena_jax.compiler.cost import hardware_of
    from arena_jax.compiler.suggest import nearest_fits
    from arena_jax.planner import remedy

    def misses(row: IndexRow) -> int:
        assert row.least_memory_bytes is not None
        return row.least_memory_bytes - hardware_of(row.grid.allocation, catalogue).usable_bytes

    short = [row for row in index if row.least_memory_bytes is not None]
    row = min(short, key=misses) if short else next(iter(index))
    console.note("looking for what would fit")
    fits = nearest_fits(
        search,
        row.grid.allocation,
        constraints=constraints,
        num_microbatches=num_microbatches,
        grow=bool(short),
        catalogue=catalogue,
    )
    if not short:
        hint = f"it fits with {fits[0]}" if fits else remedy(index)
        return InfeasibleError(f"no plan fits; {row.grid}: {row.reason}", hint=hint)
    return InfeasibleError(
        f"no plan fits; {row.grid} comes closest and misses {misses(row):,} bytes a device",
        hint=f"it fits with {' or '.join(fits)}" if fits else "use a type with more memory, or a smaller model",
    )
