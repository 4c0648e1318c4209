"""A plan on its way in another process, and then the group that was started for it while another one trains."""

from collections.abc import Mapping
from typing import Any

from arena_jax.errors import EXIT_FAILED, EXIT_INFEASIBLE
from arena_jax.grid import Plan
from arena_jax.processes.children import Children
from arena_jax.processes.group import Child, Group
from arena_jax.processes.line import Line, Message


class Rehearsal:
    """Plans for a target from the moment it is made.

    Args:
        children: starts its processes.
        target: grid or allocation.
        number: of the question that the leader of the running group has asked; ``None`` where nobody waits.
        num_microbatches: to plan with; ``None`` for automatic.
        start: whether the plan's processes are started, too; otherwise the plan is only found.

    Attributes:
        plan: what was found; ``None`` while it is not.
        facts: estimate and engine of ``plan``.
        error: what went wrong, and a hint.
        code: exit code of the planning.
    """

    def __init__(
        self, children: Children, target: str, number: int | None, num_microbatches: int | None, *, start: bool
    ) -> None:
        self.target = target
        self.number = number
        self.start = start
        self.plan: Plan | None = None
        self.facts: Mapping[str, Any] = {}
        self.error: tuple[str, str] | None = None
        self.code = EXIT_INFEASIBLE
        self._children = children
        self._planning: Child | None = children.start_planning(target, num_microbatches)
        self._group: Group | None = None

    @property
    def is_planning(self) -> bool:
        """Whether neither plan nor error is there."""
        return self._planning is not None

    def owns(self, child: Child) -> bool:
        """Whether a process is one of its own."""
        return child is self._planning or (self._group is not None and child in self._group.children)

    def hear(self, child: Child, message: Message, *, ahead: bool) -> bool:
        """Take a message of one of its processes; True where there may be something to answer now.

        Args:
            ahead: whether a wanted plan's processes are started as soon as it is found.
        """
        say = message.get("say")
        if child is self._planning:
            if say not in ("planned", "end"):
                return False
            self._planned(message, ahead=ahead)
        elif say == "ready":
            child.ready = True
        elif say == "end":
            self._give_up(message.get("error", "it ended early"), message.get("hint", ""))
        else:
            return False
        return True

    def watch(self, tick_s: float, *, ahead: bool) -> bool:
        """Look for processes that died or hang, every ``tick_s`` seconds; True as :meth:`hear`."""
        child, news = self._planning, False
        if child is not None and (child.process.poll() is not None or child.line.closed):
            last: Message = {"say": "end", "error": f"planning ended: {child.death()}", "code": EXIT_FAILED}
            for message in [*child.line.drain(), last]:  # what it said last may still be on its way
                if child is self._planning:
                    news |= self.hear(child, message, ahead=ahead)
        if self._group is not None:
            fault = self._group.fault(tick_s)
            if fault:
                self._give_up(fault, "")
                news = True
        return news

    def answer(self, leader: Line) -> bool:
        """Answer whoever waits, where there is an answer; True where nothing of the rehearsal is needed after that."""
        if self.number is None:
            return False
        if self.error is not None:
            leader.send(do="rehearsed", number=self.number, error=self.error[0], hint=self.error[1])
            return True
        if self.plan is None or not (self._group is None or self._group.ready):
            return False
        leader.send(do="rehearsed", number=self.number, plan=self.plan.to_json(), **dict(self.facts))
        return not self.start

    def take(self, plan: Plan) -> Group | None:
        """The group that was started ahead, where it is for this plan; it is the caller's from now on."""
        if self._group is None or self._group.plan != plan:
            return None
        group, self._group = self._group, None
        return group

    def end(self) -> None:
        """End its processes."""
        if self._planning is not None:
            self._children.kill(self._planning)
        if self._group is not None:
            self._children.drop(self._group)

    def _planned(self, message: Message, *, ahead: bool) -> None:
        assert self._planning is not None
        child, self._planning = self._planning, None
        self._children.kill(child)
        if "plan" in message:
            self.plan = Plan.from_json(message["plan"])
            self.facts = {k: message.get(k) for k in ("estimated_step_time_s", "engine")}
            if self.start and ahead:
                self._group = self._children.start(self.plan, self.facts)
        else:
            self.error = message.get("error", "planning failed"), message.get("hint", "")
        self.code = message.get("code", EXIT_INFEASIBLE)

    def _give_up(self, error: str, hint: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._children.drop(group)
        self.error = error, hint
