"""Plans compiled ahead: what is wanted goes first, what was compiled is kept, other processes are called off."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from arena_jax.grid import Allocation, GridShape
from arena_jax.runtime.ahead import AheadCompiler
from arena_jax.runtime.contract import Compiled
from tests.doubles import one_stage_plan

ONE, TWO, FOUR, EIGHT = (GridShape.parse(f"cpu:{n}") for n in (1, 2, 4, 8))


class Planned:
    """A program that is only its plan."""

    def __init__(self, target: Any) -> None:
        self.plan = one_stage_plan(target.num_devices)
        self.move_from: Any = None
        self.warmed_up = False

    def warm_up(self) -> None:
        self.warmed_up = True

    def plan_move(self, other: Any) -> None:
        self.move_from = other


class Workshop:
    """Compiles when it may, and notes what it was asked for."""

    def __init__(self, *, with_process: bool = False) -> None:
        self.order: list[Any] = []
        self.started: list[tuple[Any, bool]] = []
        self.called_off: list[Any] = []
        self.may_finish = threading.Event()
        self.busy = threading.Event()
        self.ahead = AheadCompiler(self.recompile, self.warm if with_process else None, capacity=3)
        self.running = Planned(ONE)
        self.ahead.run_under(self.running)  # type: ignore[arg-type]

    def recompile(self, target: Any, devices: Sequence[int] | None) -> Compiled:
        self.order.append(target)
        if self.ahead._warm is None:
            self.busy.set()
            assert self.may_finish.wait(20)
        if target.num_devices == 8:
            raise MemoryError("no room")
        return Compiled(program=Planned(target))  # type: ignore[arg-type]

    def warm(self, target: Any, devices: Any, *, num_microbatches: int, urgent: bool, cancelled: Callable[[], bool]):
        self.started.append((target, urgent))
        self.busy.set()
        while not self.may_finish.is_set():
            if cancelled():
                self.called_off.append(target)
                return
            time.sleep(0.001)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_wanted_goes_before_what_is_prepared_and_both_are_kept() -> None:
    shop = Workshop()
    shop.ahead.prepare([TWO, FOUR])
    assert shop.busy.wait(20)
    wanted = shop.ahead.want(Allocation.parse("cpu:1"), None)
    shop.may_finish.set()
    assert wanted.done.wait(20)
    assert wanted.compiled is not None
    until(lambda: len(shop.order) >= 3 or FOUR in shop.order)
    assert shop.order[:2] == [TWO, Allocation.parse("cpu:1")]
    # An allocation's program is found under its grid, too.
    assert shop.ahead.want(ONE, None).compiled is wanted.compiled
    assert shop.ahead.want(ONE, (1,)).compiled is None  # on another device it is another program
    shop.ahead.close()


def test_a_program_that_is_kept_knows_how_the_state_comes_to_it() -> None:
    shop = Workshop()
    shop.may_finish.set()
    work = shop.ahead.want(TWO, None)
    assert work.done.wait(20)
    assert work.compiled is not None
    program: Any = work.compiled.program
    assert program.move_from is shop.running
    other = Planned(FOUR)
    shop.ahead.run_under(other)  # type: ignore[arg-type]
    until(lambda: program.move_from is other)
    shop.ahead.close()


def test_the_least_recently_used_program_goes_first() -> None:
    shop = Workshop()
    shop.may_finish.set()
    for number in (1, 2, 4):
        assert shop.ahead.want(GridShape.parse(f"cpu:{number}"), None).done.wait(20)
    assert shop.ahead.want(ONE, None).compiled is not None  # used again
    assert shop.ahead.want(GridShape.parse("cpu:3"), None).done.wait(20)
    assert [str(target) for target, _ in shop.ahead.prepared] == ["cpu:4/s1", "cpu:1/s1", "cpu:3/s1"]
    shop.ahead.close()


def test_failures_are_told_and_what_could_not_be_prepared_is_not_tried_again() -> None:
    shop = Workshop()
    shop.may_finish.set()
    shop.ahead.prepare([EIGHT])
    until(lambda: bool(shop.ahead._failed))
    (failure,) = shop.ahead.take_failures()
    assert failure[0] == EIGHT
    assert isinstance(failure[1], MemoryError)
    shop.ahead.prepare([EIGHT])
    work = shop.ahead.want(EIGHT, None)  # when it is wanted, it is
    assert work.done.wait(20)
    assert isinstance(work.error, MemoryError)
    assert shop.order == [EIGHT, EIGHT]
    shop.ahead.close()


@pytest.mark.parametrize("idle", [False, True])
def test_the_other_process_hurries_or_is_called_off_when_its_plan_is_wanted(idle: bool) -> None:
    shop = Workshop(with_process=True)
    shop.ahead.prepare([TWO])
    assert shop.busy.wait(20)
    work = shop.ahead.want(TWO, None, idle=idle)
    until(lambda: shop.called_off == [TWO])
    if not idle:
        until(lambda: len(shop.started) == 2)
        shop.may_finish.set()
    assert work.done.wait(20)
    assert work.compiled is not None
    # Where no step runs, the thread does all of it; otherwise a process of a higher priority comes first.
    assert shop.started == ([(TWO, False)] if idle else [(TWO, False), (TWO, True)])
    shop.ahead.close()


def test_another_wish_calls_the_process_off() -> None:
    shop = Workshop(with_process=True)
    first = shop.ahead.want(TWO, None)
    assert shop.busy.wait(20)
    second = shop.ahead.want(FOUR, None)
    until(lambda: shop.called_off == [TWO])
    shop.may_finish.set()
    assert second.done.wait(20)
    assert second.compiled is not None
    assert first.compiled is None
    assert shop.order == [FOUR]
    shop.ahead.close()


def test_collections_leave_out_what_was_there_before_a_run() -> None:
    import gc

    from arena_jax.runtime.heap import old_objects_spared

    before = [object() for _ in range(3)], {}
    with old_objects_spared():
        assert not any(known is before for known in gc.get_objects())
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert any(known is before for known in gc.get_objects())


def test_only_what_nobody_waits_for_runs_before_its_turn() -> None:
    shop = Workshop()
    shop.may_finish.set()
    shop.ahead.prepare([TWO])
    until(lambda: (TWO, None) in shop.ahead.prepared)
    prepared, wanted = shop.ahead.want(TWO, None), shop.ahead.want(FOUR, None)
    assert wanted.done.wait(20)
    assert prepared.compiled.program.warmed_up  # type: ignore[union-attr]
    assert not wanted.compiled.program.warmed_up  # type: ignore[union-attr]
