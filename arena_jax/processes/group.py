"""One group of processes: started together, watched together, ended together."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arena_jax.grid import Plan
from arena_jax.processes.coordination import Service
from arena_jax.processes.line import Line, Message

# Seconds without a heartbeat, and without a step while training, after which a process hangs. They are counted in
# the supervisor's own time: while it is stopped itself, nobody is at fault.
SILENT_S = 30.0
STUCK_S = 600.0
_DYING_S = 1.0
_ENTRY = "arena_jax.cli.worker"
# What would give a worker other devices than its plan has.
_DEVICE_SETTINGS = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
_DEVICE_FLAG = "xla_force_host_platform_device_count"
_LOG_TAIL = 6


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every process of a run is started with, whatever the group.

    Attributes:
        recipe, overrides: name or path, and ``key=value``, from which each process loads the same recipe.
        num_steps: where the run ends; ``None`` for the recipe's.
        run_path, run_id: the run's directory.
        num_devices: devices that a group of one process has at least, so that it can grow without another.
    """

    recipe: str
    overrides: tuple[str, ...]
    num_steps: int | None
    run_path: Path
    run_id: str
    num_devices: int = 1


@dataclass(eq=False)
class Child:
    """A started process and what is known of it."""

    process: "subprocess.Popen[bytes]"
    line: Line
    log: Path
    rank: int = 0
    ready: bool = False
    step: int = -1
    silent_s: float = 0.0
    has_spoken: bool = False
    stuck_s: float = 0.0
    ended: Message | None = None

    def heard(self, message: Message) -> None:
        """Note a sign of life."""
        self.silent_s, self.has_spoken = 0.0, True
        step = message.get("step", self.step) if message.get("say") == "beat" else self.step
        if step != self.step or message.get("say") != "beat":
            self.step, self.stuck_s = step, 0.0

    def kill(self) -> None:
        """End it now; it is waited for."""
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.line.close()

    def death(self) -> str:
        """How it died, in words."""
        code = self.process.returncode
        if code is None:
            return f"process {self.rank} closed its line"
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        return f"process {self.rank} died: {how}"

    def last_words(self) -> str:
        """The end of its log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line[:200] for line in lines[-_LOG_TAIL:])


@dataclass(eq=False)
class Group:
    """Processes that run one plan together.

    Attributes:
        plan: what they run.
        number: of this group in the run, from 0.
        going: whether they were told where to begin.
    """

    plan: Plan
    number: int
    service: Service | None
    children: list[Child]
    going: bool = False
    started_s: float = field(default_factory=time.monotonic)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def leader(self) -> Child:
        """The process that logs and decides."""
        return self.children[0]

    @property
    def ready(self) -> bool:
        """Whether all have compiled."""
        return all(child.ready for child in self.children)

    @property
    def step(self) -> int:
        """The furthest boundary one has come to."""
        return max(child.step for child in self.children)

    def say(self, **message: Any) -> None:
        """Tell all."""
        for child in self.children:
            child.line.send(**message)

    def end(self, grace_s: float = 0.0) -> None:
        """Have all end, by force after ``grace_s``."""
        if grace_s:
            self.say(do="bye")
            end_s = time.monotonic() + grace_s
            for child in self.children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, end_s - time.monotonic()))
        for child in self.children:
            with suppress(OSError):
                child.process.kill()
        for child in self.children:
            child.kill()
        if self.service is not None:
            self.service.close()

    def fault(self, tick_s: float) -> str:
        """What is wrong with one of the processes, if anything; called every ``tick_s`` seconds."""
        for child in self.children:
            if child.ended is None and (child.process.poll() is not None or child.line.closed):
                with suppress(subprocess.TimeoutExpired):  # a closed line comes a moment before the death
                    child.process.wait(_DYING_S)
                return child.death()
        for child in self.children:
            if child.ended is not None:
                continue
            child.silent_s += tick_s if child.has_spoken else 0.0  # Python itself starts slowly at times
            child.stuck_s += tick_s if self.going else 0.0
            if child.silent_s > SILENT_S:
                return f"process {child.rank} gave no sign of life for {SILENT_S:.0f} s"
            if child.stuck_s > STUCK_S:
                return f"process {child.rank} made no step for {STUCK_S:.0f} s"
        return ""


def start_group(work: Work, plan: Plan, number: int, facts: Mapping[str, Any]) -> Group:
    """Start one process for each node of the plan's allocation.

    Args:
        facts: what the plan's estimate and engine are.
    """
    allocation = plan.grid.allocation
    count = allocation.num_nodes
    service = Service(count) if count > 1 else None
    children = []
    try:
        for rank in range(count):
            task = {
                "job": "train",
                "rank": rank,
                "num_processes": count,
                "coordinator": None if service is None else service.address,
                "num_devices": max(allocation.devices_per_node, work.num_devices if count == 1 else 1),
                "plan": plan.to_json(),
                "facts": dict(facts),
                "num_steps": work.num_steps,
                "run_id": work.run_id,
            }
            children.append(_start(work, task, rank, work.run_path / "processes" / f"{rank}.log", leads=rank == 0))
    except BaseException:
        for child in children:
            child.kill()
        if service is not None:
            service.close()
        raise
    return Group(plan=plan, number=number, service=service, children=children, facts=facts)


def start_planning(work: Work, target: str, num_devices: int, num_microbatches: int | None) -> Child:
    """Start a process that plans for a target and says what it found."""
    task = {
        "job": "plan",
        "target": target,
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "num_steps": work.num_steps,
        "run_id": work.run_id,
    }
    return _start(work, task, 0, work.run_path / "processes" / "plan.log", leads=False)


def _start(work: Work, task: dict[str, Any], rank: int, log: Path, *, leads: bool) -> Child:
    line, theirs = Line.pair()
    log.parent.mkdir(parents=True, exist_ok=True)
    task |= {
        "recipe": work.recipe,
        "overrides": list(work.overrides),
        "run_path": str(work.run_path),
        "line": theirs.fileno(),
        "parent": os.getpid(),
    }
    with theirs, log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", _ENTRY, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=None if leads else file,
            pass_fds=(theirs.fileno(),),
            # Ctrl-C is for the supervisor alone, which passes it on to the leader.
            start_new_session=True,
            env=_environment(),
        )
    return Child(process=process, line=line, log=log, rank=rank)


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _DEVICE_SETTINGS}
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if _DEVICE_FLAG not in flag]
    root = str(Path(__file__).resolve().parents[2])
    paths: Sequence[str | None] = [root, environment.get("PYTHONPATH")]
    return environment | {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
