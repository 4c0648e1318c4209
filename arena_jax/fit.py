"""The Python front door: ``fit``, and below it ``plan`` and ``compile`` for one's own loop."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from flax import nnx

from arena_jax.compiler import Constraints, Problem, make_problem, plan_problem
from arena_jax.compiler._compat import under_mesh
from arena_jax.compiler.problem import LossFn
from arena_jax.data import as_loader
from arena_jax.errors import UsageError
from arena_jax.grid import FIT_PREFIX, Allocation, GridShape, Plan, PlanIndex, Precision, SchedulerHook, parse_target
from arena_jax.planner import Planner, allocation_of, choose, plan_store
from arena_jax.runtime.checkpoint import CheckpointOptions
from arena_jax.runtime.checkpoint_info import LeafType
from arena_jax.runtime.contract import LoopOptions, StopReason, Swap
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Callback
from arena_jax.runtime.metrics import StepRecord
from arena_jax.runtime.program import Program
from arena_jax.runtime.rundir import Resume, RunDirectory, check_resume, new_path, open_run
from arena_jax.tracking import Tracker
from arena_jax.training import Training, run_training

Grid = str | GridShape | Allocation | Sequence[jax.Device]
_LOGGER = logging.getLogger("arena_jax")


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What :func:`fit` gives back.

    Attributes:
        model: a new module (or tree) with the trained values; the one passed in is as it was.
        optimizer_state: as the optax transformation made it.
        step: completed steps, those before a resume included.
        history: one record per step of this call: ``step``, ``loss``, ``metrics``, ``step_time_s``.
        plan: the plan that ran last.
        swaps: changes of plan on the way.
        run_id: of the run directory; empty when nothing was kept on disk.
        stop_reason: ``done``, ``data_ended``, ``interrupted``, ``terminated`` or ``stopped``.
    """

    model: Any
    optimizer_state: Any
    step: int
    history: tuple[StepRecord, ...]
    plan: Plan
    swaps: tuple[Swap, ...]
    run_id: str
    stop_reason: StopReason


def fit(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    data: Iterable[Any],
    *,
    steps: int,
    grid: Grid = "auto",
    plan: Plan | str | Path | None = None,
    num_microbatches: int | None = None,
    trainable: Any = None,
    precision: Precision | None = None,
    axis_rules: Mapping[str, str | None] | None = None,
    specs: Mapping[str, Sequence[Any]] | None = None,
    eval_data: Iterable[Any] | None = None,
    eval_every: int | None = None,
    init_from: str | Path | None = None,
    checkpoint: str | Path | CheckpointOptions | None = None,
    resume: Resume = "auto",
    nonfinite: Literal["stop", "skip"] = "stop",
    tracker: Tracker | None = None,
    hook: SchedulerHook | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> FitResult:
    """Train a Flax model under a plan the compiler chooses for the devices at hand.

    The batch, the sample order and the loss curve do not depend on the plan. Nothing passed in is
    donated or changed. SIGINT and SIGTERM finish the step, save, and return.

    Args:
        model: an ``nnx.Module``, or a tree of arrays, which ``loss_fn`` then gets in place of a module; or a
            factory ``rngs -> module or tree``, whose arrays are only ever made sharded.
        optimizer: any optax transformation.
        loss_fn: ``(model, batch) -> loss`` or ``Weighted``, or ``(that, dict of metrics)``.
        data: global batches (pytrees whose arrays share their leading dim). A list of batches repeats;
            an iterator that ends, ends the run. To resume exactly, it needs ``get_state`` and
            ``set_state`` (grain iterators have them; lists do, too); without, resuming is refused.
        steps: completed steps at which training is done, those before a resume included.
        grid: ``"auto"`` for all devices, ``"cpu:4/s2"``, ``"cpu:4"`` (any number of stages), a
            ``GridShape`` or ``Allocation``, or a list of jax devices.
        plan: a ``Plan`` or a plan file to run as it is; ``None`` searches.
        num_microbatches: pinned number of microbatches; ``None`` is automatic.
        trainable: filter as in ``nnx.Optimizer``'s ``wrt``; the rest has no gradient.
        precision: dtypes of the run.
        axis_rules: axis names of the model's sharding annotations and constraints, which are kept -> ``"dp"``
            or ``"tp"``, or ``None`` for one that shards nothing; by default data, batch and fsdp are dp,
            model, tensor and mp are tp.
        specs: name or pattern of parameters -> how they have to lie, dim by dim, as
            ``{"blocks/*/up/kernel": (None, "tp")}``; every plan keeps it.
        eval_data: batches that can be iterated again and again; the last may be ragged.
        eval_every: steps between evaluations; there is one at the end, too.
        init_from: a run directory or checkpoint whose model (without optimizer) to start from.
        checkpoint: the run's directory, or :class:`CheckpointOptions`; ``None`` keeps nothing.
        resume: ``auto`` goes on from the newest checkpoint in the directory if there is one; ``must``
            insists; ``never`` sets what is there aside; a number goes back to that step.
        nonfinite: at a NaN or infinite loss ``stop``, or ``skip`` the update.
        tracker: such as ``arena_jax.tracking.MLflowTracker()``.
        hook: a scheduler's half, asked at every step boundary.
        callbacks: each is called with every event (a dict with ``kind``), on the training thread.
        seed: of parameters and dropout.

    Raises:
        ArenaError: with what was violated, what was received, and what would work.
    """
    _check(steps=steps, eval_every=eval_every, nonfinite=nonfinite, resume=resume, eval_data=eval_data)
    feed = Feed(as_loader(data))
    problem = make_problem(
        model,
        optimizer,
        loss_fn,
        feed.peek(),
        precision=precision,
        trainable=trainable,
        axis_rules=axis_rules,
        specs=specs,
        seed=seed,
    )
    planner, target, pinned = _where(
        problem, grid, plan, num_microbatches=num_microbatches, nonfinite=nonfinite, name=_name(model)
    )
    options, run = _run_directory(checkpoint, resume, tracker)
    with ExitStack() as stack:
        if run is not None:
            stack.callback(run.close)
        stack.enter_context(under_mesh(None))
        trained = run_training(
            Training(
                name="fit",
                planner=planner,
                target=target,
                plan=pinned,
                feed=feed,
                options=LoopOptions(
                    num_steps=steps,
                    items_per_step=problem.global_batch,
                    samples_per_step=problem.global_batch,
                    eval_every=eval_every or 0,
                    checkpoint_every=options.every,
                    nonfinite=nonfinite,
                ),
                seed=seed,
                run=run,
                keep=options.keep,
                leaves=model_leaves(problem),
                init_from=init_from,
                eval_data=eval_data,
                tracker=tracker,
                hook=hook,
                callbacks=(_log_warning, *callbacks),
            )
        )
        outcome = trained.outcome
        program = outcome.program
        assert isinstance(program, Program)
        model_out, optimizer_state = program.model(outcome.state), program.optimizer_state(outcome.state)
    return FitResult(
        model=model_out,
        optimizer_state=optimizer_state,
        step=outcome.step,
        history=outcome.history,
        plan=program.plan,
        swaps=outcome.swaps,
        run_id=trained.run_id,
        stop_reason=outcome.stop_reason,
    )


def plan(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: Any,
    *,
    on: Sequence[str | Allocation],
    num_microbatches: int | None = None,
    trainable: Any = None,
    precision: Precision | None = None,
    axis_rules: Mapping[str, str | None] | None = None,
    specs: Mapping[str, Sequence[Any]] | None = None,
    constraints: Constraints | None = None,
    seed: int = 0,
) -> PlanIndex:
    """Plan every grid of the allocations in ``on``, on hardware that need not be here.

    Args:
        batch: a global batch, arrays or ``jax.ShapeDtypeStruct``.
        on: allocations, such as ``["a100:8", "h100:2x8"]``.
        constraints: pins and search switches (``arena_jax.compiler.Constraints``).
        model, optimizer, loss_fn, num_microbatches, trainable, precision, axis_rules, specs, seed: see :func:`fit`.
    """
    problem = make_problem(
        model,
        optimizer,
        loss_fn,
        batch,
        precision=precision,
        trainable=trainable,
        axis_rules=axis_rules,
        specs=specs,
        seed=seed,
    )
    allocations = [Allocation.parse(a) if isinstance(a, str) else a for a in on]
    return plan_problem(problem, allocations, constraints=constraints, num_microbatches=num_microbatches)


def compile(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: Any,
    *,
    plan: Plan | str | Path | None = None,
    grid: Grid = "auto",
    num_microbatches: int | None = None,
    trainable: Any = None,
    precision: Precision | None = None,
    axis_rules: Mapping[str, str | None] | None = None,
    specs: Mapping[str, Sequence[Any]] | None = None,
    nonfinite: Literal["stop", "skip"] = "stop",
    seed: int = 0,
) -> Program:
    """Compile a training step for a loop of one's own.

    The program has ``init``, ``step``, ``eval_step`` and ``reshard_from``. The arguments are those of
    :func:`fit`; ``plan=None`` searches one for ``grid``.
    """
    problem = make_problem(
        model,
        optimizer,
        loss_fn,
        batch,
        precision=precision,
        trainable=trainable,
        axis_rules=axis_rules,
        specs=specs,
        seed=seed,
    )
    planner, target, pinned = _where(
        problem, grid, plan, num_microbatches=num_microbatches, nonfinite=nonfinite, name=_name(model)
    )
    with under_mesh(None):
        candidate = choose(planner.search(target), target) if pinned is None else planner.given(pinned)
        program = planner.compile(candidate).program
    assert isinstance(program, Program)
    return program


def model_leaves(problem: Problem) -> dict[str, LeafType]:
    """Names and types of the model's parameters as checkpoints have them."""
    return {
        f"{leaf.kind}/{leaf.name}": (jax.numpy.dtype(leaf.dtype).name, tuple(leaf.shape))
        for leaf in problem.leaves
        if leaf.kind in ("params", "frozen")
    }


def _log_warning(event: Mapping[str, Any]) -> None:
    """What a run warns of, for those who pass no callback: logging writes it to stderr unless it is set otherwise."""
    if event["kind"] == "warning":
        _LOGGER.warning("%s", event["message"])


def _name(model: Any) -> str:
    """What ``plan ls`` calls the model: the class, or the factory that makes it."""
    name = getattr(model, "__name__", "") if callable(model) and not isinstance(model, nnx.Module) else ""
    name = name or type(model).__name__
    return FIT_PREFIX + ("factory" if name in ("<lambda>", "partial") else name)


def _where(
    problem: Problem,
    grid: Grid,
    plan: Plan | str | Path | None,
    *,
    num_microbatches: int | None,
    nonfinite: str,
    name: str,
) -> tuple[Planner, GridShape | Allocation, Plan | None]:
    """The planner for the devices meant, the target on them, and the given plan."""
    devices = None if isinstance(grid, str | GridShape | Allocation) else list(grid)
    planner = Planner(
        problem, devices=devices, num_microbatches=num_microbatches, nonfinite=nonfinite, store=plan_store(), name=name
    )
    pinned = Plan.load(plan) if isinstance(plan, str | Path) else plan
    target: GridShape | Allocation
    if pinned is not None:
        target = pinned.grid
    elif isinstance(grid, GridShape | Allocation):
        target = grid
    elif isinstance(grid, str) and grid != "auto":
        target = parse_target(grid)
    else:
        target = allocation_of(planner.devices)
    planner.check_fits(target.allocation)
    return planner, target, pinned


def _run_directory(
    checkpoint: str | Path | CheckpointOptions | None, resume: Resume, tracker: Tracker | None
) -> tuple[CheckpointOptions, RunDirectory | None]:
    if checkpoint is None:
        if resume == "must" or not isinstance(resume, str):
            raise UsageError(
                f"resume={resume!r} without a checkpoint directory", hint="pass checkpoint='some/directory'"
            )
        # A tracker is fed from the event log, which needs a place.
        path = new_path(Path("runs")) if tracker is not None else None
        options = CheckpointOptions(directory=path or ".", every=0)
        return options, None if path is None else open_run(path, name="fit", resume="never")
    options = checkpoint if isinstance(checkpoint, CheckpointOptions) else CheckpointOptions(directory=checkpoint)
    options = replace(options, directory=Path(options.directory))
    return options, open_run(Path(options.directory), name="fit", resume=resume)


def _check(*, steps: Any, eval_every: Any, nonfinite: Any, resume: Any, eval_data: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"steps is {steps!r}", hint="give the number of steps, 0 or more")
    if eval_every is not None and (not isinstance(eval_every, int) or eval_every < 1):
        raise UsageError(f"eval_every is {eval_every!r}", hint="give a number of steps, or None for no evaluation")
    if eval_every is not None and eval_data is None:
        raise UsageError("eval_every is given without eval_data", hint="pass eval_data")
    if eval_data is not None and iter(eval_data) is eval_data:
        raise UsageError(
            f"eval_data is {type(eval_data).__name__}, an iterator that one evaluation uses up",
            hint="pass a list of batches, or an object whose __iter__ begins anew",
        )
    if nonfinite not in ("stop", "skip"):
        raise UsageError(f"nonfinite is {nonfinite!r}", hint="write 'stop' or 'skip'")
    check_resume(resume)
