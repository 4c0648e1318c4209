"""The training loop, over a program that is one plain jit (see ``doubles``)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arena_jax.errors import DataError, InfeasibleError, NonFiniteLossError, UsageError
from arena_jax.events import EventLog, read_events
from arena_jax.grid import Allocation, GridShape, Pause, Request, StepReport, Stop
from arena_jax.runtime.checkpoint import CheckpointStore, leaf_types
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.contract import Compiled, LoopOptions, Outcome, Program, Rehearsed
from arena_jax.runtime.feed import Feed
from arena_jax.runtime.hooks import ScriptedHook
from arena_jax.runtime.journal import Journal
from arena_jax.runtime.metrics import InFlight
from arena_jax.runtime.signals import StopSignals
from arena_jax.runtime.trainer import Trainer
from tests.doubles import BATCH, JitProgram, ToyLoader, one_stage_plan


def describe(step: int, program: Program, position: Any) -> CheckpointInfo:
    plan = program.plan
    return CheckpointInfo(
        step=step,
        run_id="run",
        name="toy",
        seed=0,
        model_fingerprint=plan.model_fingerprint,
        leaves=leaf_types(program.abstract_tree()),
        plan_id=plan.plan_id,
        grid=str(plan.grid),
        plan=plan.to_json(),
        data_position=position,
    )


class Bench:
    """A trainer with everything around it, and the events it emitted."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 10,
        every: int = 0,
        eval_every: int = 0,
        loader: ToyLoader | None = None,
        program: JitProgram | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        **rest: Any,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.store = CheckpointStore(folder / "checkpoints")
        self.store.prepare()
        self.loader = loader or ToyLoader()
        self.program = program or JitProgram(one_stage_plan())
        self.log = EventLog(folder / "events.jsonl")
        nonfinite = rest.pop("nonfinite", "stop")

        def note(event: dict[str, Any]) -> None:
            self.events.append(event)
            on_event(event)

        self.trainer = Trainer(
            compiled=Compiled(program=self.program, estimated_step_time_s=0.5),
            feed=Feed(self.loader),
            options=LoopOptions(
                num_steps=steps,
                items_per_step=BATCH,
                samples_per_step=BATCH,
                eval_every=eval_every,
                checkpoint_every=every,
                nonfinite=nonfinite,
                report_every_s=0.0,
            ),
            journal=Journal(self.log, [note]),
            describe=describe,
            store=self.store,
            **rest,
        )

    def run(self) -> Outcome:
        return self.trainer.run(self.program.init(0))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def resume(self, folder_of: "Bench") -> Outcome:
        step = folder_of.store.steps()[-1]
        info = folder_of.store.read_info(step)
        self.loader.set_state(info.data_position)
        state = self.program.load_tree(folder_of.store.restore(step, self.program.abstract_tree()))
        return self.trainer.run(state, first_step=step)


def leaves(outcome: Outcome) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in outcome.program.save_tree(outcome.state).items()}


def assert_equal(a: Outcome, b: Outcome) -> None:
    left, right = leaves(a), leaves(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_every_step_is_recorded_once_in_order_and_in_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=7)
    outcome = bench.run()
    assert outcome.stop_reason == "done"
    assert outcome.step == 7
    assert [r.step for r in outcome.history] == [e["step"] for e in bench.of("step")] == list(range(1, 8))
    assert [e["step"] for e in read_events(tmp_path) if e["kind"] == "step"] == list(range(1, 8))
    assert outcome.history[-1].loss < outcome.history[0].loss
    event = bench.of("step")[0]
    assert event["rate"] == pytest.approx(BATCH / event["step_time_s"])
    assert event["estimated_step_time_s"] == 0.5
    assert bench.loader.given == list(range(7))


def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    outcome = Bench(tmp_path, steps=5).run()
    program, loader = JitProgram(one_stage_plan()), ToyLoader()
    state, losses = program.init(0), []
    for _ in range(5):
        state, metrics = program.step(state, next(loader))
        losses.append(float(metrics["loss"]))
    assert [r.loss for r in outcome.history] == losses


def test_metrics_are_fetched_late(tmp_path: Path) -> None:
    """Step k is looked at only once step k + 2 is on its way."""
    dispatched_when_seen: dict[int, int] = {}
    bench = Bench(
        tmp_path,
        steps=6,
        on_event=lambda e: (
            dispatched_when_seen.setdefault(e["step"], bench.program.num_steps_run) if e["kind"] == "step" else None
        ),
    )
    bench.run()
    assert dispatched_when_seen == {1: 3, 2: 4, 3: 5, 4: 6, 5: 6, 6: 6}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path, num_devices: int) -> None:
    whole = Bench(tmp_path / "whole", steps=10).run()
    first = Bench(tmp_path / "first", steps=6, every=3)
    first.run()
    assert first.store.steps() == [3, 6]
    second = Bench(tmp_path / "second", steps=10, program=JitProgram(one_stage_plan(num_devices)))
    outcome = second.resume(first)
    assert second.loader.given == [6, 7, 8, 9]
    assert [r.step for r in outcome.history] == [7, 8, 9, 10]
    if num_devices == 1:
        assert_equal(whole, outcome)
    else:
        for name, leaf in leaves(outcome).items():
            np.testing.assert_allclose(leaf, leaves(whole)[name], rtol=1e-4, atol=1e-6)


def test_evaluation_weighs_a_ragged_batch_by_its_rows_and_changes_nothing(tmp_path: Path) -> None:
    loader = ToyLoader(seed=1)
    batches = [next(loader), next(loader), {k: v[:3] for k, v in next(loader).items()}]
    everything = {k: np.concatenate([b[k] for b in batches]) for k in ("x", "y")}
    bench = Bench(tmp_path, steps=5, eval_every=2, eval_data=batches)
    outcome = bench.run()
    assert [e["step"] for e in bench.of("eval")] == [2, 4, 5]
    whole = bench.program.eval_values(outcome.state, everything)["loss"]
    assert bench.of("eval")[-1]["metrics"]["loss"] == pytest.approx(float(whole), rel=1e-6)
    assert_equal(outcome, Bench(tmp_path / "other", steps=5).run())


def test_evaluation_data_that_runs_dry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="evaluation data yields no batch"):
        Bench(tmp_path, steps=4, eval_every=1, eval_data=iter([next(ToyLoader())])).run()


def test_a_nan_stops_at_its_step_and_no_later_state_is_saved(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=10, every=2, loader=ToyLoader(bad_at=5))
    with pytest.raises(NonFiniteLossError, match="loss of step 5 is nan") as caught:
        bench.run()
    assert caught.value.step == 5
    assert "2, 4" in caught.value.hint
    assert bench.store.steps() == [2, 4]


def test_a_checkpoint_spoilt_by_an_overflowing_gradient_is_set_aside(tmp_path: Path) -> None:
    """The update of step 4 makes NaN parameters while its loss is finite; step 5 shows it."""

    def spoil(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: jnp.where(state == 3, jnp.nan, u), updates), state + 1

    overflowing = optax.GradientTransformation(lambda params: jnp.int32(0), spoil)
    program = JitProgram(one_stage_plan(), optimizer=optax.chain(optax.adam(1e-2), overflowing))
    bench = Bench(tmp_path, steps=10, every=2, program=program)
    with pytest.raises(NonFiniteLossError, match="step 5") as caught:
        bench.run()
    assert bench.store.steps() == [2]
    assert caught.value.hint.endswith("of steps 2")
    assert any("set aside" in e["message"] for e in bench.of("warning"))


def test_a_nan_can_be_skipped(tmp_path: Path) -> None:
    program = JitProgram(one_stage_plan(), nonfinite="skip")
    bench = Bench(tmp_path, steps=8, loader=ToyLoader(bad_at=5), program=program, nonfinite="skip")
    outcome = bench.run()
    assert outcome.step == 8
    assert np.isnan(outcome.history[4].loss)
    assert np.isfinite(outcome.history[5].loss)
    assert ["step 5" in e["message"] for e in bench.of("warning")] == [True]
    assert all(np.isfinite(leaf).all() for leaf in leaves(outcome).values())


def test_data_that_ends_early_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=10, every=100, loader=ToyLoader(num_batches=4))
    outcome = bench.run()
    assert (outcome.stop_reason, outcome.step) == ("data_ended", 4)
    assert bench.store.steps() == [4]


def test_a_batch_of_another_shape_is_refused(tmp_path: Path) -> None:
    class Ragged(ToyLoader):
        def __next__(self) -> dict[str, np.ndarray]:
            batch = super().__next__()
            return {k: v[:5] for k, v in batch.items()} if self.position == 3 else batch

    with pytest.raises(DataError, match=r"changed its form.*float32\[5,6\].*float32\[8,6\]"):
        Bench(tmp_path, loader=Ragged()).run()


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    before = signal.getsignal(number)
    bench = Bench(
        tmp_path,
        steps=10,
        every=100,
        on_event=lambda e: os.kill(os.getpid(), number) if e.get("step") == 3 and e["kind"] == "step" else None,
    )
    outcome = bench.run()
    assert outcome.stop_reason == reason
    assert outcome.step == len(outcome.history) == 5
    assert bench.store.steps() == [5]
    assert signal.getsignal(number) is before
    second = Bench(tmp_path / "second", steps=10)
    assert_equal(second.resume(bench), Bench(tmp_path / "whole", steps=10).run())


@pytest.fixture
def listening() -> Iterator[None]:
    """SIGINT as a terminal gives it: a shell lets what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    left: list[int] = []

    def leave(number: int) -> None:
        left.append(number)
        raise SystemExit

    def twice(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit):
        Bench(tmp_path, on_event=twice, signals=StopSignals(leave)).run()
    assert left == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        Bench(tmp_path / "library", on_event=twice).run()


def test_a_loop_outside_the_main_thread_trains(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(Bench(tmp_path, steps=3).run()))
    thread.start()
    thread.join()
    assert outcomes[0].step == 3


def test_a_failing_save_warns_and_training_goes_on(tmp_path: Path) -> None:
    def block(event: dict[str, Any]) -> None:
        blocker = bench.store.path(4)
        if event["kind"] == "step" and event["step"] == 3:
            blocker.write_text("in the way")
        if event["kind"] == "warning":
            blocker.unlink()

    bench = Bench(tmp_path, steps=8, every=2, on_event=block)
    assert bench.run().stop_reason == "done"
    (warning,) = bench.of("warning")
    assert "checkpoint of step 4 was not saved, training goes on" in warning["message"]
    assert [e["step"] for e in bench.of("checkpoint")] == [2, 6, 8]


def test_a_log_that_fails_costs_one_warning(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=5)
    bench.log.close()
    assert bench.run().step == 5
    (warning,) = bench.of("warning")
    assert "event log" in warning["message"]


class Scheduler:
    """A hook whose requests are given by step, keeping what it is told."""

    def __init__(self, requests: dict[int, Any]) -> None:
        self.requests = requests
        self.reports: list[StepReport] = []

    def poll(self, step: int) -> Any:
        return self.requests.pop(step, None)

    def report(self, report: StepReport) -> None:
        self.reports.append(report)

    def prepare(self) -> list[GridShape]:
        return []


def recompile(target: GridShape | Allocation, devices: Any) -> Compiled:
    allocation = target.allocation if isinstance(target, GridShape) else target
    if BATCH % allocation.num_devices:
        raise InfeasibleError(f"a batch of {BATCH} does not divide over {allocation.num_devices} devices")
    return Compiled(program=JitProgram(one_stage_plan(allocation.num_devices)), estimated_step_time_s=0.25)


def test_a_request_changes_the_plan_between_two_steps(tmp_path: Path) -> None:
    four = GridShape.parse("cpu:4")
    shrink = Request(target=Allocation.parse("cpu:2"), reason="shrink", id="r1", wait=True)
    hook = Scheduler({3: Request(target=four, wait=True), 6: shrink})
    bench = Bench(tmp_path, steps=9, hook=hook, recompile=recompile)
    outcome = bench.run()
    assert [(s.step, str(s.source), str(s.target), s.reason) for s in outcome.swaps] == [
        (3, "cpu:1/s1", "cpu:4/s1", ""),
        (6, "cpu:4/s1", "cpu:2/s1", "shrink"),
    ]
    assert [e["from"] for e in bench.of("swap")] == ["cpu:1/s1", "cpu:4/s1"]
    assert [(e["step"], e["reason"]) for e in bench.of("plan")] == [(3, "swap"), (6, "swap")]
    assert all(0 < s.background_s <= s.stall_s for s in outcome.swaps)
    assert [r.step for r in outcome.history] == list(range(1, 10))
    assert bench.loader.given == list(range(9))
    reference = Bench(tmp_path / "still", steps=9).run()
    np.testing.assert_allclose(
        [r.loss for r in outcome.history], [r.loss for r in reference.history], rtol=1e-4, atol=1e-6
    )
    assert hook.reports[-1].state == "finished"
    assert hook.reports[-1].request_id == "r1"
    assert hook.reports[-1].grid == GridShape.parse("cpu:2")


def test_a_request_that_cannot_be_met_is_refused_and_reported(tmp_path: Path) -> None:
    hook = Scheduler({2: Request(target=Allocation.parse("cpu:3"), wait=True)})
    bench = Bench(tmp_path, steps=4, hook=hook, recompile=recompile)
    outcome = bench.run()
    assert outcome.step == 4
    assert outcome.swaps == ()
    assert any("does not divide" in error for report in hook.reports for error in report.errors)


def test_stop_saves_and_ends_as_resumable(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=9, every=100, hook=Scheduler({4: Request(target=Stop())}))
    outcome = bench.run()
    assert (outcome.stop_reason, outcome.step) == ("stopped", 4)
    assert bench.store.steps() == [4]


def test_pause_frees_the_devices_until_a_grid_is_given(tmp_path: Path) -> None:
    program = JitProgram(one_stage_plan())
    seen: list[int] = []

    class Pausing(Scheduler):
        def poll(self, step: int) -> Any:
            if self.reports and self.reports[-1].state == "paused":
                alive = {id(leaf) for leaf in jax.live_arrays() if leaf.shape == (6, 16)}
                seen.append(len(alive - before))
                return Request(target=GridShape.parse("cpu:2"))
            return super().poll(step)

    before = {id(leaf) for leaf in jax.live_arrays()}
    hook = Pausing({3: Request(target=Pause())})
    bench = Bench(tmp_path, steps=6, every=100, hook=hook, recompile=recompile, program=program)
    outcome = bench.trainer.run(program.init(0))
    assert set(seen) == {0}
    assert outcome.step == 6
    assert [str(s.target) for s in outcome.swaps] == ["cpu:2/s1"]
    assert 3 in bench.store.steps()


class OtherMachine:
    """More than eight devices are elsewhere; keeps what was handed over."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.handed: list[Any] = []

    def why(self, target: Any, devices: Any) -> str:
        return f"{target} is more than 8 devices" if target.num_devices > 8 else ""

    def rehearse(self, target: Any, devices: Any, **rest: Any) -> Rehearsed:
        assert rest["num_microbatches"] == 1
        return Rehearsed(plan=one_stage_plan(target.num_devices))

    def hand_over(self, relaunch: Any, tree: Any, info: CheckpointInfo) -> None:
        if self.full:
            raise OSError("no space left")
        self.handed.append((relaunch, {name: np.asarray(leaf) for name, leaf in tree.items()}, info))


@pytest.mark.parametrize("paused", [False, True])
def test_a_target_elsewhere_ends_the_run_with_its_state_handed_over(tmp_path: Path, paused: bool) -> None:
    other = OtherMachine()
    grow = Request(target=GridShape.parse("cpu:16"), reason="grow", wait=True)

    class Growing(Scheduler):
        def poll(self, step: int) -> Any:
            is_paused = bool(self.reports) and self.reports[-1].state == "paused"
            return grow if is_paused else super().poll(step)

    hook = Growing({2: Request(target=Pause())} if paused else {3: grow})
    bench = Bench(tmp_path, steps=9, every=100, hook=hook, recompile=never, elsewhere=other)
    outcome = bench.run()
    assert outcome.stop_reason == "relaunch"
    ((relaunch, tree, info),) = other.handed
    at = 2 if paused else 3
    assert (relaunch.step, info.step, info.data_position) == (at, at, {"position": at})
    assert (str(relaunch.source), str(relaunch.rehearsed.plan.grid)) == ("cpu:1/s1", "cpu:16/s1")
    assert outcome.relaunch is relaunch
    assert hook.reports[-1].state == "moving"
    (event,) = bench.of("relaunch")
    assert event["why"] == "cpu:16/s1 is more than 8 devices"
    plain = Bench(tmp_path / "plain", steps=at).run()
    for name, leaf in leaves(plain).items():
        np.testing.assert_array_equal(leaf, tree[name], err_msg=name)


def test_a_state_that_cannot_be_handed_over_trains_on(tmp_path: Path) -> None:
    hook = Scheduler({3: Request(target=GridShape.parse("cpu:16"), wait=True)})
    bench = Bench(tmp_path, steps=5, hook=hook, recompile=never, elsewhere=OtherMachine(full=True))
    assert bench.run().stop_reason == "done"
    assert any("no space left" in error for report in hook.reports for error in report.errors)


def never(target: Any, devices: Any) -> Compiled:
    raise AssertionError("nothing is to be compiled in this process")


def test_a_hook_that_raises_is_warned_about_once(tmp_path: Path) -> None:
    class Broken(Scheduler):
        def poll(self, step: int) -> Any:
            raise ConnectionError("gone")

    hook = Broken({})
    bench = Bench(tmp_path, steps=5, hook=hook)
    assert bench.run().step == 5
    message = "the scheduler hook Broken failed in poll: ConnectionError: gone"
    assert [e["message"] for e in bench.of("warning")] == [message]
    assert [error for report in hook.reports for error in report.errors] == [message]


def test_a_wish_may_be_text_and_what_is_none_is_told(tmp_path: Path) -> None:
    assert Request(target="cpu:4/s2").target == GridShape.parse("cpu:4/s2")  # type: ignore[arg-type]
    assert Request(target="pause").target == Pause()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="3 is no target"):
        Request(target=3)  # type: ignore[arg-type]
    hook = Scheduler({2: "tpu9:4", 3: 7, 4: "stop"})
    bench = Bench(tmp_path, steps=9, hook=hook)
    assert bench.run().step == 4
    told = [error for report in hook.reports for error in report.errors]
    assert len(told) == 2
    assert "tpu9" in told[0]
    assert "7 is no target" in told[1]


def test_scripted_hook_reads_its_lines() -> None:
    hook = ScriptedHook(["15: cpu:2", "5: cpu:4/s2", "20: stop"])
    assert hook.prepare() == [GridShape.parse("cpu:4/s2"), Allocation.parse("cpu:2")]
    assert hook.poll(4) is None
    request = hook.poll(5)
    assert request is not None
    assert request.target == GridShape.parse("cpu:4/s2")
    assert hook.poll(6) is None
    resumed = hook.poll(17)
    assert resumed is not None
    assert resumed.target == Allocation.parse("cpu:2")
    stop = hook.poll(20)
    assert stop is not None
    assert stop.target == Stop()
    for line in ("cpu:4", "x: cpu:4", "5: cpu", "5:"):
        with pytest.raises(ValueError, match=r"script line|neither"):
            ScriptedHook([line])


def test_step_times_add_up_to_the_wall(tmp_path: Path) -> None:
    """Nothing is lost between records; evaluation and saving are not charged to steps."""
    began = time.perf_counter()
    outcome = Bench(tmp_path, steps=20).run()
    assert 0 < sum(r.step_time_s for r in outcome.history) <= time.perf_counter() - began


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_last_steps_take_as_long_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a step was complete long before it was fetched."""
    clock = Clock()
    monkeypatch.setattr("arena_jax.runtime.metrics.time", clock)
    inflight, records = InFlight(), []
    for step in range(1, 6):
        clock.now += 2.0  # a step that runs while it is dispatched
        inflight.push(step, {"loss": np.float32(step)})
        records += inflight.due()
    records += inflight.drain()
    assert [(r.step, r.loss, r.step_time_s) for r in records] == [(k, float(k), 2.0) for k in range(1, 6)]


def test_steps_that_are_complete_at_once_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ready = Clock(), False
    monkeypatch.setattr("arena_jax.runtime.metrics.time", clock)
    monkeypatch.setattr("arena_jax.runtime.metrics._is_ready", lambda metrics: ready)
    inflight = InFlight()
    for step in (1, 2):
        inflight.push(step, {"loss": 0.0})
    ready, clock.now = True, 3.0
    assert [r.step_time_s for r in inflight.drain()] == [1.5, 1.5]
