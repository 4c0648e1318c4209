"""The processes that a supervisor has started, and what they say."""

import json
import os
import selectors
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from arena_jax.grid import Plan, parse_target
from arena_jax.processes.group import Child, Group, Work, start_group, start_planning
from arena_jax.processes.line import Message


class Children:
    """Starts groups and planning processes of one run, and listens to all of them.

    Args:
        work: what every process is started with.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._selector = selectors.DefaultSelector()
        self._num_groups = 0

    def start(self, plan: Plan, facts: Mapping[str, Any]) -> Group:
        """Start a group for a plan; ``facts`` are its estimate and engine."""
        group = start_group(self._work, plan, self._num_groups, facts)
        self._num_groups += 1
        for child in group.children:
            self._selector.register(child.line, selectors.EVENT_READ, child)
        return group

    def start_planning(self, target: str, num_microbatches: int | None) -> Child:
        """Start a process that plans for a target."""
        child = start_planning(self._work, target, parse_target(target).num_devices, num_microbatches)
        self._selector.register(child.line, selectors.EVENT_READ, child)
        return child

    def messages(self, timeout_s: float) -> Iterator[tuple[Child, Message]]:
        """What the processes say, for which is waited so long."""
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            for message in child.line.receive():
                yield child, message

    def drop(self, group: Group, grace_s: float = 0.0) -> None:
        """Hear a group no more and end it, by force after ``grace_s``."""
        for child in group.children:
            self._unregister(child)
        group.end(grace_s)

    def kill(self, child: Child) -> None:
        """Hear one process no more and end it now."""
        self._unregister(child)
        child.kill()

    def note(self, group: Group) -> None:
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

    def close(self) -> None:
        """Listen no more."""
        self._selector.close()

    def _unregister(self, child: Child) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(child.line)
