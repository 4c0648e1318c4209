"""The training loop: steps back to back, and everything else at the boundaries between them.

Between two steps the loop may evaluate, save, obey a scheduler or a signal. Each of these first
drains the steps in flight, so a state is only ever saved or moved when every loss up to it is known
to be finite. All ``step`` numbers count completed steps.
"""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax

from arena_jax.errors import NonFiniteLossError, StateLostError
from arena_jax.grid import Allocation, GridShape, Pause, SchedulerHook, Stop, plan_difference
from arena_jax.runtime.ahead import AheadCompiler, Warm
from arena_jax.runtime.changes import Due, PlanChanges
from arena_jax.runtime.checkpoint import CheckpointStore, Saved
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.contract import (
    Arrival,
    Compiled,
    Elsewhere,
    LoopOptions,
    Outcome,
    Program,
    Recompile,
    Rehearsed,
    Relaunch,
    StopReason,
    Swap,
)
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.heap import old_objects_spared
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.metrics import EvalMean, InFlight, StepRecord, is_bad, num_rows
from arena_jax.runtime.move import Moved
from arena_jax.runtime.peers import Peers
from arena_jax.runtime.scheduler_line import SchedulerLine
from arena_jax.runtime.signals import StopSignals

_PAUSE_POLL_S = 0.1
# Seconds between questions to the hook what to compile ahead.
_PREPARE_EVERY_S = 5.0


class Trainer:
    """Runs one training from a state to its end.

    Args:
        compiled: the program to begin with.
        feed: training data, positioned at the first batch.
        options: see :class:`LoopOptions`.
        journal: takes every event.
        describe: makes the description of a checkpoint at (step, program, data position).
        store: where checkpoints go; ``None`` saves nothing.
        eval_data: iterated anew for each evaluation.
        hook: the scheduler's half; ``None`` when there is none.
        recompile: how to follow the scheduler to another grid; called on another thread.
        warm: fills the caches before ``recompile``, in another process.
        elsewhere: how to follow it to devices that this process does not have; ``None`` where it cannot.
        signals: whose signal ends the run; may be entered already.
        peers: the other processes of a job that spans several; all of them run such a loop. ``None`` for one.
    """

    def __init__(
        self,
        *,
        compiled: Compiled,
        feed: Feed,
        options: LoopOptions,
        journal: Journal,
        describe: Callable[[int, Program, Any], CheckpointInfo],
        store: CheckpointStore | None = None,
        eval_data: Iterable[Any] | None = None,
        hook: SchedulerHook | None = None,
        recompile: Recompile | None = None,
        warm: Warm | None = None,
        elsewhere: Elsewhere | None = None,
        signals: StopSignals | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers
        self._due: Due | None = None
        self._compiled = compiled
        self._feed = feed
        self._options = options
        self._journal = journal
        self._describe = describe
        self._store = store
        self._eval_data = eval_data
        self._scheduler = SchedulerLine(hook, options, journal)
        self._elsewhere = elsewhere
        self._relaunch: Relaunch | None = None
        self._ahead = None if recompile is None or hook is None else AheadCompiler(recompile, warm, elsewhere)
        self._changes = PlanChanges(self._ahead, self._scheduler, journal)
        self._devices: tuple[int, ...] | None = None
        self._asked_to_prepare_s = -_PREPARE_EVERY_S
        self._save_s = 0.0
        self._signals = signals or StopSignals()
        self._state: Any = None
        self._step = 0
        self._inflight = InFlight()
        self._history: list[StepRecord] = []
        self._swaps: list[Swap] = []

    def run(self, state: Any, *, first_step: int = 0, arrival: Arrival | None = None) -> Outcome:
        """Train from ``state``, which has ``first_step`` completed steps and is used up.

        Args:
            arrival: where the state comes from another process.

        Raises:
            NonFiniteLossError: after the save under way, if any, is complete.
        """
        self._state, self._step = state, first_step
        del state  # so that a pause can free it
        with self._signals as signals, nullcontext() if self._ahead is None else old_objects_spared():
            self._inflight.restart_clock()
            if self._ahead is not None:
                self._ahead.run_under(self._compiled.program)
                self._ahead.keep(self._compiled, None)
            if arrival is not None:
                self._arrive(arrival)
            try:
                reason = self._train(signals)
                self._drain()
                self._end(reason)
            except Exception:
                if self._store is not None:  # what was being saved is from before the failure
                    self._log_saves(self._store.wait())
                raise
            finally:
                self._scheduler.close()
                if self._ahead is not None:
                    self._ahead.close()
        return Outcome(
            state=self._state,
            program=self._compiled.program,
            estimated_step_time_s=self._compiled.estimated_step_time_s,
            step=self._step,
            stop_reason=reason,
            history=tuple(self._history),
            swaps=tuple(self._swaps),
            relaunch=self._relaunch,
        )

    def _train(self, signals: StopSignals) -> StopReason:
        options = self._options
        while True:
            self._log_saves([] if self._store is None else self._store.poll())
            reason = self._stopped_by(signals) if self._peers is None else self._agree(signals, self._peers)
            if reason is None and self._peers is None:
                reason = self._obey(signals)
            if reason is not None:
                return reason
            if self._step >= options.num_steps:
                return "done"
            try:
                batch = self._feed.next()
            except StopIteration:
                self._journal.warn(f"the data ended after step {self._step}; {options.num_steps} steps were asked for")
                return "data_ended"
            self._state, metrics = self._compiled.program.step(self._state, batch)
            self._step += 1
            self._inflight.push(self._step, metrics)
            self._record(self._inflight.due())
            if _due(self._step, options.eval_every) and self._step < options.num_steps:
                self._evaluate()
            if _due(self._step, options.checkpoint_every) and self._step < options.num_steps:
                self._save()

    def _end(self, reason: StopReason) -> None:
        if reason in ("relaunch", "paused"):  # the state is handed over; a save here would come twice
            if self._store is not None:
                self._log_saves(self._store.wait())
            self._report("moving" if reason == "relaunch" else "paused")
            return
        self._changes.drop("the run ended before its plan was compiled")
        if reason == "done" and self._options.eval_every and self._history:
            self._evaluate()
        self._save()
        if self._store is not None:
            self._log_saves(self._store.wait())
        if reason not in ("done", "data_ended") and not self._saves:
            self._journal.warn("nothing was saved and this run cannot be resumed: checkpoints are off")
        self._report("finished" if reason in ("done", "data_ended") else "stopped")

    # Metrics

    def _record(self, records: Iterable[StepRecord]) -> None:
        options, estimate = self._options, self._compiled.estimated_step_time_s
        for record in records:
            self._history.append(record)
            self._journal.emit(
                "step",
                step=record.step,
                loss=record.loss,
                metrics=record.metrics,
                step_time_s=record.step_time_s,
                rate=options.items_per_step / record.step_time_s,
                rate_unit=options.item_unit,
                estimated_step_time_s=estimate,
            )
            if is_bad(record):
                self._on_nonfinite(record)
        if self._scheduler.due:
            self._report("running")

    def _drain(self) -> None:
        self._record(self._inflight.drain())

    def _on_nonfinite(self, record: StepRecord) -> None:
        what = f"the loss of step {record.step} is {record.loss}"
        if record.loss == record.loss and abs(record.loss) != float("inf"):
            what = f"the gradient norm of step {record.step} is {record.metrics['grad_norm']}"
        if self._options.nonfinite == "skip":
            self._journal.warn(f"{what}; its update was skipped")
            return
        hint = "lower the learning rate, clip the gradient, or set nonfinite to 'skip'"
        raise NonFiniteLossError(what, step=record.step, hint=hint + self._good_checkpoints())

    def _good_checkpoints(self) -> str:
        """Leave only checkpoints that training can go on from, and say which they are."""
        if self._store is None:
            return ""
        self._log_saves(self._store.wait())
        # Those before the newest are proven: a finite loss was computed from them.
        for newest in self._store.steps()[-1:]:
            if self._store.set_aside_if_spoilt(newest):
                self._journal.warn(f"the checkpoint of step {newest} holds NaN or infinite parameters; it is set aside")
        steps = self._store.steps()
        return f"; good checkpoints: of steps {', '.join(map(str, steps))}" if steps else ""

    def _evaluate(self) -> None:
        if self._eval_data is None:
            return
        self._drain()
        mean = EvalMean()
        for batch in self._eval_data:
            mean.add(num_rows(batch), self._compiled.program.eval_values(self._state, batch))
        self._journal.emit("eval", step=self._step, metrics=mean.result())
        self._inflight.restart_clock()

    # Checkpoints

    @property
    def _saves(self) -> bool:
        return self._store is not None and self._options.checkpoint_every > 0

    def _save(self) -> None:
        if self._store is None or not self._saves:
            return
        self._drain()
        began_s = time.perf_counter()
        program = self._compiled.program
        info = self._describe(self._step, program, self._feed.position())
        self._log_saves(self._store.save(self._step, program.save_tree(self._state), info))
        self._save_s = time.perf_counter() - began_s
        self._inflight.restart_clock()

    def _log_saves(self, saves: Iterable[Saved]) -> None:
        for saved in saves:
            if saved.error is None:
                self._journal.emit(
                    "checkpoint",
                    step=saved.step,
                    path=str(saved.path),
                    seconds=saved.seconds,
                    blocked_s=saved.blocked_s,
                )
            else:
                self._journal.warn(
                    f"the checkpoint of step {saved.step} was not saved, training goes on: {saved.error}"
                )

    # The scheduler

    def _stopped_by(self, signals: StopSignals) -> StopReason | None:
        if signals.received is None:
            return None
        return "interrupted" if signals.received == signal.SIGINT else "terminated"

    def _agree(self, signals: StopSignals, peers: Peers) -> StopReason | None:
        """What all processes of the job do at this boundary; they change plans by leaving for other processes."""
        wish = self._wish(signals) if peers.leads else None
        recent = self._history[-1].step_time_s if self._history else 0.0
        decision: Any = peers.at_boundary(self._step, wish, step_time_s=recent)
        if decision not in ("relaunch", "paused"):
            return decision  # type: ignore[no-any-return]  # a wish of ours or of the leader's
        self._drain()
        due, self._due = self._due, None
        if due is not None:
            assert isinstance(due.compiled, Rehearsed)
            return self._leave(due, due.compiled, None)
        assert self._elsewhere is not None
        program = self._compiled.program
        try:
            self._elsewhere.hand_over(
                None, program.save_tree(self._state), self._describe(self._step, program, self._feed.position())
            )
        except Exception as error:
            self._journal.warn(f"cannot pause: {error}")
            self._inflight.restart_clock()
            return None
        if decision == "paused":
            self._journal.emit("pause", step=self._step, asked=self._changes.pending is None)
        return decision  # type: ignore[no-any-return]

    def _wish(self, signals: StopSignals) -> StopReason | None:
        """What the leader wants, of signals and scheduler; it takes effect a few steps later."""
        if self._peers is not None and self._peers.deciding:  # one at a time
            return None
        self._prepare_ahead()
        while True:
            reason = self._stopped_by(signals) or self._ask(signals)
            if reason is not None:
                return reason
            self._due = self._changes.due(self._compiled, self._devices)
            if self._due is not None:
                return "relaunch"
            if self._changes.overdue(self._margin_s()):
                return "paused"
            if not self._changes.must_wait:
                return None
            self._changes.wait(_PAUSE_POLL_S)

    def _obey(self, signals: StopSignals) -> StopReason | None:
        """Ask the hook what is wanted at this boundary, and do what can be done at it."""
        self._prepare_ahead()
        reason = self._ask(signals)
        while reason is None and self._changes.must_wait and not self._changes.overdue(self._margin_s()):
            if signals.received is not None:
                break
            self._drain()
            self._changes.wait(_PAUSE_POLL_S)
            due = self._changes.due(self._compiled, self._devices)
            reason = (None if due is None else self._change(due)) or self._ask(signals)
        if reason is not None:
            return reason
        due = self._changes.due(self._compiled, self._devices)
        if due is not None:
            return self._change(due)
        if self._changes.overdue(self._margin_s()):
            return self._pause(signals, asked=False)
        return None

    def _ask(self, signals: StopSignals) -> StopReason | None:
        request = self._scheduler.poll(self._step)
        if request is None:
            return None
        if isinstance(request.target, Stop):
            self._changes.drop()
            return "stopped"
        if isinstance(request.target, Pause):
            self._changes.drop()
            if self._peers is None:
                return self._pause(signals, asked=True)
            if self._elsewhere is not None:
                return "paused"
            self._scheduler.refuse("cannot pause: nothing watches over this job that could start it again")
            return None
        before = self._changes.pending
        self._changes.want(request, self._compiled, self._devices)
        if self._changes.pending not in (None, before):
            self._journal.emit("request", step=self._step, target=str(request.target), reason=request.reason)
            self._report("running")
        return None

    def _prepare_ahead(self) -> None:
        """Now and then, compile what the hook thinks likely."""
        now_s = time.monotonic()
        if self._ahead is None or now_s - self._asked_to_prepare_s < _PREPARE_EVERY_S:
            return
        grids = self._scheduler.proposals()
        if grids is not None:
            self._asked_to_prepare_s = now_s
            self._ahead.prepare(grids)
        for target, error in self._ahead.take_failures():
            why = getattr(error, "message", str(error))
            self._journal.warn(f"cannot prepare {target}: {why}", once=True)

    def _margin_s(self) -> float:
        """How long before a deadline to begin: a step in flight and a save come first."""
        recent = self._history[-1].step_time_s if self._history else 0.0
        return 3 * recent + 2 * self._save_s

    def _change(self, due: Due) -> StopReason | None:
        """Go on under another plan, with the same state, at this step boundary; here or in another process."""
        self._drain()
        old, compiled = self._compiled.program, due.compiled
        if isinstance(compiled, Rehearsed):
            return self._leave(due, compiled, None)
        try:
            self._state, moved = compiled.program.take_from(self._state, old)
        except StateLostError:
            raise
        except Exception as error:  # the state is where it was, and so is the plan that runs
            self._changes.failed(due.request, error)
            self._report("running")
            self._inflight.restart_clock()
            return None
        if moved.parked_bytes:
            self._journal.warn(
                f"{moved.parked_bytes} bytes of the state went through host memory: the devices had no room for "
                "the old and the new form of it"
            )
        self._adopt(due, compiled, stall_s=self._inflight.since_last_s(), moved=moved)
        return None

    def _leave(self, due: Due, rehearsed: Rehearsed, tree: dict[str, Any] | None) -> StopReason | None:
        """Hand the state (or ``tree``, which holds it) over to another process."""
        assert self._elsewhere is not None
        program, request = self._compiled.program, due.request
        assert isinstance(request.target, GridShape | Allocation)
        relaunch = Relaunch(
            step=self._step,
            request=request,
            rehearsed=rehearsed,
            source=program.plan.grid,
            why=self._elsewhere.why(request.target, request.devices),
            background_s=due.background_s,
            prepared=due.prepared,
        )
        try:
            self._elsewhere.hand_over(
                relaunch,
                program.save_tree(self._state) if tree is None else tree,
                self._describe(self._step, program, self._feed.position()),
            )
        except Exception as error:  # a full disk, say: the state is still here
            self._changes.failed(request, error)
            self._report("running" if tree is None else "paused")
            self._inflight.restart_clock()
            return None
        self._journal.emit(
            "relaunch",
            step=self._step,
            **{"from": str(relaunch.source), "to": str(rehearsed.plan.grid)},
            reason=request.reason,
            why=relaunch.why,
            background_s=due.background_s,
            prepared=due.prepared,
        )
        self._relaunch = relaunch
        return "relaunch"

    def _adopt(self, due: Due, compiled: Compiled, *, stall_s: float, moved: Moved | None = None) -> None:
        before, plan = self._compiled.plan, compiled.plan
        self._compiled, self._devices = compiled, due.request.devices
        swap = Swap(
            step=self._step,
            source=before.grid,
            target=plan.grid,
            reason=due.request.reason,
            background_s=due.background_s,
            stall_s=stall_s,
            prepared=due.prepared,
            move_s=0.0 if moved is None else moved.seconds,
            moved_bytes=0 if moved is None else moved.written_bytes,
            difference=plan_difference(before, plan),
        )
        self._swaps.append(swap)
        self._journal.emit("swap", **swap.to_json())
        self._journal.plan(plan, step=self._step, reason="swap", compiled=compiled)
        if self._ahead is not None:
            self._ahead.run_under(self._compiled.program)
        self._report("running")
        self._inflight.restart_clock()

    def _pause(self, signals: StopSignals, *, asked: bool) -> StopReason | None:
        """Save, move the state to host memory so that the devices are free, and wait to go on.

        Args:
            asked: whether for a ``Pause``; otherwise devices had to be freed before the plan of the pending
                request was compiled.
        """
        self._drain()
        began_s = time.perf_counter()
        self._save()
        if self._store is not None:
            self._log_saves(self._store.wait())
        tree = jax.device_get(self._compiled.program.save_tree(self._state))
        self._state = None
        self._journal.emit("pause", step=self._step, asked=asked)
        self._report("paused")
        while True:
            request = self._scheduler.poll(self._step)
            stopping = signals.received is not None or (request is not None and isinstance(request.target, Stop))
            if stopping:  # the state comes back, so that the caller still gets a model
                self._state = self._compiled.program.load_tree(tree)
                return None if signals.received is not None else "stopped"
            due = None
            if request is not None and isinstance(request.target, Pause):
                self._changes.drop()
            elif request is not None and self._changes.want(request, self._compiled, self._devices):
                due = Due(request=request, compiled=self._compiled, background_s=0.0, prepared=True)
            due = due or self._changes.due(self._compiled, self._devices)
            if due is None:
                if self._changes.pending is not None:
                    self._changes.wait(_PAUSE_POLL_S)
                else:
                    time.sleep(_PAUSE_POLL_S)
                continue
            compiled = due.compiled
            if isinstance(compiled, Rehearsed):
                if self._leave(due, compiled, tree) is not None:
                    return "relaunch"
                continue
            try:
                self._state = compiled.program.load_tree(tree)
            except Exception as error:
                self._changes.failed(due.request, error)
                self._report("paused")
                continue
            due = replace(due, request=replace(due.request, reason=due.request.reason or "pause"))
            self._adopt(due, compiled, stall_s=time.perf_counter() - began_s)
            return None

    def _arrive(self, arrival: Arrival) -> None:
        """Tell everybody what came of the request that this process was started for."""
        self._scheduler.resume(arrival.request_id)
        if arrival.swap is None:
            self._changes.cannot_reach(arrival.target, arrival.failed)
        else:
            self._swaps.append(arrival.swap)
            self._journal.emit("swap", **arrival.swap.to_json())
            self._journal.plan(self._compiled.plan, step=self._step, reason="swap", compiled=self._compiled)
        self._report("running")
        self._inflight.restart_clock()

    def _report(self, state: str) -> None:
        if state == "running" and self._changes.pending is not None:
            state = "preparing"
        self._scheduler.report(state, self._step, self._history, self._compiled)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
