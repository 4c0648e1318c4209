"""The training loop: steps back to back, and everything else at the boundaries between them.

Between two steps the loop may evaluate, save, obey a scheduler or a signal. Each of these first
drains the steps in flight, so a state is only ever saved or moved when every loss up to it is known
to be finite. All ``step`` numbers count completed steps.
"""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax

from arena_jax.errors import ArenaError, NonFiniteLossError
from arena_jax.grid import Allocation, GridShape, Pause, Request, SchedulerHook, Stop
from arena_jax.runtime.checkpoint import CheckpointStore, Saved
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.contract import Compiled, LoopOptions, Outcome, Program, Recompile, StopReason, Swap
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.metrics import EvalMean, InFlight, StepRecord, is_bad, num_rows
from arena_jax.runtime.scheduler_line import SchedulerLine
from arena_jax.runtime.signals import StopSignals

_PAUSE_POLL_S = 0.2


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
        recompile: how to follow the scheduler to another grid.
        signals: whose signal ends the run; may be entered already.
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
        signals: StopSignals | None = None,
    ) -> None:
        self._compiled = compiled
        self._feed = feed
        self._options = options
        self._journal = journal
        self._describe = describe
        self._store = store
        self._eval_data = eval_data
        self._scheduler = SchedulerLine(hook, options, journal)
        self._recompile = recompile
        self._signals = signals or StopSignals()
        self._state: Any = None
        self._step = 0
        self._inflight = InFlight()
        self._history: list[StepRecord] = []
        self._swaps: list[Swap] = []

    def run(self, state: Any, *, first_step: int = 0) -> Outcome:
        """Train from ``state``, which has ``first_step`` completed steps and is used up.

        Raises:
            NonFiniteLossError: after the save under way, if any, is complete.
        """
        self._state, self._step = state, first_step
        del state  # so that a pause can free it
        with self._signals as signals:
            self._inflight.restart_clock()
            try:
                reason = self._train(signals)
                self._drain()
                self._end(reason)
            except Exception:
                if self._store is not None:  # what was being saved is from before the failure
                    self._log_saves(self._store.wait())
                raise
        return Outcome(
            state=self._state,
            program=self._compiled.program,
            estimated_step_time_s=self._compiled.estimated_step_time_s,
            step=self._step,
            stop_reason=reason,
            history=tuple(self._history),
            swaps=tuple(self._swaps),
        )

    def _train(self, signals: StopSignals) -> StopReason:
        options = self._options
        while True:
            self._log_saves([] if self._store is None else self._store.poll())
            if signals.received is not None:
                return "interrupted" if signals.received == signal.SIGINT else "terminated"
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
        program = self._compiled.program
        info = self._describe(self._step, program, self._feed.position())
        self._log_saves(self._store.save(self._step, program.save_tree(self._state), info))
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

    def _obey(self, signals: StopSignals) -> StopReason | None:
        """Ask the hook what is wanted at this boundary, and do it."""
        request = self._scheduler.poll(self._step)
        if request is None:
            return None
        if isinstance(request.target, Stop):
            return "stopped"
        if isinstance(request.target, Pause):
            return self._pause(signals)
        self._drain()
        self._swap(request)
        return None

    def _swap(self, request: Request) -> None:
        """Go on under the plan of another grid, with the same state, at this step boundary."""
        began_s = time.perf_counter()
        source = self._compiled.program.plan.grid
        compiled = self._prepare(request)
        if compiled is None:
            return
        background_s = time.perf_counter() - began_s
        old = self._compiled.program
        self._state = compiled.program.load_tree(old.save_tree(self._state))
        jax.block_until_ready(jax.tree.leaves(self._state))
        self._adopt(compiled, source, request, background_s, stall_s=time.perf_counter() - began_s)

    def _prepare(self, request: Request) -> Compiled | None:
        """Plan and compile for a request; a request that cannot be met is refused, not fatal."""
        target = request.target
        assert isinstance(target, GridShape | Allocation)
        if self._recompile is None or target in (self._compiled.program.plan.grid,):
            return None
        try:
            return self._recompile(target, request.devices)
        except Exception as error:  # whatever fails here, the plan that runs is still good
            why = error.message if isinstance(error, ArenaError) else f"{type(error).__name__}: {error}"
            message = f"cannot go to {target}: {why}"
            self._scheduler.refuse(message)
            self._journal.warn(message)
            self._report("running")
            self._inflight.restart_clock()
            return None

    def _adopt(
        self, compiled: Compiled, source: GridShape, request: Request, background_s: float, *, stall_s: float
    ) -> None:
        plan = compiled.program.plan
        self._compiled = compiled
        swap = Swap(
            step=self._step,
            source=source,
            target=plan.grid,
            reason=request.reason,
            background_s=background_s,
            stall_s=stall_s,
        )
        self._swaps.append(swap)
        self._journal.emit("swap", **swap.to_json())
        self._journal.plan(plan, step=self._step, reason="swap", compiled=compiled)
        self._report("running")
        self._inflight.restart_clock()

    def _pause(self, signals: StopSignals) -> StopReason | None:
        """Save, move the state to host memory so that the devices are free, and wait to go on."""
        began_s = time.perf_counter()
        self._drain()
        self._save()
        if self._store is not None:
            self._log_saves(self._store.wait())
        source = self._compiled.program.plan.grid
        tree = jax.device_get(self._compiled.program.save_tree(self._state))
        self._state = None
        self._journal.emit("pause", step=self._step)
        self._report("paused")
        compiled: Compiled | None = self._compiled
        while True:
            time.sleep(_PAUSE_POLL_S)
            request = self._scheduler.poll(self._step)
            stopping = signals.received is not None or (request is not None and isinstance(request.target, Stop))
            if stopping:  # the state comes back, so that the caller still gets a model
                self._state = self._compiled.program.load_tree(tree)
                return None if signals.received is not None else "stopped"
            if request is None or isinstance(request.target, Pause):
                continue
            prepared_s = time.perf_counter()
            if request.target != source:
                compiled = self._prepare(request)
                if compiled is None:
                    continue
            assert compiled is not None
            background_s = time.perf_counter() - prepared_s
            self._state = compiled.program.load_tree(tree)
            request = replace(request, reason=request.reason or "pause")
            self._adopt(compiled, source, request, background_s, stall_s=time.perf_counter() - began_s)
            return None

    def _report(self, state: str) -> None:
        self._scheduler.report(state, self._step, self._history, self._compiled)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
