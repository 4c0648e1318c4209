"""What each device really holds, read from the arrays' shards; and that the caller's own arrays stay whole."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.compiler import analyse, make_problem
from arena_jax.runtime import Program, compile_program
from arena_jax.runtime.layout import State
from tests.problems import (
    Tower,
    make_plan,
    random_batch,
    recipe_analysis,
    tower_batch,
    tower_loss,
    tower_program,
)


def shares(program: Program, state: State) -> dict[str, float]:
    """Name -> share of the array that one device holds, the same on all of its devices."""
    found = {}
    for entry, array in zip(program.layout.entries, state.arrays, strict=True):
        sizes = {int(np.prod(shard.data.shape)) for shard in array.addressable_shards}
        assert len(sizes) == 1, entry.name
        found[entry.name] = sizes.pop() / max(1, array.size)
    return found


def matrices(found: dict[str, float], prefix: str) -> set[float]:
    return {share for name, share in found.items() if name.startswith(prefix) and name.endswith("kernel")}


@pytest.mark.parametrize(
    ("zero", "parameters", "moments"), [(0, 1.0, 1.0), (1, 1.0, 0.5), (2, 1.0, 0.5), (3, 0.5, 0.5)]
)
def test_data_parallel_devices_hold_what_zero_says(zero: int, parameters: float, moments: float) -> None:
    program = tower_program("cpu:2", ((2, 1),), zero=zero)
    state = program.init()
    for _ in range(2):  # as made, and as a step leaves it
        found = shares(program, state)
        assert matrices(found, "params/") == {parameters}
        assert matrices(found, "opt/") == {moments}
        assert found["opt/0/count"] == 1.0
        state, _ = program.step(state, tower_batch())


def test_zero_shards_what_tensor_parallelism_left_whole() -> None:
    analysis = recipe_analysis("gpt", "model.num_layers=2")
    program = compile_program(analysis.problem, make_plan(analysis, "cpu:4", [(2, 2)], zero=1))
    found = shares(program, program.init())
    up = "blocks/blocks/0/feed_forward/up"
    assert found[f"params/{up}"] == 0.5
    assert {share for name, share in found.items() if name.startswith("opt/") and name.endswith(up)} == {0.25}


def test_tensor_parallel_devices_hold_half_of_a_gpt() -> None:
    analysis = recipe_analysis("gpt", "model.num_layers=2")
    program = compile_program(analysis.problem, make_plan(analysis, "cpu:2", [(1, 2)]))
    state = program.init()
    for _ in range(2):
        found = shares(program, state)
        halves = {name.rpartition("/")[2] for name, share in found.items() if share == 0.5}
        assert {"qkv", "out", "up", "down"} <= halves
        assert set(found.values()) == {0.5, 1.0}
        for kind in ("params", "opt"):
            held = sum(share * _size(program, name) for name, share in found.items() if name.startswith(kind))
            whole = sum(_size(program, name) for name in found if name.startswith(kind))
            assert held < 0.6 * whole
        for name, share in found.items():
            # A moment lies as its parameter does.
            owner = [n for n in found if n.startswith("params/") and name.endswith(n.removeprefix("params"))]
            if name.startswith("opt/") and owner:
                assert share == found[owner[0]], name
        state, _ = program.step(state, random_batch(analysis.problem))


def _size(program: Program, name: str) -> int:
    return int(np.prod(program.abstract_tree()[name].shape))


def test_stages_lie_on_devices_of_their_own() -> None:
    program = tower_program("cpu:4", ((2, 1), (1, 2)))
    state = program.init()
    devices = jax.devices()
    for _ in range(2):
        for entry, array in zip(program.layout.entries, state.arrays, strict=True):
            assert entry.slot.stage is not None
            expected = (devices[:2], devices[2:4])[entry.slot.stage]
            assert array.sharding.device_set == set(expected), entry.name
        # Each kernel is on one stage only.
        names = [e.name for e in program.layout.entries if e.name.endswith("kernel")]
        assert len(names) == len(set(names))
        state, _ = program.step(state, tower_batch())


@pytest.mark.parametrize(("grid", "meshes"), [("cpu:2", ((2, 1),)), ("cpu:2", ((1, 1), (1, 1))), ("cpu:1", ((1, 1),))])
def test_what_the_caller_passed_in_stays(grid: str, meshes: tuple[tuple[int, int], ...]) -> None:
    model = Tower(nnx.Rngs(3))
    batch = {key: jax.device_put(value) for key, value in tower_batch().items()}
    before = [numbers(x) for x in jax.tree.leaves(nnx.state(model))]
    before_batch = {key: np.asarray(value) for key, value in batch.items()}
    problem = make_problem(model, optax.adam(1e-2), tower_loss, batch)
    program = compile_program(problem, make_plan(analyse(problem), grid, meshes))
    state = program.init()
    first = program.save_tree(state)
    np.testing.assert_array_equal(np.asarray(first["params/up/0/kernel"]), np.asarray(model.up[0].kernel[...]))
    tree = {name: np.asarray(value) for name, value in first.items()}
    for _ in range(2):
        state, _ = program.step(state, batch)
    program.eval_step(state, batch)
    for value, old in zip(jax.tree.leaves(nnx.state(model)), before, strict=True):
        np.testing.assert_array_equal(numbers(value), old)
    for key, old in before_batch.items():
        np.testing.assert_array_equal(np.asarray(batch[key]), old)
    again = program.save_tree(program.init())
    assert all((np.asarray(again[name]) == value).all() for name, value in tree.items())
    tower_loss(model, batch)  # still usable
    trained = program.model(state)
    assert isinstance(trained, Tower)
    assert (np.asarray(trained.up[0].kernel[...]) != np.asarray(model.up[0].kernel[...])).any()


def test_a_loaded_tree_stays_the_caller_s() -> None:
    program = tower_program("cpu:2", ((2, 1),), zero=0)
    tree = program.save_tree(program.init())
    held = {name: jax.device_put(np.asarray(value), jax.devices()[0]) for name, value in tree.items()}
    before = {name: np.asarray(value) for name, value in held.items()}
    state = program.load_tree(held)
    for _ in range(2):
        state, _ = program.step(state, tower_batch())
    for name, value in held.items():
        assert not value.is_deleted()
        np.testing.assert_array_equal(np.asarray(value), before[name])


def numbers(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value)
