"""The owner of a job's processes, which outlives all of them.

Starts a group, watches it, and starts the next: when a process died or hangs, with the same plan from the last
complete checkpoint; when the training asks for devices that its processes do not have, with the new plan from
the state that was handed over. While planning and starting the next group costs time, the old one trains on. It
holds no state of the training and never looks for devices.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arena_jax.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUMABLE
from arena_jax.grid import Allocation, GridShape, Pause, Plan, Request, SchedulerHook, Stop
from arena_jax.processes.children import Children
from arena_jax.processes.group import Child, Group, Work
from arena_jax.processes.line import Message
from arena_jax.processes.messages import arrival_of_change, arrival_of_restart, report_from_json, request_to_json
from arena_jax.processes.rehearsal import Rehearsal
from arena_jax.processes.states import HandedOver, States
from arena_jax.runtime.signals import StopSignals

_TICK_S = 0.1
_PREPARE_EVERY_S = 5.0
_START_S = 900.0
# Seconds in which a group that has finished may end by itself.
_GRACE_S = 10.0
# Deaths in a row, without a step further than ever before, after which the run is given up; and after which a plan
# that never made a step is given up for the one before it.
_MOST_DEATHS = 5
_MOST_DEATHS_OF_NEW = 2


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: exit code.
        report: the leader's last report, as ``train --json`` prints it.
        error, hint: what went wrong.
        num_restarts: groups that were started after a death.
    """

    code: int
    report: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    hint: str = ""
    num_restarts: int = 0


class Supervisor:
    """Runs one job to its end.

    Args:
        work: what every process is started with.
        plan: to begin with; ``None`` plans for ``target`` first.
        target: grid or allocation to begin on.
        facts: estimate and engine of ``plan``.
        hook: the scheduler's half, asked from here because it must outlive every process.
        signals: whose signal ends the run.
        resume_step: the run's checkpoint to begin from; ``None`` for the beginning.
        overlap: whether the processes of a new plan are started while the old ones still train.
        say: takes lines for the person watching.
    """

    def __init__(
        self,
        work: Work,
        *,
        target: GridShape | Allocation,
        signals: StopSignals,
        plan: Plan | None = None,
        facts: Mapping[str, Any] | None = None,
        hook: SchedulerHook | None = None,
        resume_step: int | None = None,
        overlap: bool = True,
        say: Any = print,
    ) -> None:
        self._hook = hook
        self._signals = signals
        self._overlap = overlap
        self._say = say
        self._children = Children(work)
        self._states = States(work.run_path / "checkpoints", resume_step)
        self._group: Group | None = None
        self._proven: Group | None = None
        self._rehearsal: Rehearsal | None = None
        self._arrival: dict[str, Any] | None = None
        self._wanted: Request | None = None
        self._passed_on: Request | None = None
        self._paused = False
        self._forwarded = False
        self._best_step = -1
        self._num_deaths = 0
        self._num_restarts = 0
        self._asked_to_prepare_s = -_PREPARE_EVERY_S
        self._prepare: list[str] = []
        self._microbatches: int | None = None
        self._next: Mapping[str, Any] | None = None
        self._ended: Ended | None = None
        if plan is None:
            self._rehearse(str(target), None, None)
        else:
            self._begin(plan, facts or {})

    def run(self) -> Ended:
        """Supervise until the run ends; leaves no process behind."""
        try:
            before_s = time.monotonic()
            while self._ended is None:
                for child, message in self._children.messages(_TICK_S):
                    self._hear(child, message)
                now_s = time.monotonic()
                # While this process was stopped, the others may have been, too.
                tick_s, before_s = min(now_s - before_s, 2 * _TICK_S), now_s
                self._watch(tick_s)
                self._obey_signals()
                self._serve_hook()
            return self._ended
        finally:
            self._end_rehearsal()
            if self._group is not None:
                self._drop(self._group, _GRACE_S if self._ended is not None and not self._ended.code else 0.0)
            if self._ended is None or self._ended.code:
                self._states.keep()
            self._states.forget()
            self._children.close()

    # Groups

    def _begin(self, plan: Plan, facts: Mapping[str, Any]) -> None:
        """Start a group for a plan, or take the one that was started ahead."""
        ahead = None if self._rehearsal is None else self._rehearsal.take(plan)
        self._end_rehearsal()
        self._group = ahead or self._children.start(plan, facts)
        self._paused = False
        self._microbatches = plan.num_microbatches
        self._go_if_ready(self._group)

    def _drop(self, group: Group, grace_s: float = 0.0) -> None:
        self._children.drop(group, grace_s)
        self._group = None

    def _go_if_ready(self, group: Group) -> None:
        if group.going or not group.ready or group is not self._group:
            return
        group.going = True
        self._children.note(group)
        step, folder = self._states.last(has_stepped=self._best_step >= 0)
        group.say(do="go", resume_step=step, resume_from=folder, arrival=self._arrival)

    def _watch(self, tick_s: float) -> None:
        group, rehearsal = self._group, self._rehearsal
        if rehearsal is not None and rehearsal.watch(tick_s, ahead=self._starts_ahead):
            self._rehearsed(rehearsal)
        if group is None or self._ended is not None:
            return
        for child in group.children:
            if child.process.poll() is not None:  # what it said last may still be on its way
                for message in child.line.drain():
                    self._hear(child, message)
        if self._group is not group or self._ended is not None:
            return
        if group.step > self._best_step:
            self._best_step, self._num_deaths, self._proven = group.step, 0, group
        fault = group.fault(tick_s)
        if not fault and not group.going and time.monotonic() - group.started_s > _START_S:
            fault = f"the processes were not ready after {_START_S:.0f} s"
        if fault:
            self._lost(group, fault)
        elif group.going:
            self._states.forget_if_passed()

    def _lost(self, group: Group, why: str) -> None:
        """Start anew what died: the same plan, from the last complete state."""
        left_s = time.time()
        words = next((c.last_words() for c in group.children if c.process.returncode not in (None, -9)), "")
        self._drop(group)
        if self._rehearsal is not None and self._wanted is None:
            self._wanted = self._passed_on  # those who come must hear of it again
        self._end_rehearsal()
        if self._signals.received is not None:
            self._end_stopped(why)
            return
        self._num_deaths += 1
        self._num_restarts += 1
        self._forwarded = False
        if self._num_deaths >= _MOST_DEATHS:
            hint = f"see {group.leader.log.parent}" + (f"; the last lines:\n{words}" if words else "")
            self._end(EXIT_FAILED, error=f"given up after {self._num_deaths} deaths in a row: {why}", hint=hint)
            return
        plan, facts = group.plan, group.facts
        proven = self._proven
        if proven is not None and proven.plan != plan and self._num_deaths >= _MOST_DEATHS_OF_NEW:
            self._say(f"{why}; {plan.grid} never made a step, going back to {proven.plan.grid}")
            plan, facts = proven.plan, proven.facts
        else:
            self._say(f"{why}; starting anew from the last checkpoint")
        if self._arrival is None or group.going or plan is not group.plan:
            self._arrival = arrival_of_restart(left_s, why)
        self._begin(plan, facts)

    # What processes say

    def _hear(self, child: Child, message: Message) -> None:
        child.heard(message)
        rehearsal, group = self._rehearsal, self._group
        say = message.get("say")
        if rehearsal is not None and rehearsal.owns(child):
            if rehearsal.hear(child, message, ahead=self._starts_ahead):
                self._rehearsed(rehearsal)
        elif group is None or child not in group.children:
            return
        elif say == "ready":
            child.ready = True
            self._go_if_ready(group)
        elif say == "report" and self._hook is not None:
            self._call_hook(lambda hook: hook.report(report_from_json(message["report"])))
        elif say == "rehearse":
            self._microbatches = message["num_microbatches"]
            self._rehearse(message["target"], message["number"], message["num_microbatches"], start=message["urgent"])
        elif say == "cancel" and rehearsal is not None and rehearsal.number == message["number"]:
            self._end_rehearsal()
        elif say == "handed_over":
            self._states.hand_over(
                HandedOver(folder=Path(message["folder"]), step=message["step"], left_s=message["left_s"])
            )
            self._next = message["relaunch"]
        elif say == "end":
            child.ended = message
            if message.get("error"):
                self._failed(group, message)
            elif child is group.leader:
                self._leader_ended(group, message)

    def _failed(self, group: Group, message: Message) -> None:
        """An error that starting anew would not mend; a plan that never ran gives way to the one before it."""
        if not group.going and self._proven is not None and self._proven.plan != group.plan:
            self._num_deaths = _MOST_DEATHS_OF_NEW
            self._lost(group, message["error"])
        else:
            self._end(message["code"], error=message["error"], hint=message.get("hint", ""))

    def _leader_ended(self, group: Group, message: Message) -> None:
        reason = message.get("stop_reason")
        if reason in ("relaunch", "paused"):
            self._drop(group)
            self._arrival = None
            if self._signals.received is not None:
                self._end_stopped("")
            elif reason == "relaunch":
                self._relaunch(self._next)
            else:
                self._paused = True
                self._say(f"paused after step {message.get('steps')}; no process is running")
                rehearsal = self._rehearsal
                if rehearsal is not None:  # a deadline came before its plan
                    rehearsal.number = None
                    self._launch_rehearsed(rehearsal)
        else:
            self._end(message["code"], report=message["report"])

    def _relaunch(self, relaunch: Mapping[str, Any] | None) -> None:
        state = self._states.handed_over
        assert state is not None
        assert relaunch is not None
        self._arrival = arrival_of_change(relaunch, state.left_s)
        self._say(f"going from {relaunch['from']} to {relaunch['plan']['grid']} after step {state.step}")
        self._begin(
            Plan.from_json(relaunch["plan"]),
            {k: relaunch[k] for k in ("estimated_step_time_s", "engine")},
        )

    # Plans for groups to come

    def _rehearse(self, target: str, number: int | None, num_microbatches: int | None, *, start: bool = False) -> None:
        """Plan for a target; with ``start`` also start its processes, while others still train."""
        rehearsal = self._rehearsal
        if rehearsal is not None and rehearsal.start and not start:
            assert self._group is not None  # what may never be needed waits for what is
            self._group.leader.line.send(do="rehearsed", number=number, later=True)
            return
        if rehearsal is not None and rehearsal.start == start and rehearsal.target == target:
            rehearsal.number = number
            self._answer(rehearsal)
            return
        self._end_rehearsal()
        self._rehearsal = Rehearsal(self._children, target, number, num_microbatches, start=start)

    @property
    def _starts_ahead(self) -> bool:
        """Whether the processes of a plan are started as soon as it is found."""
        return self._overlap and self._group is not None

    def _rehearsed(self, rehearsal: Rehearsal) -> None:
        """Go on with what became of a rehearsal."""
        if self._group is None:
            self._launch_rehearsed(rehearsal)
        else:
            self._answer(rehearsal)

    def _answer(self, rehearsal: Rehearsal) -> None:
        if self._group is not None and rehearsal.answer(self._group.leader.line):
            self._end_rehearsal()

    def _launch_rehearsed(self, rehearsal: Rehearsal) -> None:
        """Start what was planned while no group runs: at the beginning, or out of a pause."""
        if rehearsal.is_planning:
            return
        if rehearsal.error is not None:
            message, hint = rehearsal.error
            self._end_rehearsal()
            if self._paused:
                self._say(f"cannot go to {rehearsal.target}: {message}")
            else:
                self._end(rehearsal.code, error=message, hint=hint)
            return
        assert rehearsal.plan is not None
        state = self._states.handed_over
        if self._paused and state is not None and self._proven is not None:
            wanted = self._wanted or self._passed_on
            self._arrival = arrival_of_change(
                {
                    "plan": rehearsal.plan.to_json(),
                    "from": str(self._proven.plan.grid),
                    "reason": "pause" if wanted is None else wanted.reason or "pause",
                    "id": None if wanted is None else wanted.id,
                    "background_s": 0.0,
                    "prepared": False,
                },
                state.left_s,
            )
        self._begin(rehearsal.plan, rehearsal.facts)

    def _end_rehearsal(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.end()

    # The scheduler and signals

    def _serve_hook(self) -> None:
        hook = self._hook
        if hook is None or self._ended is not None:
            return
        request = self._call_hook(lambda h: h.poll(max(self._best_step, 0)))
        if isinstance(request, GridShape | Allocation):
            request = Request(target=request)
        if request is not None:
            self._wanted = request
        now_s = time.monotonic()
        if now_s - self._asked_to_prepare_s > _PREPARE_EVERY_S and self._group is not None and self._group.going:
            self._asked_to_prepare_s = now_s
            targets = [str(target) for target in self._call_hook(lambda h: h.prepare()) or ()]
            if targets != self._prepare:
                self._prepare = targets
                self._group.leader.line.send(do="prepare", targets=targets)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the wanted request to the leader, or meet it here while there is none."""
        request = self._wanted
        if request is None:
            return
        if self._group is not None:
            if self._group.going:
                self._passed_on, self._wanted = request, None
                self._group.leader.line.send(do="request", request=request_to_json(request), id=request.id)
            return
        if self._paused and self._rehearsal is None:
            if isinstance(request.target, Stop):
                self._end(EXIT_RESUMABLE)
            elif not isinstance(request.target, Pause):
                self._rehearse(str(request.target), None, self._microbatches)
                return
            self._wanted = None

    def _call_hook(self, do: Any) -> Any:
        try:
            return do(self._hook)
        except Exception as error:
            self._say(f"the scheduler hook failed: {error}")
            return None

    def _obey_signals(self) -> None:
        received = self._signals.received
        if received is None or self._ended is not None:
            return
        if self._group is None or not self._group.going:
            self._end_stopped("")
        elif not self._forwarded:
            self._forwarded = True
            with suppress(OSError):
                os.kill(self._group.leader.process.pid, received)

    def _end_stopped(self, why: str) -> None:
        interrupted = self._signals.received == signal.SIGINT
        self._end(EXIT_INTERRUPTED if interrupted else EXIT_RESUMABLE, error=why)

    def _end(self, code: int, **how: Any) -> None:
        self._ended = Ended(code=code, num_restarts=self._num_restarts, **how)
