"""``arena-jax simulate``: scheduling policies on a job trace, to completion."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arena_jax.cli import console

if TYPE_CHECKING:
    from arena_jax.scheduler import RestartCosts, Result, Scenario


def complete_policy(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Policy names that begin with what was typed."""
    from arena_jax.scheduler.policies import PAPER_FORMS, POLICIES

    return [name for name in (*POLICIES, *(f"{p}@paper" for p in PAPER_FORMS)) if name.startswith(incomplete)]


@click.command(
    epilog="NAME decides at every event; NAME@paper (sia, sia-negative, gavel, gavel-throughput, arena-paper) "
    "runs in its paper's form. Trace layouts (own CSV or JSON, the Arena artifact's, ElasticFlow's, ITP, Philly, "
    "Helios, PAI, sacct) are recognised by their header; logs without models get them drawn from --draw-seed."
)
@click.argument("trace", type=click.Path(dir_okay=False))
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Cluster file (TOML); repeat to compare.",
)
@click.option(
    "--profiles",
    "profiles",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Plan index or table of step times; earlier ones win.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="P",
    shell_complete=complete_policy,
    help="Policy; repeat to compare. [arena]",
)
@click.option("--report", type=click.Path(dir_okay=False), help="Write one self-contained HTML page.")
@click.option(
    "--round-s", type=float, help="Decide only at multiples of this; 0 is continuous time.  [0; @paper: its own]"
)
@click.option(
    "--restart-s", type=float, default=40.0, show_default=True, help="Charge of each start and change of allocation."
)
@click.option(
    "--restart-cost",
    "by_cause",
    multiple=True,
    metavar="CAUSE=S",
    help="Another charge for start, resume, grow, shrink, move, migrate or failure; repeatable.",
)
@click.option(
    "--seed",
    "seeds",
    type=click.IntRange(min=0),
    multiple=True,
    help="0 is the trace, k permutes its jobs over the arrivals; repeatable.  [0]",
)
@click.option(
    "--arrival-scale", type=float, default=1.0, show_default=True, help="Divides the time since the first arrival."
)
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "cost-under-deadline"]),
    default="time",
    show_default=True,
    help="What arena optimises; prices are the catalogue's.",
)
@click.option(
    "--bound",
    type=click.Choice(["isolated", "interval"]),
    default="isolated",
    show_default=True,
    help="Lower bound: without contention, or the linear program (a minute for 400 jobs).",
)
@click.option("--horizon-s", type=float, help="Stop so long after the first arrival instead of running to completion.")
@click.option("--error", type=float, default=0.0, help="Log-normal error on the estimates policies see, as 0.2.")
@click.option("--learn", is_flag=True, help="A running job's step time becomes known after its first step.")
@click.option("--stragglers", type=float, default=0.0, help="Share of runs that are 1.5 times as slow.")
@click.option("--failures-per-day", type=float, default=0.0, help="Expected failures per node and day.")
@click.option(
    "--node-events",
    metavar="FILE",
    help="Failures, drains and repairs to replay (CSV: time_s,device_type,node,kind).",
)
@click.option(
    "--deadlines", is_flag=True, help="Give 30 % of the jobs a deadline of 1.5 to 4 times their isolated time."
)
@click.option(
    "--draw-seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of models drawn for logs that name none.",
)
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes; 0 takes one per core.")
@click.option("--track", metavar="URI", help="Log one MLflow run per simulation to this tracking URI.")
@console.json_option
def command(
    trace: str, clusters: tuple[str, ...], as_json: bool, report: str | None, track: str | None, **options: Any
) -> None:
    """Run scheduling policies on the job TRACE, to completion."""
    from arena_jax.cli import simulate_table
    from arena_jax.errors import UsageError, counted
    from arena_jax.scheduler import interval_bound_s, isolated_bound_s, make_policy, summary, write_report
    from arena_jax.scheduler.metrics import over_seeds

    policies = list(dict.fromkeys(options["policies"] or ("arena",)))
    seeds = list(dict.fromkeys(options["seeds"] or (0,)))
    for name in policies:
        make_policy(name)
    if len({Path(name).stem for name in clusters}) < len(clusters):
        raise UsageError("two cluster files have the same name", hint="rename one; results are told apart by it")
    costs = _costs(options["restart_s"], options["by_cause"])
    answer: dict[str, Any] = {}
    for path in clusters:
        scenarios = [_scenario(trace, path, seed, costs, options) for seed in seeds]
        results = _run(scenarios, policies, options["workers"])
        bound = interval_bound_s if options["bound"] == "interval" else isolated_bound_s
        bounds = [bound(run.workload, costs.start) for run in results[policies[0]]]
        bound_s = sum(bounds) / len(bounds)
        merged = {name: over_seeds([summary(run) for run in runs]) for name, runs in results.items()}
        if len(seeds) > 1:
            for name, runs in results.items():
                merged[name]["seeds"] = {str(seed): summary(run) for seed, run in zip(seeds, runs, strict=True)}
        answer[Path(path).stem] = {"policies": merged, "lower_bound_s": bound_s}
        if report is not None:
            target = report if len(clusters) == 1 else str(Path(report).with_suffix("")) + f"-{Path(path).stem}.html"
            write_report(target, results, title=f"{Path(trace).name} on {Path(path).name}", bound_s=bound_s)
            console.note(f"report: {target}")
        else:
            target = None
        if track is not None:
            _track(track, results, {"trace": Path(trace).name, "cluster": Path(path).stem, **options}, seeds, target)
    if as_json:
        first = answer[Path(clusters[0]).stem]
        console.emit_json({**first, "clusters": answer} if len(clusters) > 1 else first)
    else:
        over = f", means over {len(seeds)} seeds" if len(seeds) > 1 else ""
        for number, (path, part) in enumerate(zip(clusters, answer.values(), strict=True)):
            if number:
                console.data()
            jobs = counted(next(iter(part["policies"].values()))["num_jobs"], "job")
            console.data(f"{Path(path).name}: {jobs}{over}; lower bound on the mean JCT {part['lower_bound_s']:,.0f} s")
            for line in simulate_table.lines(part["policies"]):
                console.data(line)


def _costs(seconds: float, by_cause: tuple[str, ...]) -> "RestartCosts":
    """The charge of ``--restart-s`` for every cause but those given as ``CAUSE=S``."""
    from dataclasses import replace

    from arena_jax.errors import UsageError, nearest
    from arena_jax.scheduler import RestartCosts
    from arena_jax.scheduler.costs import CAUSES

    given = {}
    for text in by_cause:
        cause, _, value = text.partition("=")
        if cause not in CAUSES:
            raise UsageError(f"unknown cause {cause!r}{nearest(cause, CAUSES)}", hint=f"causes: {', '.join(CAUSES)}")
        try:
            given[cause] = float(value)
        except ValueError:
            raise UsageError(f"--restart-cost {text}: {value!r} is not a number", hint=f"as {cause}=12.5") from None
    return replace(RestartCosts.uniform(seconds), **given)


def _scenario(trace: str, cluster_path: str, seed: int, costs: "RestartCosts", options: dict[str, Any]) -> "Scenario":
    from arena_jax.scheduler import Cluster, Scenario, load_profiles, load_trace
    from arena_jax.scheduler.traces import draw_models
    from arena_jax.scheduler.traces.events import load_node_events
    from arena_jax.scheduler.traces.raw import RawJob

    cluster = Cluster.load(cluster_path)
    first, *others = (load_profiles(path, cluster) for path in options["profiles"])
    profiles = first
    for other in others:
        profiles = profiles.over(other)
    loaded = load_trace(trace)
    raw = [job for job in loaded if isinstance(job, RawJob)]
    jobs = draw_models(raw, profiles, cluster, options["draw_seed"]) if raw else loaded
    return Scenario(
        jobs=tuple(jobs),  # type: ignore[arg-type]
        cluster=cluster,
        profiles=profiles,
        costs=costs,
        arrival_scale=options["arrival_scale"],
        seed=seed,
        error=options["error"],
        learn=options["learn"],
        failures_per_day=options["failures_per_day"],
        node_events=tuple(load_node_events(options["node_events"], cluster)) if options["node_events"] else (),
        straggler_share=options["stragglers"],
        deadlines=options["deadlines"],
        objective=options["objective"],
        round_s=options["round_s"],
        horizon_s=options["horizon_s"],
    )


def _run(scenarios: "list[Scenario]", policies: list[str], workers: int) -> "dict[str, list[Result]]":
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from arena_jax.scheduler import simulate, simulate_all

    cases = [(scenario, name) for name in policies for scenario in scenarios]
    done: dict[int, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        if len(cases) == 1:
            task = progress.add_task(f"{cases[0][1]}: jobs", total=len(cases[0][0].jobs))
            done[0] = simulate(*cases[0], lambda finished, _: progress.update(task, completed=finished))
        else:
            task = progress.add_task("simulations", total=len(cases))
            for position, result in simulate_all(cases, workers=workers):
                done[position] = result
                progress.update(task, advance=1, description=f"{cases[position][1]}")
    per = len(scenarios)
    return {name: [done[i * per + s] for s in range(per)] for i, name in enumerate(policies)}


def _track(
    uri: str, results: "dict[str, list[Result]]", params: dict[str, Any], seeds: list[int], report: str | None
) -> None:
    """One MLflow run per simulation, with its metrics and the report."""
    from arena_jax.errors import ArenaError
    from arena_jax.scheduler import summary
    from arena_jax.tracking import MLflowTracker, short_reason

    tracker = MLflowTracker(uri, experiment="arena-jax simulate")
    kept = {key: value for key, value in params.items() if key not in ("policies", "seeds")}
    try:
        for name, runs in results.items():
            for seed, run in zip(seeds, runs, strict=True):
                metrics = summary(run)
                metrics |= {f"decision_s_{key}": value for key, value in metrics.pop("decision_s").items()}
                tracker.log_run(
                    f"{name} seed {seed}", {**kept, "policy": name, "seed": seed}, metrics, [report] if report else []
                )
    except ArenaError:
        raise
    except Exception as error:  # mlflow's, requests' and SQLAlchemy's errors have no common base
        raise ArenaError(
            f"{tracker.uri} did not take the simulations: {short_reason(error)}",
            hint="run again when the server is up, or name another with --track",
        ) from error
    console.note(f"tracked; to look at the runs: {tracker.how_to_open()}")
