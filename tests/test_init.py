"""A state is made, moved and saved bit for bit the same under every plan; its first gradient is one device's."""

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.runtime import Program
from tests.problems import Tower, not_the_table, tower_batch, tower_loss, tower_program
from tests.same_numbers.cases import layouts
from tests.same_numbers.oracle import name_of, perturbation, train

# Every (dp, tp) of one stage of four devices, and the pipelines that `make verify` runs.
LAYOUTS = tuple(tuple((dp, tp) for _, dp, tp in stages) for stages in layouts("cpu:4"))


@cache
def by_hand() -> dict[str, np.ndarray]:
    """Names and values of a fresh state, with flax and optax alone."""
    wrt = nnx.All(nnx.Param, not_the_table)
    _, params, frozen, state = nnx.split(Tower(nnx.Rngs(0)), wrt, nnx.Param, ...)
    trees = {"params": params, "frozen": frozen, "state": state, "opt": optax.adam(1e-2).init(params)}
    found: dict[str, np.ndarray] = {"step": np.asarray(0)}
    for kind, tree in trees.items():
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[f"{kind}/{name_of(path)}"] = numbers(value)
    return found


def numbers(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


def saved(program: Program, state: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in program.save_tree(state).items()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("meshes", LAYOUTS, ids=str)
def test_a_sharded_init_is_the_unsharded_one(meshes: tuple[tuple[int, int], ...]) -> None:
    program = tower_program("cpu:4", meshes)
    state = program.init()
    assert_equal(saved(program, state), by_hand())
    other = saved(program, program.init(1))
    assert (other["params/up/0/kernel"] != by_hand()["params/up/0/kernel"]).any()


def test_zero_changes_where_and_not_what() -> None:
    program = tower_program("cpu:4", ((2, 2),), zero=3)
    assert_equal(saved(program, program.init(nnx.Rngs(0))), by_hand())


@pytest.mark.parametrize("pair", list(pairwise((*LAYOUTS, LAYOUTS[0]))), ids=str)
def test_a_saved_state_moves_bit_for_bit(pair: tuple[Any, Any]) -> None:
    source, target = (tower_program("cpu:4", meshes) for meshes in pair)
    state, _ = source.step(source.init(), tower_batch())
    before = saved(source, state)
    assert before["step"] == 1
    assert (before["params/up/0/kernel"] != by_hand()["params/up/0/kernel"]).any()
    moved = target.reshard_from(state, source)
    assert_equal(saved(target, moved), before)
    assert_equal(saved(source, source.load_tree(saved(target, moved))), before)
    # The first state is still there, and both go on alike.
    batch = tower_batch(1)
    after, _ = target.step(moved, batch)
    again, _ = source.step(state, batch)
    for name, value in saved(source, again).items():
        np.testing.assert_allclose(saved(target, after)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("meshes", LAYOUTS, ids=str)
def test_the_saved_form_is_as_announced(meshes: tuple[tuple[int, int], ...]) -> None:
    program = tower_program("cpu:4", meshes)
    tree = program.save_tree(program.init())
    announced = program.abstract_tree()
    assert tree.keys() == announced.keys()
    for name, struct in announced.items():
        assert (tree[name].shape, tree[name].dtype) == (struct.shape, struct.dtype), name
        if struct.sharding is not None and not name.startswith("state"):
            assert tree[name].sharding == struct.sharding


@pytest.mark.parametrize("meshes", LAYOUTS, ids=str)
def test_the_first_gradient_is_that_of_one_device(meshes: tuple[tuple[int, int], ...]) -> None:
    program = tower_program("cpu:4", meshes)
    state = program.load_tree(_perturbed(saved(program, program.init())))
    before = saved(program, state)
    gradient, metrics = program.grad_step(state, tower_batch())
    reference = _reference()
    assert {name.removeprefix("params/") for name in gradient} == reference.first_gradient.keys()
    for name, value in gradient.items():
        expected = reference.first_gradient[name.removeprefix("params/")]
        np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert float(metrics["loss"]) == pytest.approx(reference.losses[0], rel=1e-5)
    assert_equal(saved(program, state), before)


def _perturbed(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The oracle's noise on every trainable parameter."""
    noisy = {
        n: v + perturbation(n.removeprefix("params/"), v.shape).astype(v.dtype)
        for n, v in tree.items()
        if n.startswith("params/")
    }
    return tree | noisy


@cache
def _reference() -> Any:
    return train(Tower, optax.adam(1e-2), tower_loss, [tower_batch()], num_microbatches=2, trainable=not_the_table)
