"""Moving a state between plans: bit for bit, within the memory budget, and back when something fails."""

import gc
from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.runtime import compile_program
from arena_jax.runtime import move as move_module
from arena_jax.runtime.move import Move
from arena_jax.runtime.move_order import LeafBytes, budget, order_moves
from tests.problems import make_plan, tower_analysis, tower_batch, tower_problem, tower_program

# Shrink, grow, stages to tensor parallelism and back, and stages that change places.
PLANS = {
    "dp2": ("cpu:2", ((2, 1),), 0),
    "zero": ("cpu:4", ((4, 1),), 3),
    "tp2": ("cpu:4", ((2, 2),), 0),
    "four": ("cpu:4", ((1, 1),) * 4, 0),
}


@cache
def changed_places() -> tuple[Any, Any]:
    """Two stages, and the same two on each other's device: no leaf stays, and each device gives away what it has."""
    plan = make_plan(tower_analysis(), "cpu:2", ((1, 1), (1, 1)), num_microbatches=2)
    first, second = jax.devices()[:2]
    old, new = (compile_program(tower_problem(), plan, devices) for devices in ((first, second), (second, first)))
    return old, new


def crossing() -> tuple[Any, Any, Any, dict[int, int]]:
    """Their programs, a trained state, and what the larger of the two states takes."""
    old, new = changed_places()
    state, _ = old.step(old.init(0), tower_batch())
    larger = {d: max(state_bytes(state)[d], state_bytes(new.init(0))[d]) for d in range(2)}
    return old, new, state, larger


def trained(name: str) -> tuple[Any, Any]:
    program = tower_program(*PLANS[name])
    state, _ = program.step(program.init(0), tower_batch())
    return program, state


def held(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in tree.items()}


def state_bytes(state: Any) -> Counter[int]:
    """Bytes of the state's buffers by device, each buffer once."""
    seen: dict[tuple[int, int], int] = {}
    for array in state.arrays:
        data = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        for shard in data.addressable_shards:
            seen[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    total: Counter[int] = Counter()
    for (device, _), num_bytes in seen.items():
        total[device] += num_bytes
    return total


@pytest.mark.parametrize(
    ("source", "target"),
    [("dp2", "zero"), ("zero", "four"), ("four", "tp2"), ("tp2", "dp2")],
)
def test_a_moved_state_is_bit_equal_and_trains_on(source: str, target: str) -> None:
    old, state = trained(source)
    new = tower_program(*PLANS[target])
    copy = new.reshard_from(state, old)  # the copying way, which leaves the state alone
    expected = held(old.save_tree(state))
    moved_state, moved = new.take_from(state, old)
    actual = held(new.save_tree(moved_state))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    for entry, array in zip(new.layout.entries, moved_state.arrays, strict=True):
        assert array.sharding.is_equivalent_to(entry.sharding, len(entry.shape)), entry.name
    assert moved.parked_bytes == 0
    after, metrics = new.step(moved_state, tower_batch(1))
    _, same = new.step(copy, tower_batch(1))
    assert float(metrics["loss"]) == float(same["loss"])
    assert all(array.is_deleted() for array in moved_state.stages[0].params)  # donated, so none was held twice
    del after


def test_the_same_plan_moves_without_copying() -> None:
    program, state = trained("dp2")
    before = state_bytes(state)
    after, moved = program.take_from(state, program)
    assert (moved.written_bytes, moved.kept_bytes) == (0, sum(before.values()))
    assert state_bytes(after) == before


@pytest.mark.parametrize(("source", "target"), [("four", "tp2"), ("zero", "dp2"), ("dp2", "tp2"), ("two", "turned")])
def test_no_device_holds_more_than_the_budget(source: str, target: str) -> None:
    """Measured: every live buffer of the process, against the larger state and its two largest leaves."""
    if source == "two":
        old, new, state, _ = crossing()
    else:
        old, state = trained(source)
        new = tower_program(*PLANS[target])
    move = new.plan_move(old)

    def live() -> Counter[int]:
        seen: dict[tuple[int, int], int] = {}
        for array in jax.live_arrays():
            data = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
            for shard in data.addressable_shards:
                seen[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        total: Counter[int] = Counter()
        for (device, _), num_bytes in seen.items():
            total[device] += num_bytes
        return total

    gc.collect()
    other = live()
    other.subtract(state_bytes(state))
    peak: Counter[int] = Counter()

    def watch() -> None:
        for device, num_bytes in live().items():
            peak[device] = max(peak[device], num_bytes - other[device])

    after, _ = move.run(state, watch=watch)
    assert peak
    for device, num_bytes in peak.items():
        if device not in move.allowed:
            assert num_bytes == 0
            continue
        assert num_bytes <= move.order.peak[device] <= move.allowed[device]
    gc.collect()
    now = live()
    now.subtract(other)
    assert +now == state_bytes(after)


def test_leaves_wait_in_host_memory_where_there_is_no_room() -> None:
    old, new, state, tight = crossing()
    expected = held(old.save_tree(state))
    moved_state, moved = Move(old.layout, new.layout, allowed=tight).run(state)
    assert moved.parked_bytes > 0
    assert all(moved.peak_bytes[d] <= tight[d] for d in tight)
    for name, value in held(new.save_tree(moved_state)).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("at", range(4))
def test_a_failing_transfer_leaves_the_state_as_it_was(tight: bool, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, state, larger = crossing()
    expected = held(old.save_tree(state))
    allowed = larger if tight else None
    handle, calls = move_module._handle, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == at + 1:
            raise MemoryError("no room")
        handle(*args)

    monkeypatch.setattr(move_module, "_handle", failing)
    with pytest.raises(MemoryError):
        Move(old.layout, new.layout, allowed=allowed).run(state)
    assert len(calls) > at
    for name, value in held(old.save_tree(state)).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    old.step(state, tower_batch(1))


@st.composite
def leaf_bytes(draw: st.DrawFn) -> LeafBytes:
    old = draw(st.dictionaries(st.integers(0, 3), st.integers(0, 50), min_size=1))
    new = draw(st.dictionaries(st.integers(0, 3), st.integers(0, 50), min_size=1))
    kept = {d: min(old[d], new[d]) for d in old.keys() & new.keys() if draw(st.booleans())}
    return LeafBytes(old=old, new=new, kept={d: n for d, n in kept.items() if old[d] == new[d]})


@given(st.lists(leaf_bytes(), max_size=12), st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_state_moves_within_any_budget_that_holds_its_two_forms(leaves: list[LeafBytes], tight: bool) -> None:
    """The order is replayed by hand: every leaf arrives once, and no device exceeds its budget."""
    devices = {d for leaf in leaves for d in (*leaf.old, *leaf.new)}
    allowed = budget(leaves)
    if tight:
        allowed = {
            d: max(sum(leaf.old.get(d, 0) for leaf in leaves), sum(leaf.new.get(d, 0) for leaf in leaves))
            for d in devices
        }
    order = order_moves(leaves, allowed)
    usage = {d: sum(leaf.old.get(d, 0) for leaf in leaves) for d in devices}
    where = dict.fromkeys(range(len(leaves)), "old")
    for batch in order.batches:
        for i in batch.leaves:
            assert where[i] == {"move": "old", "park": "old", "place": "parked"}[batch.kind]
            where[i] = "parked" if batch.kind == "park" else "new"
            for d in devices:
                if batch.kind == "park":
                    usage[d] -= leaves[i].old.get(d, 0)
                else:
                    kept = leaves[i].kept.get(d, 0) if batch.kind == "move" else 0
                    usage[d] += leaves[i].new.get(d, 0) - kept
        for d in devices:
            assert usage[d] <= order.peak[d] <= allowed[d]
            if batch.kind == "move":
                usage[d] -= sum(leaves[i].old.get(d, 0) - leaves[i].kept.get(d, 0) for i in batch.leaves)
    assert set(where.values()) <= {"new"}
    for d in devices:
        assert usage[d] == sum(leaf.new.get(d, 0) for leaf in leaves)


def test_a_step_on_zeros_leaves_nothing_behind() -> None:
    program, state = trained("four")
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    program.warm_up()
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) == before
    program.step(state, tower_batch(1))
