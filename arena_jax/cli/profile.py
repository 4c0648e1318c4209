"""``arena-jax profile``: measured pieces, taken on one device and cached for everyone."""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from arena_jax import home
from arena_jax.cli import console
from arena_jax.errors import UsageError, counted
from arena_jax.grid import CATALOGUE, Allocation, GridShape, Profile, ProfileStore


@click.group()
def command() -> None:
    """Measured pieces of models, which correct estimates."""


@command.command("run")
@console.recipe_arguments
@click.option("--on", "specs", multiple=True, required=True, metavar="SPEC", help="Allocation to profile for (cpu:8).")
@click.option(
    "--budget", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop after this; most telling pieces first."
)
@console.json_option
def run(recipe: str, overrides: tuple[str, ...], specs: tuple[str, ...], budget: float | None, as_json: bool) -> None:
    """Time the pieces that the candidate plans of RECIPE are made of, on one device.

    These are every unlike layer's forward and backward pass and its optimizer update, at the sizes
    that one device has of them, and once for a machine its collectives and transfers. What is known is
    not timed again, so that an interrupted run goes on and a second recipe pays for its new pieces
    only. On a CPU, pieces run on the share of the cores that one of the virtual devices has.
    """
    from arena_jax.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    targets: list[Allocation | GridShape] = [Allocation.parse(spec) for spec in specs]
    types = {target.device_type for target in targets if isinstance(target, Allocation)}
    numbers = {target.num_devices for target in targets}
    if len(types) > 1:
        raise UsageError("one device is of one type", hint="one run for each type")
    (device_type,) = types
    on_cpu = CATALOGUE[device_type].platform == "cpu"
    threads = CATALOGUE[device_type].threads
    shares_cores = on_cpu and threads is None
    if shares_cores and len(numbers) > 1:
        raise UsageError("devices that share a CPU differ with their number", hint="one run for each number")
    num_devices = max(numbers)
    started = time.perf_counter()
    if on_cpu:
        from arena_jax.cpu_memory import keep_freed_memory
        from arena_jax.node_rates import node_rates

        keep_freed_memory()  # as a run does
        node_rates()  # of the whole node, before this process is kept on some of its cores
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(max(num_devices, loaded.cpu_devices)))
    from arena_jax.start import start_jax_to_plan

    if on_cpu:
        start_jax_to_plan()
    from arena_jax.compiler.analysis import analyse
    from arena_jax.compiler.cost import hardware_of
    from arena_jax.compiler.profiling.pieces import pieces_of
    from arena_jax.compiler.profiling.profiler import profile
    from arena_jax.job import build
    from arena_jax.planner import constraints_of

    if not on_cpu:
        _check_device(device_type)
    job = build(loaded)
    problem = job.problem()
    store = _store()
    console.note("finding the pieces of the candidate plans")
    pieces = pieces_of(
        analyse(problem),
        targets,
        hardware_of,
        constraints=constraints_of(loaded.plan),
        num_microbatches=loaded.plan.num_microbatches,
    )
    outcome = profile(
        pieces,
        problem,
        device_type,
        store,
        num_devices=num_devices,
        threads=threads,
        budget_s=budget,
        progress=_progress,
    )
    console.note(
        f"{counted(outcome.timed, 'piece')} timed, {outcome.known} known before"
        + (f", {outcome.refused} without a program of their own" if outcome.refused else "")
        + (f", {outcome.left} left for another run" if outcome.left else "")
        + f"; {outcome.device_s:.1f} s on devices"
    )
    if as_json:
        wall_s = time.perf_counter() - started
        console.emit_json(
            {
                "entries": [_row(p) for p in store.profiles(device_type)],
                "timed": outcome.timed,
                "known": outcome.known,
                "left": outcome.left,
                "device_seconds": outcome.device_s,
                "wall_s": wall_s,
            }
        )


@command.command("ls")
@console.json_option
def ls(as_json: bool) -> None:
    """List what is stored, by device type and kind of piece."""
    found = _store().profiles() if home.profiles().exists() else ()
    if as_json:
        console.emit_json({"entries": [_row(p) for p in found]})
        return
    if not found:
        console.note(f"no profile is kept in {home.profiles()}; `arena-jax profile run RECIPE --on cpu:8` takes some")
        return
    console.data(f"{'type':12}  {'kind':10}  {'pieces':>6}  {'noise':>6}  newest")
    groups: dict[tuple[str, str], list[Profile]] = {}
    for profile in found:
        groups.setdefault((profile.device_type, profile.kind), []).append(profile)
    for (device_type, kind), mine in sorted(groups.items()):
        noise = sorted(p.noise for p in mine)[len(mine) // 2]
        newest = datetime.fromtimestamp(max(p.measured_at for p in mine))
        console.data(f"{device_type:12}  {kind:10}  {len(mine):6}  {100 * noise:5.1f}%  {newest:%Y-%m-%d %H:%M}")


@command.command("show")
@click.argument("device_type", metavar="TYPE")
@console.json_option
def show(device_type: str, as_json: bool) -> None:
    """Show what is known of a device TYPE: factors on the cost model, what runs taught, and every piece."""
    name = CATALOGUE.canonical(device_type)
    store = _store()
    found, factors, bias = store.profiles(name), store.corrections(name), store.bias(name)
    if as_json:
        console.emit_json({"entries": [_row(p) for p in found], "corrections": factors, "bias": bias})
        return
    for kind, factor in sorted(factors.items()):
        console.data(f"{name}: {kind} takes {factor:.2f} of what is computed")
    for estimate, learnt in bias.items():
        for cause, factor in sorted(learnt.items()):
            part = cause.removesuffix("_s").replace("_", " ")
            console.data(f"{name}: runs take {factor:.2f} of the {part} in {estimate} estimates")
    for line in _lines(found):
        console.data(line)
    if not found:
        console.note(f"nothing is known of {name}")


@command.command("prune")
@click.option("--type", "device_type", metavar="TYPE", help="Only profiles of this type.")
@click.option(
    "--older-than", "days", type=click.FloatRange(min=0), metavar="DAYS", help="Only profiles older than this."
)
@click.option("--all", "everything", is_flag=True, help="Every profile.")
@console.json_option
def prune(device_type: str | None, days: float | None, everything: bool, as_json: bool) -> None:
    """Delete profiles of a type, old ones, or all; damaged rows go in any case."""
    if everything == (device_type is not None or days is not None):
        raise UsageError("say which profiles to delete", hint="--type TYPE, --older-than DAYS, or --all")
    name = None if device_type is None else CATALOGUE.canonical(device_type)
    older = 0.0 if everything else None if days is None else 86400 * days
    number = _store().prune(device_type=name, older_than_s=older)
    if as_json:
        console.emit_json({"pruned": number})
    else:
        console.note(f"{counted(number, 'profile')} deleted")


@command.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--type", "device_type", metavar="TYPE", help="Only profiles of this type.")
def export(path: Path, device_type: str | None) -> None:
    """Write profiles as JSON to PATH, for other machines to import."""
    from arena_jax.grid.profiles import to_json

    found = _store().profiles(None if device_type is None else CATALOGUE.canonical(device_type))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(to_json(found) + "\n", encoding="utf-8")
    temporary.replace(path)
    console.note(f"wrote {counted(len(found), 'profile')} to {path}")


@command.command("import")
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@console.json_option
def import_(path: Path, as_json: bool) -> None:
    """Add the profiles of PATH, which `profile export` wrote; what is there of the same pieces is replaced."""
    from arena_jax.grid.profiles import from_json

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not JSON: {error}") from error
    found = from_json(text, source=str(path))
    _store().put(found)
    if as_json:
        console.emit_json({"entries": [_row(p) for p in found]})
    else:
        console.note(f"{counted(len(found), 'profile')} imported")


def _store() -> ProfileStore:
    store = ProfileStore(home.profiles())
    if store.set_aside is not None:
        console.warn(f"{store.path} was damaged or of another version; it is kept as {store.set_aside.name}")
    return store


def _check_device(device_type: str) -> None:
    """Refuse to time one type's pieces on another type's device."""
    import jax

    from arena_jax.planner import allocation_of

    here = allocation_of(jax.devices()[:1]).device_type
    if here != device_type:
        raise UsageError(
            f"pieces of {device_type} are timed on a {device_type}, and the device here is a {here}",
            hint="run this where one is, then `profile export` there and `profile import` here",
        )


def _progress(done: int, total: int, left_s: float) -> None:
    console.note(f"  {done} of {total} pieces, about {left_s:.0f} s left")


def _row(profile: Profile) -> dict[str, Any]:
    return {
        "device_type": profile.device_type,
        "kind": profile.kind,
        "piece": dict(profile.piece),
        "environment": dict(profile.environment),
        "seconds": profile.seconds,
        "computed_s": profile.computed_s,
        "noise": profile.noise,
        "num_repeats": profile.num_repeats,
        "measured_at": profile.measured_at,
    }


def _lines(found: Sequence[Profile]) -> Iterator[str]:
    for p in found:
        shown = {k: len(v) if k == "layers" else v for k, v in p.piece.items() if k != "like"}
        if p.environment.get("cores") is not None:
            shown["cores"] = p.environment["cores"]
        what = ", ".join(f"{k} {'x'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in shown.items())
        factor = p.seconds / p.computed_s
        line = f"{p.kind:10}  {1e3 * p.seconds:9.3f} ms  x {factor:4.2f}  +-{100 * p.noise:3.0f}%  {what}"
        yield from wrap(line, console.width(), subsequent_indent=" " * 12)
