"""Checks across keys, as far as they need neither jax nor the data."""

from collections.abc import Iterator
from typing import Any

from arena_jax.errors import ArenaError, counted, nearest
from arena_jax.grid import GridShape, tilings
from arena_jax.recipe.schema import OPTIMIZERS, Recipe

Fault = tuple[tuple[str, ...], str]
"""The keys that a check read, and what is wrong. A key that is already faulty silences the check."""

_NUM_BYTES = 256
_WANTED_BY_KIND = {"text": "files", "tokens": "path", "function": "function"}


def cross_checks(recipe: Recipe, model: Any) -> Iterator[Fault]:
    """Yield every contradiction between keys; ``model`` is its ``Config`` or ``None``."""
    yield from _batch(recipe)
    yield from _grid(recipe)
    yield from _data(recipe, model)
    yield from _optimizer(recipe)
    yield from _hook(recipe)


def _batch(recipe: Recipe) -> Iterator[Fault]:
    batch, num = recipe.global_batch, recipe.plan.num_microbatches
    keys = ("global_batch", "plan.num_microbatches")
    if num and batch % num:
        works = min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: abs(d - num))
        nearest_batch = _nearest_multiple(batch, num)
        fault = f"global_batch: {batch} does not split into {num} microbatches; "
        yield keys, fault + f"global_batch={nearest_batch} or plan.num_microbatches={works} would"
        return
    for dp in _sizes(recipe.plan.dp):
        step = dp * (num or 1)
        if batch % step:
            yield (
                (*keys, "plan.dp"),
                f"global_batch: {batch} does not divide over plan.dp={dp}"
                + (f" in {num} microbatches" if num else "")
                + f"; {_nearest_multiple(batch, step)} would",
            )


def _grid(recipe: Recipe) -> Iterator[Fault]:
    plan = recipe.plan
    for key, sizes in (("plan.dp", plan.dp), ("plan.tp", plan.tp)):
        if isinstance(sizes, list) and plan.stages and len(sizes) != plan.stages:
            yield (key, "plan.stages"), f"{key}: {counted(len(sizes), 'size')} for {counted(plan.stages, 'stage')}"
    if plan.grid is None:
        return
    keys = ("plan.grid", "plan.stages", "plan.dp", "plan.tp")
    try:
        grid = GridShape.parse(plan.grid)
    except ArenaError as error:
        yield keys[:1], f"plan.grid: {error.message}" + (f"; {error.hint}" if error.hint else "")
        return
    if "/s" in plan.grid and plan.stages and plan.stages != grid.num_stages:
        yield keys[:2], f"plan.stages: {plan.stages}, but plan.grid={plan.grid} has {grid.num_stages}"
    stages = grid.num_stages if "/s" in plan.grid else plan.stages
    if stages is None:
        return
    if stages > grid.num_devices:
        yield (
            keys[:2],
            (
                f"plan.stages: {counted(stages, 'stage')} on {counted(grid.num_devices, 'device')}; "
                f"at most {grid.num_devices} would do"
            ),
        )
    elif not tilings(GridShape(grid.allocation, stages)):
        yield keys[:2], f"plan.stages: {stages} submeshes cannot tile {grid.allocation}"
    if stages == 1 and isinstance(plan.dp, int) and isinstance(plan.tp, int) and plan.dp * plan.tp != grid.num_devices:
        yield keys, f"plan.dp: dp {plan.dp} x tp {plan.tp} is not the {grid.num_devices} devices of {plan.grid}"


def _data(recipe: Recipe, model: Any) -> Iterator[Fault]:
    data = recipe.data
    wanted = _WANTED_BY_KIND.get(data.kind)
    for key in _WANTED_BY_KIND.values():
        if key == wanted and not getattr(data, key):
            yield ("data.kind", f"data.{key}"), f"data.{key}: needed for data.kind={data.kind}"
        elif key != wanted and getattr(data, key):
            kind = next(k for k, v in _WANTED_BY_KIND.items() if v == key)
            yield (
                ("data.kind", f"data.{key}"),
                f"data.{key}: means nothing for data.kind={data.kind}; use data.kind={kind}",
            )
    if recipe.eval.every and data.validation_fraction == 0 and data.kind != "function":
        yield (
            ("eval.every", "data.validation_fraction"),
            "data.validation_fraction: 0, but eval.every asks for validation",
        )
    if data.kind not in ("stdlib", "text", "tokens"):
        return
    vocabulary = getattr(model, "vocabulary", None)
    needed = _NUM_BYTES if data.kind != "tokens" else 1
    if data.objective == "masked":
        needed = max(needed, data.mask_token + 1)
    if isinstance(vocabulary, int) and vocabulary < needed:
        what = f"mask token {data.mask_token}" if needed > _NUM_BYTES else "bytes"
        yield (
            ("model.vocabulary", "data.kind", "data.mask_token"),
            f"model.vocabulary: {vocabulary} is too small for {what}; {needed} would do",
        )
    longest = getattr(model, "sequence_length", None)
    if model is not None and longest is None and data.sequence_length is None:
        yield ("data.sequence_length", "model"), "data.sequence_length: needed, as the model names none"
    if isinstance(longest, int) and data.sequence_length and data.sequence_length > longest:
        yield (
            ("data.sequence_length", "model.sequence_length"),
            f"data.sequence_length: {data.sequence_length} is longer than model.sequence_length={longest}",
        )


def _optimizer(recipe: Recipe) -> Iterator[Fault]:
    optimizer = recipe.optimizer
    for option in optimizer.options:
        known = OPTIMIZERS[optimizer.name]
        if option not in known:
            yield (
                ("optimizer.name",),
                f"optimizer.options.{option}: {optimizer.name} has no such option{nearest(option, known)}",
            )
    # A run that is cut short (steps=5) may well end inside its warm-up; a schedule that names its own end may not.
    end = optimizer.decay_steps
    if end and optimizer.schedule != "constant" and optimizer.warmup_steps >= end:
        yield (
            ("optimizer.warmup_steps", "optimizer.decay_steps"),
            f"optimizer.warmup_steps: {optimizer.warmup_steps} leaves nothing to decay before step {end}",
        )


def _hook(recipe: Recipe) -> Iterator[Fault]:
    own_socket = recipe.hook.socket not in ("auto", "off")
    keys = (("script", recipe.hook.script), ("socket", own_socket), ("file", recipe.hook.file))
    given = [key for key, is_given in keys if is_given]
    if len(given) > 1:
        yield (
            tuple(f"hook.{key}" for key in given),
            f"hook.{given[1]}: a {given[0]} and a {given[1]} cannot both decide",
        )
    for entry in recipe.hook.script:
        step, colon, target = entry.partition(":")
        if not colon or not step.strip().isdigit():
            yield ("hook.script",), f'hook.script: {entry!r} is not "STEP: GRID"'
        elif target.strip() not in ("pause", "stop"):
            try:
                GridShape.parse(target.strip())
            except ArenaError as error:
                yield ("hook.script",), f"hook.script: {error.message}"


def _sizes(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else sorted(set(value))


def _nearest_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)
