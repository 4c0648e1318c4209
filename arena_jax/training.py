"""One training, from its problem to its end: what ``fit`` and ``arena-jax train`` both run.

The order matters: what can be refused cheaply (an unwritable directory, a checkpoint of other data
or of another model) is refused before anything is planned or compiled.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import jax

from arena_jax.compiler.profiling.taught import keep_run
from arena_jax.errors import CheckpointError, DataError, NonFiniteLossError
from arena_jax.events import EventLog
from arena_jax.grid import Allocation, GridShape, Plan, PlanIndex, SchedulerHook, parse_target, plan_difference
from arena_jax.planner import Candidate, candidate_rows, choose
from arena_jax.relaunch import Note
from arena_jax.runtime.ahead import Warm
from arena_jax.runtime.checkpoint import CheckpointStore, leaf_types
from arena_jax.runtime.checkpoint_info import CheckpointInfo, LeafType, check_leaves
from arena_jax.runtime.contract import Arrival, Compiled, Elsewhere, LoopOptions, Outcome, Program, Swap
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Callback, Journal
from arena_jax.runtime.peers import Peers
from arena_jax.runtime.rundir import RunDirectory
from arena_jax.runtime.signals import StopSignals
from arena_jax.runtime.trainer import Trainer
from arena_jax.tracking import Sink, Tracker

# Seconds that a tracker has left after a signal.
INTERRUPTED_CLOSE_TIMEOUT_S = 3.0

_REPORTED_PACKAGES = ("arena-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Plans(Protocol):
    """Plans and compiles; :class:`arena_jax.planner.Planner` is the one."""

    def search(self, target: GridShape | Allocation) -> PlanIndex: ...
    def given(self, plan: Plan) -> Candidate: ...
    def settle(self, num_microbatches: int) -> None: ...
    def compile(self, candidate: Candidate, device_numbers: Sequence[int] | None = None) -> Compiled: ...
    def recompile(self, target: GridShape | Allocation, device_numbers: Sequence[int] | None = None) -> Compiled: ...


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Why this process goes on with what others began.

    Attributes:
        swap: the change of plan it comes from, its stall still open; ``None`` after a death.
        left_s: unix seconds at which the last step before was complete, or the death was noticed.
        why: in words.
        request_id: of the request for the change.
    """

    swap: Swap | None
    left_s: float
    why: str
    request_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """What a training is given by who started its processes.

    Attributes:
        peers: the other processes; ``None`` where this is the only one.
        compiled: the plan, compiled before it was known where to begin.
        elsewhere: how to leave for other processes.
        resume_from: directory of the checkpoint to go on from, where it is not the run's own.
        resumption: what came before; ``None`` at the start of a run.
    """

    compiled: Compiled
    peers: Peers | None = None
    elsewhere: Elsewhere | None = None
    resume_from: Path | None = None
    resumption: Resumption | None = None

    @property
    def can_leave(self) -> bool:
        """Whether the plan can change: in this process, or in others."""
        return self.peers is None or self.elsewhere is not None

    @property
    def leads(self) -> bool:
        """Whether this process writes logs."""
        return self.peers is None or self.peers.leads


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one training is made of.

    Attributes:
        name: what it is called.
        planner: plans and compiles its problem.
        target: where to run: one grid, or an allocation that leaves the stages open.
        plan: a plan to run instead of searching.
        feed: training data, at its beginning.
        options: how long, and what on the way.
        seed: of the initialisation.
        run: the run's directory; ``None`` keeps nothing on disk.
        keep: checkpoints kept.
        leaves: dtype and shape of the model's own leaves by their names in checkpoints, so that a
            checkpoint of another model is refused before anything is compiled; may be empty.
        init_from: a checkpoint (``.../checkpoints/STEP``) whose model, without optimizer and step, to start from.
        eval_data: iterated anew for each evaluation.
        tracker, hook, callbacks: who follows it.
        elsewhere: takes it to devices that this process does not have; ``None`` where nothing can.
        note: what the process before this one left, when it goes on from there.
        warm: plans and compiles for the hook's requests in another process first; ``None`` leaves it to a thread.
        record: facts for the ``run_start`` event: recipe text, params, command.
        signals: whose signal ends the run, at the next boundary between phases or steps.
        supervised: where another process started this one.
    """

    name: str
    planner: Plans
    target: GridShape | Allocation
    feed: Feed
    options: LoopOptions
    plan: Plan | None = None
    seed: int = 0
    run: RunDirectory | None = None
    keep: int = 3
    leaves: Mapping[str, LeafType] = field(default_factory=dict)
    init_from: str | Path | None = None
    eval_data: Iterable[Any] | None = None
    tracker: Tracker | None = None
    hook: SchedulerHook | None = None
    warm: Warm | None = None
    elsewhere: Elsewhere | None = None
    note: Note | None = None
    callbacks: Sequence[Callback] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    signals: StopSignals = field(default_factory=StopSignals)
    supervised: Supervised | None = None

    @property
    def peers(self) -> Peers | None:
        """The other processes of the job, if there are any."""
        return None if self.supervised is None else self.supervised.peers


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training ended.

    Attributes:
        outcome: the loop's own account.
        run_id: of the run directory, or empty.
        first_step: completed steps before this process.
    """

    outcome: Outcome
    run_id: str
    first_step: int


def run_training(training: Training) -> Trained:
    """Run a training to its end, whatever that is, leaving log, checkpoints and tracker in order.

    Raises:
        ArenaError: what was refused, or a loss that is not finite. The event log says so too.
    """
    run = training.run
    with ExitStack() as stack:
        stack.enter_context(training.signals)
        if run is None:
            return _train_and_tell(training, None)
        store = stack.enter_context(CheckpointStore(run.checkpoints, keep=training.keep, peers=training.peers))
        if training.options.checkpoint_every:
            store.prepare()
        return _train_and_tell(training, store)


def _train_and_tell(training: Training, store: CheckpointStore | None) -> Trained:
    source = store
    if training.supervised is not None and training.supervised.resume_from is not None:
        source = CheckpointStore(training.supervised.resume_from, peers=training.peers)
    info = _resume_info(training, source)
    first_step = 0 if info is None else info.step
    run_id = "" if training.run is None else training.run.run_id
    with _journal(training) as journal:
        journal.emit("run_start", run_id=run_id, name=training.name, **_facts(training))
        try:
            outcome = _run(training, journal, store, source, info)
        except BaseException as error:
            journal.emit("run_end", step=first_step, stop_reason=_reason(error), message=_message(error))
            raise
        journal.emit("run_end", step=outcome.step, stop_reason=outcome.stop_reason, message="")
    return Trained(outcome=outcome, run_id=run_id, first_step=first_step)


def _run(
    training: Training,
    journal: Journal,
    store: CheckpointStore | None,
    source: CheckpointStore | None,
    info: CheckpointInfo | None,
) -> Outcome:
    first_step = 0 if info is None else info.step
    supervised, note = training.supervised, training.note
    if info is not None and note is None:
        assert store is not None
        aside = store.set_aside_after(first_step)
        if aside is not None:
            journal.warn(f"going back to step {first_step}: the later checkpoints are now in {str(aside)!r}")
    if info is not None:
        training.planner.settle(int(info.plan["num_microbatches"]))
    signals = training.signals
    if supervised is None:
        candidate = _choose_plan(training, journal)
        signals.check("planning")
        compiled = training.planner.compile(candidate, None if note is None else note.here.devices)
        signals.check("compiling")
        estimate = candidate.estimate
    else:
        compiled, estimate = supervised.compiled, None
    program = compiled.program
    training.planner.settle(program.plan.num_microbatches)
    training.feed.keep_rows(program.rows)
    resumption = None if supervised is None else supervised.resumption
    if note is None and (resumption is None or resumption.swap is None):
        journal.plan(program.plan, step=first_step, reason="start" if info is None else "resume", compiled=compiled)
    trainer = Trainer(
        compiled=compiled,
        feed=training.feed,
        options=training.options,
        journal=journal,
        describe=_describer(training),
        store=store,
        eval_data=training.eval_data,
        hook=training.hook,
        recompile=None if supervised is not None and not supervised.can_leave else training.planner.recompile,
        warm=training.warm,
        elsewhere=training.elsewhere,
        signals=signals,
        peers=training.peers,
    )
    state = _initial_state(training, program, source, info)
    signals.check("initialising")
    if note is None and resumption is None:
        outcome = trainer.run(state, first_step=first_step)
        if not outcome.swaps:
            # The first step of a process is slower than the plan is.
            keep_run(program.plan, estimate, [record.step_time_s for record in outcome.history[1:]])
        return outcome
    jax.block_until_ready(state)
    if resumption is not None:
        return trainer.run(state, first_step=first_step, arrival=_resumed(resumption, journal, first_step))
    assert note is not None
    note.settle()
    if note.failed:
        journal.plan(program.plan, step=first_step, reason="resume", compiled=compiled)
    return trainer.run(state, first_step=first_step, arrival=_arrival(note))


def _arrival(note: Note) -> Arrival:
    """What to tell of the change of plan that the note was left for."""
    before, plan = note.back.plan, note.here.plan
    swap = Swap(
        step=note.step,
        source=before.grid,
        target=plan.grid,
        reason=note.reason,
        background_s=note.background_s,
        stall_s=max(0.0, time.time() - note.left_at),
        prepared=note.prepared,
        move_s=max(0.0, time.time() - note.began_at),
        moved_bytes=note.num_bytes,
        difference=plan_difference(before, plan),
    )
    return Arrival(
        request_id=note.request_id,
        swap=None if note.failed else swap,
        target=parse_target(note.target),
        failed=note.failed,
    )


def _resumed(resumption: Resumption, journal: Journal, step: int) -> Arrival | None:
    """Tell how long the run stood between two groups of processes."""
    down_s = max(0.0, time.time() - resumption.left_s)
    if resumption.swap is None:
        journal.emit("restart", step=step, why=resumption.why, down_s=down_s)
        return None
    swap = replace(resumption.swap, step=step, stall_s=down_s)
    return Arrival(request_id=resumption.request_id, swap=swap, target=swap.target)


def _resume_info(training: Training, store: CheckpointStore | None) -> CheckpointInfo | None:
    """Read the checkpoint to resume from, refuse a foreign one, and position the data."""
    run, note = training.run, training.note
    if note is not None:
        store = CheckpointStore(Path(note.folder))
    if store is None or run is None or (note is None and run.resume_step is None):
        return None
    info = store.read_info(note.step if note is not None else run.resume_step or 0)
    where = f"checkpoint {str(store.path(info.step))!r}"
    if training.leaves:
        own = {k: v for k, v in info.leaves.items() if k.startswith(("params/", "frozen/"))}
        check_leaves(own, training.leaves, where=where)
    fingerprint = training.feed.fingerprint
    if info.data_fingerprint != fingerprint:
        raise DataError(
            f"{where} was made with other training data: {info.data_fingerprint}, now {fingerprint}",
            hint="resume with the data of the first run, or start anew with resume 'never'",
        )
    training.feed.go_to(info.data_position)
    return info


def _choose_plan(training: Training, journal: Journal) -> Candidate:
    if training.note is not None:
        here = training.note.here
        return Candidate(plan=here.plan, estimated_step_time_s=here.estimated_step_time_s, engine=here.engine)
    if training.plan is not None:
        return training.planner.given(training.plan)
    index = training.planner.search(training.target)
    row = index.row(training.target) if isinstance(training.target, GridShape) else index.best(training.target)
    journal.emit("candidates", rows=candidate_rows(index, None if row is None else row.plan))
    return choose(index, training.target)


def _initial_state(
    training: Training, program: Program, store: CheckpointStore | None, info: CheckpointInfo | None
) -> Any:
    if training.note is not None:
        store = CheckpointStore(Path(training.note.folder))
    if info is not None:
        assert store is not None
        return program.load_tree(store.restore(info.step, _on_host(program.abstract_tree())))
    if training.init_from is None:
        return program.init(training.seed)
    fresh = program.save_tree(program.init(training.seed))
    return program.load_tree({**fresh, **_model_of(Path(training.init_from), program)})


def _on_host(tree: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves without their shardings: read into host memory.

    ``load_tree`` copies each leaf to its place, so restoring onto the devices would hold the state
    there twice.
    """
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in tree.items()}


def _model_of(path: Path, program: Program) -> dict[str, Any]:
    """Read parameters, and what state has the same name and shape, from a checkpoint of the same model.

    What is frozen now may have been trained then, and the other way round.
    """
    store, step = _locate(path)
    saved = store.read_info(step).leaves
    wanted = _on_host({k: v for k, v in program.abstract_tree().items() if not k.startswith("opt/") and k != "step"})
    source: dict[str, str] = {}
    for name in wanted:
        group, _, rest = name.partition("/")
        other = {"params": "frozen", "frozen": "params"}.get(group, group)
        source[name] = name if name in saved or f"{other}/{rest}" not in saved else f"{other}/{rest}"
    types = leaf_types(wanted)
    for name in [n for n in wanted if n.startswith("state/") and saved.get(n) != types[n]]:
        del wanted[name]
    restored = store.restore_some(step, {source[name]: leaf for name, leaf in wanted.items()})
    return {name: restored[source[name]] for name in wanted}


def _locate(path: Path) -> tuple[CheckpointStore, int]:
    """The store and step that a path means: a run directory, its ``checkpoints``, or one step in it."""
    if path.name.isdigit() and not (path / "checkpoints").is_dir():
        return CheckpointStore(path.parent), int(path.name)
    store = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    steps = store.steps()
    if not steps:
        raise CheckpointError(
            f"there is no checkpoint in {str(path)!r}", hint="name a run directory or one of its steps"
        )
    return store, steps[-1]


def _describer(training: Training) -> Callable[[int, Program, Any], CheckpointInfo]:
    versions = _versions()

    def describe(step: int, program: Program, position: Any) -> CheckpointInfo:
        plan = program.plan
        return CheckpointInfo(
            step=step,
            run_id="" if training.run is None else training.run.run_id,
            name=training.name,
            seed=training.seed,
            model_fingerprint=plan.model_fingerprint,
            leaves=leaf_types(program.abstract_tree()),
            plan_id=plan.plan_id,
            grid=str(plan.grid),
            plan=plan.to_json(),
            data_position=position,
            data_fingerprint=training.feed.fingerprint,
            versions=versions,
        )

    return describe


@contextmanager
def _journal(training: Training) -> Iterator[Journal]:
    """The run's journal, with log and tracker behind it where there are any."""
    if training.supervised is not None and not training.supervised.leads:
        yield Journal()
        return
    if training.run is None:
        yield Journal(callbacks=training.callbacks)
        return
    with EventLog(training.run.path / "events.jsonl") as log:
        journal = Journal(log, training.callbacks)
        # Started now, so that a slow tracker opens while plans are searched and compiled.
        sink = None if training.tracker is None else Sink(training.tracker, log, on_warning=journal.warn)
        try:
            yield journal
        finally:
            if sink is not None and training.signals.received is None:
                sink.close()
            elif sink is not None:  # whoever stops a run waits for it; `track sync` sends what is left
                sink.close(INTERRUPTED_CLOSE_TIMEOUT_S)


def _facts(training: Training) -> dict[str, Any]:
    host = {
        "hostname": platform.node(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "devices": [d.device_kind for d in jax.devices()],
    }
    return {"command": sys.argv, "versions": _versions(), "host": host, **training.record}


def _versions() -> dict[str, str]:
    found = {}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, NonFiniteLossError):
        return "nonfinite"
    if isinstance(error, SystemExit):
        return "terminated"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "SIGTERM before the first step"
    return f"{type(error).__name__}: {error}"
