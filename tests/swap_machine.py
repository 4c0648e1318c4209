"""Random sequences of requests, pauses and failures against a training of three numbers.

The loop, the compile-ahead thread and the scheduler's line are the real ones; the program is numpy, so
that a step takes microseconds and every interleaving is cheap. The machine decides when a step may run
and when a compilation ends, and how.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from arena_jax.errors import InfeasibleError
from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport, Stop
from arena_jax.runtime import changes as changes_module
from arena_jax.runtime import trainer as trainer_module
from arena_jax.runtime.contract import Compiled, LoopOptions, Outcome
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.move import Moved
from arena_jax.runtime.trainer import Trainer
from tests.doubles import one_stage_plan

# Looks before something counts as never coming, half a millisecond apart. Not a time: on a machine that
# stands still for a while nothing hangs.
NUM_LOOKS = 40_000
TIMEOUT_S = 600.0
GRIDS = tuple(GridShape.parse(f"cpu:{n}") for n in (1, 2, 4, 8))


def expected_loss(step: int) -> float:
    """What the program below gives: every sample's number once, in order."""
    return float(sum((i + 1) * 0.5**k for k, i in enumerate(reversed(range(step)))))


class NumpyProgram:
    """Adds a decaying sum of the batch numbers; its state must be handed on exactly."""

    def __init__(self, num_devices: int, gate: "Gate") -> None:
        self.plan = one_stage_plan(num_devices)
        self._gate = gate

    def step(self, state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        assert state["home"] == self.plan.grid, "a state of another plan was stepped"
        assert not self._gate.is_paused(), "a step ran although the job was paused"
        value = state["value"] * 0.5 + float(batch["number"][0]) + 1
        return {"home": self.plan.grid, "value": value}, {"loss": np.float64(value)}

    def save_tree(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"value": np.float64(state["value"])}

    def load_tree(self, tree: dict[str, Any]) -> dict[str, Any]:
        if self._gate.fail_move:
            self._gate.fail_move = False
            raise MemoryError("no room for the state")
        return {"home": self.plan.grid, "value": float(tree["value"])}

    def abstract_tree(self) -> dict[str, Any]:
        return {}

    def warm_up(self) -> None:
        pass

    def plan_move(self, other: Any) -> None:
        pass

    def take_from(self, state: Any, other: "NumpyProgram") -> tuple[Any, Moved]:
        moved = Moved(seconds=0.0, written_bytes=8, kept_bytes=0, parked_bytes=0, peak_bytes={})
        return self.load_tree(other.save_tree(state)), moved


class Gate:
    """What the machine controls, and what it sees."""

    def __init__(self) -> None:
        self.tokens = threading.Semaphore(0)
        self.waiting = threading.Event()  # the loop wants a batch and has no token
        self.given: list[int] = []
        self.is_paused: Callable[[], bool] = lambda: False
        self.fail_move = False
        self.compiling = threading.Event()
        self.verdict: threading.Event = threading.Event()
        self.fail_compile = False
        self.open = False  # at the end everything may pass

    # As the loader.

    def __next__(self) -> dict[str, np.ndarray]:
        if not self.tokens.acquire(blocking=False):
            self.waiting.set()
            self.tokens.acquire()
            self.waiting.clear()
        self.given.append(len(self.given))
        return {"number": np.array([self.given[-1]])}

    def get_state(self) -> int:
        return len(self.given)

    def set_state(self, state: int) -> None:
        raise AssertionError

    # As the planner.

    def recompile(self, target: Any, devices: Sequence[int] | None) -> Compiled:
        if not self.open:
            self.verdict.clear()
            self.compiling.set()
            assert self.verdict.wait(TIMEOUT_S)
        fail, self.fail_compile = self.fail_compile, False
        if fail:
            raise RuntimeError("XLA gave up")
        num_devices = target.num_devices
        if 8 % num_devices:
            raise InfeasibleError(f"8 rows do not divide over {num_devices} devices")
        return Compiled(program=NumpyProgram(num_devices, self))

    def let_compile(self) -> None:
        self.compiling.clear()
        self.verdict.set()


class Hook:
    """Hands over one request at a time."""

    def __init__(self, gate: Gate) -> None:
        self.request: Any = None
        self.raise_next = False
        self.num_polls = 0
        self.reports: list[StepReport] = []
        self.grids: list[GridShape] = []

    def poll(self, step: int) -> Any:
        self.num_polls += 1
        if self.raise_next:
            self.raise_next = False
            raise ConnectionError("the scheduler is away")
        request, self.request = self.request, None
        return request

    def report(self, report: StepReport) -> None:
        self.reports.append(report)

    def prepare(self) -> list[GridShape]:
        return self.grids


class SwapMachine(RuleBasedStateMachine):
    """One training; hypothesis chooses what happens to it."""

    @initialize()
    def start(self) -> None:
        self.usual = trainer_module._PAUSE_POLL_S, changes_module._RETRY_S
        trainer_module._PAUSE_POLL_S, changes_module._RETRY_S = 0.002, 0.0
        self.gate, self.events = Gate(), []
        self.gate.is_paused = lambda: self.paused
        self.hook = Hook(self.gate)
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        first = NumpyProgram(2, self.gate)
        self.trainer = Trainer(
            compiled=Compiled(program=first),
            feed=Feed(self.gate),
            options=LoopOptions(num_steps=10_000, items_per_step=1, report_every_s=0.0),
            journal=Journal(None, [self.events.append]),
            describe=lambda *_: None,  # type: ignore[arg-type, return-value]
            hook=self.hook,
            recompile=self.gate.recompile,
        )
        # A hook that answers late is asked again without waiting, which is tested elsewhere; here a slow machine
        # must not let a request arrive a step after it was taken.
        self.trainer._scheduler._timeout_s = TIMEOUT_S
        self.thread = threading.Thread(target=self._run, args=(first,), daemon=True)
        self.thread.start()
        self._settle()

    def _run(self, first: NumpyProgram) -> None:
        try:
            self.outcome = self.trainer.run({"home": first.plan.grid, "value": 0.0})
        except BaseException as error:
            self.error = error

    @property
    def paused(self) -> bool:
        kinds = [e["kind"] for e in self.events if e["kind"] in ("pause", "plan")]
        return bool(kinds) and kinds[-1] == "pause"

    def _settle(self) -> None:
        """Wait until the loop waits for a batch, is paused, stands for a compilation, or is over."""
        for _ in range(NUM_LOOKS):
            if not self.thread.is_alive() or self.paused:
                return
            if self.gate.waiting.is_set():
                return
            if self.trainer._changes.must_wait and self.gate.compiling.is_set():
                return
            time.sleep(0.0005)
        raise AssertionError("the loop hangs")

    def _until(self, holds: Callable[[], bool], else_: str) -> None:
        for _ in range(NUM_LOOKS):
            if holds():
                return
            assert self.error is None, self.error
            time.sleep(0.0005)
        raise AssertionError(else_)

    def _ask(self, request: Any) -> None:
        """Give a request, and let one boundary come at which the loop takes it."""
        self.hook.request = request

        def taken() -> bool:
            self._boundary()  # if the loop has come to wait for a batch only now
            return self.hook.request is None

        self._until(taken, "the request was never taken")
        # Taken by the hook's thread; the loop has it when it asks again, or goes on to its next batch.
        asked = self.hook.num_polls
        self._until(
            lambda: self.hook.num_polls > asked or self.gate.waiting.is_set() or not self.thread.is_alive(),
            "the loop never got the request",
        )
        self._settle()

    def _boundary(self) -> None:
        if self.gate.waiting.is_set():
            given = len(self.gate.given)
            self.gate.waiting.clear()
            self.gate.tokens.release()
            self._until(lambda: len(self.gate.given) > given, "a batch was never drawn")
            self._settle()

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        for _ in range(count):
            self._boundary()

    @rule(grid=st.sampled_from(GRIDS), wait=st.booleans(), bare=st.booleans())
    def resize(self, grid: GridShape, wait: bool, bare: bool) -> None:
        self._ask(grid if bare else Request(target=grid, wait=wait, reason="fuzz"))

    @rule(count=st.sampled_from((3, 5, 6)))
    def resize_to_what_does_not_fit(self, count: int) -> None:
        self._ask(Request(target=Allocation("cpu", 1, count)))

    @rule()
    def shrink_now(self) -> None:
        self._ask(Request(target=GRIDS[0], deadline_s=0.0))

    @rule()
    def pause(self) -> None:
        self._ask(Request(target=Pause()))
        self._until(lambda: self.paused, "a pause does not begin")

    @rule()
    def cancel(self) -> None:
        """Ask for what runs: a pending change is forgotten, a pause ends."""
        self.gate.fail_move = False
        self._ask(Request(target=self.trainer._compiled.program.plan.grid))
        self._until(lambda: not self.paused, "a pause does not end")
        self._settle()
        assert self.trainer._changes.pending is None

    @rule(grids=st.lists(st.sampled_from(GRIDS), max_size=2, unique=True))
    def prepare(self, grids: list[GridShape]) -> None:
        self.hook.grids = grids
        self.trainer._asked_to_prepare_s = -1e9
        self._boundary()

    @rule(fail=st.booleans())
    def compilation_ends(self, fail: bool) -> None:
        if not self.gate.compiling.is_set():
            return
        self.gate.fail_compile = fail
        self.gate.let_compile()
        time.sleep(0.002)
        self._settle()
        self._boundary()

    @rule()
    def next_move_fails(self) -> None:
        self.gate.fail_move = True

    @rule()
    def hook_fails(self) -> None:
        self.hook.raise_next = True
        self._boundary()

    @rule(word=st.sampled_from(("cpu:4", 7, object())))
    def nonsense(self, word: Any) -> None:
        self._ask(word)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.error is None, self.error
        steps = [e for e in self.events if e["kind"] == "step"]
        assert [e["step"] for e in steps] == list(range(1, len(steps) + 1))
        for event in steps[-3:]:
            assert event["loss"] == expected_loss(event["step"])
        assert self.gate.given == list(range(len(self.gate.given)))
        swaps = [e for e in self.events if e["kind"] == "swap"]
        runs_on = ["cpu:2/s1", *(e["to"] for e in swaps)]
        assert [e["from"] for e in swaps] == runs_on[:-1]
        assert str(self.trainer._compiled.program.plan.grid) == runs_on[-1]

    def teardown(self) -> None:
        if not hasattr(self, "gate"):
            return
        self.gate.open, self.gate.fail_move = True, False
        self.gate.let_compile()
        self.hook.request = Request(target=Stop())
        for _ in range(NUM_LOOKS // 10):
            if not self.thread.is_alive():
                break
            self.gate.let_compile()
            if self.gate.waiting.is_set():
                self.gate.tokens.release()
            self.thread.join(0.005)
        trainer_module._PAUSE_POLL_S, changes_module._RETRY_S = self.usual
        assert not self.thread.is_alive(), "the loop does not end"
        assert self.error is None, self.error
        assert self.outcome is not None
        assert self.outcome.stop_reason == "stopped"
        assert len(self.outcome.history) == self.outcome.step == len(self.gate.given)
        for record in self.outcome.history:
            assert record.loss == expected_loss(record.step)
