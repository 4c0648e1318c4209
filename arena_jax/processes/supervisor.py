"""The owner of a job's processes, which outlives all of them.

Starts a group, watches it, and starts the next: when a process died or hangs, with the same plan from the last
complete checkpoint; when the training asks for devices that its processes do not have, with the new plan from
the state that was handed over. While planning and starting the next group costs time, the old one trains on. It
holds no state of the training and never looks for devices.
"""

import json
import os
import selectors
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arena_jax.errors import (
    EXIT_FAILED,
    EXIT_INFEASIBLE,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
)
from arena_jax.grid import Allocation, GridShape, Pause, Plan, Request, SchedulerHook, Stop, parse_target
from arena_jax.processes.group import Child, Group, Work, start_group, start_planning
from arena_jax.processes.line import Message
from arena_jax.processes.messages import report_from_json, request_to_json
from arena_jax.runtime.checkpoint_info import complete_steps
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


@dataclass(eq=False)
class _Rehearsal:
    """A plan on its way, and then the group that was started for it."""

    target: str
    number: int | None  # the leader's; None where nobody waits for the answer
    start: bool
    child: Child | None
    plan: Plan | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    group: Group | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class _HandedOver:
    """A state between two groups."""

    folder: Path
    step: int
    left_s: float

    @property
    def whole(self) -> bool:
        """Whether it is still there."""
        return self.step in complete_steps(self.folder)


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
        self._work = work
        self._hook = hook
        self._signals = signals
        self._resume_step = resume_step
        self._overlap = overlap
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._group: Group | None = None
        self._proven: Group | None = None
        self._rehearsal: _Rehearsal | None = None
        self._handed_over: _HandedOver | None = None
        self._arrival: dict[str, Any] | None = None
        self._wanted: Request | None = None
        self._passed_on: Request | None = None
        self._paused = False
        self._forwarded = False
        self._best_step = -1
        self._num_deaths = 0
        self._num_restarts = 0
        self._num_groups = 0
        self._asked_to_prepare_s = -_PREPARE_EVERY_S
        self._prepare: list[str] = []
        self._microbatches: int | None = None
        self._next: Mapping[str, Any] | None = None
        self._code_of_planning = EXIT_INFEASIBLE
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
                for key, _ in self._selector.select(_TICK_S):
                    child: Child = key.data
                    for message in child.line.receive():
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
                self._keep_handed_over()
            self._forget_handed_over()
            self._selector.close()

    @property
    def _checkpoints(self) -> Path:
        return self._work.run_path / "checkpoints"

    # Groups

    def _begin(self, plan: Plan, facts: Mapping[str, Any]) -> None:
        """Start a group for a plan, or take the one that was started ahead."""
        ahead = None if self._rehearsal is None else self._rehearsal.group
        if ahead is not None and ahead.plan == plan:
            assert self._rehearsal is not None
            self._rehearsal.group, self._group = None, ahead
            self._end_rehearsal()
        else:
            self._end_rehearsal()
            self._group = self._start(plan, facts)
        self._paused = False
        self._microbatches = plan.num_microbatches
        self._go_if_ready(self._group)

    def _start(self, plan: Plan, facts: Mapping[str, Any]) -> Group:
        group = start_group(self._work, plan, self._num_groups, facts)
        self._num_groups += 1
        for child in group.children:
            self._selector.register(child.line, selectors.EVENT_READ, child)
        return group

    def _note(self, group: Group) -> None:
        """Leave word of who runs, for people with questions."""
        said = {
            "supervisor": os.getpid(),
            "group": group.number,
            "grid": str(group.plan.grid),
            "processes": [child.process.pid for child in group.children],
        }
        with suppress(OSError):
            temporary = self._work.run_path / "processes" / "group.tmp"
            temporary.write_text(json.dumps(said), encoding="utf-8")
            temporary.rename(temporary.with_suffix(".json"))

    def _drop(self, group: Group, grace_s: float = 0.0) -> None:
        for child in group.children:
            self._unregister(child)
        group.end(grace_s)
        if group is self._group:
            self._group = None

    def _unregister(self, child: Child) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(child.line)

    def _go_if_ready(self, group: Group) -> None:
        if group.going or not group.ready or group is not self._group:
            return
        group.going = True
        self._note(group)
        step, folder = self._where_to_begin()
        group.say(do="go", resume_step=step, resume_from=folder, arrival=self._arrival)

    def _where_to_begin(self) -> tuple[int | None, str | None]:
        """The last complete state: the one handed over, or a checkpoint of the run."""
        # Until a boundary was reached, later checkpoints than the one asked for may still be in place.
        saved = complete_steps(self._checkpoints) if self._best_step >= 0 else []
        handed_over = self._handed_over
        if handed_over is not None and handed_over.step >= max(saved, default=-1) and handed_over.whole:
            return handed_over.step, str(handed_over.folder)
        return (saved[-1] if saved else self._resume_step), None

    def _watch(self, tick_s: float) -> None:
        group, rehearsal = self._group, self._rehearsal
        if rehearsal is not None:
            self._watch_rehearsal(rehearsal, tick_s)
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
        elif self._handed_over is not None and group.going:
            steps = complete_steps(self._checkpoints)
            if steps and steps[-1] > self._handed_over.step:
                self._forget_handed_over()

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
            self._arrival = {"swap": None, "left_s": left_s, "why": why}
        self._begin(plan, facts)

    # What processes say

    def _hear(self, child: Child, message: Message) -> None:
        child.heard(message)
        rehearsal, group = self._rehearsal, self._group
        say = message.get("say")
        if rehearsal is not None and child is rehearsal.child:
            self._planned(rehearsal, message)
        elif rehearsal is not None and rehearsal.group is not None and child in rehearsal.group.children:
            self._hear_ahead(rehearsal, child, message)
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
            folder = Path(message["folder"])
            if self._handed_over is not None and self._handed_over.folder != folder:
                self._forget_handed_over()
            self._handed_over = _HandedOver(folder=folder, step=message["step"], left_s=message["left_s"])
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
        assert self._handed_over is not None
        assert relaunch is not None
        self._arrival = _arrival(relaunch, self._handed_over.left_s)
        self._say(f"going from {relaunch['from']} to {relaunch['plan']['grid']} after step {self._handed_over.step}")
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
            self._answer_if_ready(rehearsal)
            return
        self._end_rehearsal()
        child = start_planning(self._work, target, parse_target(target).num_devices, num_microbatches)
        self._selector.register(child.line, selectors.EVENT_READ, child)
        self._rehearsal = _Rehearsal(target=target, number=number, child=child, start=start)

    def _planned(self, rehearsal: _Rehearsal, message: Message) -> None:
        if message.get("say") not in ("planned", "end"):
            return
        assert rehearsal.child is not None
        child, rehearsal.child = rehearsal.child, None
        self._unregister(child)
        child.kill()
        if "plan" in message:
            rehearsal.plan = Plan.from_json(message["plan"])
            rehearsal.facts = {k: message.get(k) for k in ("estimated_step_time_s", "engine")}
            if rehearsal.start and self._overlap and self._group is not None:
                rehearsal.group = self._start(rehearsal.plan, rehearsal.facts)
        else:
            rehearsal.error = message.get("error", "planning failed"), message.get("hint", "")
        self._code_of_planning = message.get("code", EXIT_INFEASIBLE)
        if self._group is None:
            self._launch_rehearsed(rehearsal)
        else:
            self._answer_if_ready(rehearsal)

    def _hear_ahead(self, rehearsal: _Rehearsal, child: Child, message: Message) -> None:
        if message.get("say") == "ready":
            child.ready = True
            self._answer_if_ready(rehearsal)
        elif message.get("say") == "end":
            self._give_up(rehearsal, message.get("error", "it ended early"), message.get("hint", ""))

    def _watch_rehearsal(self, rehearsal: _Rehearsal, tick_s: float) -> None:
        child = rehearsal.child
        if child is not None and (child.process.poll() is not None or child.line.closed):
            for message in child.line.drain():
                self._hear(child, message)
            if rehearsal.child is not None:
                self._planned(
                    rehearsal, {"say": "end", "error": f"planning ended: {child.death()}", "code": EXIT_FAILED}
                )
        if rehearsal.group is not None:
            fault = rehearsal.group.fault(tick_s)
            if fault:
                self._give_up(rehearsal, fault, "")

    def _give_up(self, rehearsal: _Rehearsal, error: str, hint: str) -> None:
        group, rehearsal.group = rehearsal.group, None
        if group is not None:
            self._drop(group)
        rehearsal.error = error, hint
        self._answer_if_ready(rehearsal)

    def _answer_if_ready(self, rehearsal: _Rehearsal) -> None:
        if rehearsal.number is None or self._group is None:
            return
        leader = self._group.leader.line
        if rehearsal.error is not None:
            leader.send(do="rehearsed", number=rehearsal.number, error=rehearsal.error[0], hint=rehearsal.error[1])
            self._end_rehearsal()
        elif rehearsal.plan is not None and (rehearsal.group is None or rehearsal.group.ready):
            leader.send(do="rehearsed", number=rehearsal.number, plan=rehearsal.plan.to_json(), **dict(rehearsal.facts))
            if not rehearsal.start:
                self._end_rehearsal()

    def _launch_rehearsed(self, rehearsal: _Rehearsal) -> None:
        """Start what was planned while no group runs: at the beginning, or out of a pause."""
        if rehearsal.child is not None:
            return
        if rehearsal.error is not None:
            message, hint = rehearsal.error
            self._end_rehearsal()
            if self._paused:
                self._say(f"cannot go to {rehearsal.target}: {message}")
            else:
                self._end(self._code_of_planning, error=message, hint=hint)
            return
        assert rehearsal.plan is not None
        if self._paused and self._handed_over is not None and self._proven is not None:
            wanted = self._wanted or self._passed_on
            self._arrival = _arrival(
                {
                    "plan": rehearsal.plan.to_json(),
                    "from": str(self._proven.plan.grid),
                    "reason": "pause" if wanted is None else wanted.reason or "pause",
                    "id": None if wanted is None else wanted.id,
                    "background_s": 0.0,
                    "prepared": False,
                },
                self._handed_over.left_s,
            )
        self._begin(rehearsal.plan, rehearsal.facts)

    def _end_rehearsal(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is None:
            return
        if rehearsal.child is not None:
            self._unregister(rehearsal.child)
            rehearsal.child.kill()
        if rehearsal.group is not None:
            self._drop(rehearsal.group)

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

    def _keep_handed_over(self) -> None:
        """Make a state between two groups a checkpoint of the run, where it is further than the last."""
        handed_over = self._handed_over
        if handed_over is None or not self._checkpoints.is_dir() or not handed_over.whole:
            return
        if handed_over.step > max(complete_steps(self._checkpoints), default=-1):
            # Under a name that is no checkpoint's until all of it is there.
            coming = self._checkpoints / f"{handed_over.step}.moving"
            shutil.move(handed_over.folder / str(handed_over.step), coming)
            coming.rename(self._checkpoints / str(handed_over.step))

    def _forget_handed_over(self) -> None:
        handed_over, self._handed_over = self._handed_over, None
        if handed_over is not None:
            shutil.rmtree(handed_over.folder, ignore_errors=True)


def _arrival(relaunch: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    return {
        "swap": {
            "from": relaunch["from"],
            "to": relaunch["plan"]["grid"],
            "reason": relaunch["reason"],
            "background_s": relaunch["background_s"],
            "prepared": relaunch["prepared"],
        },
        "id": relaunch["id"],
        "left_s": left_s,
        "why": relaunch["reason"],
    }
