"""The optimizer step split over stages is the optimizer step, for transformations of every kind."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.compiler import Problem, make_problem
from arena_jax.runtime.optimizer import check_optimizer, flat_update
from arena_jax.runtime.update import Home, Slot, SplitUpdate, Value, split_update

WEIGHT = 3.0
NUM_STEPS = 3


class Leaves(nnx.Module):
    """Matrices, vectors and a number; ``stack`` is as a scanned stack holds its four layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape))

        self.bias = normal(6)
        self.first = normal(4, 6)
        self.last = normal(6, 5)
        self.scale = normal()
        self.stack = normal(4, 3, 8)
        self.stack_bias = normal(4, 3)


def problem_with(optimizer: Any) -> Problem:
    batch = {"x": jax.ShapeDtypeStruct((2, 3), "float32")}
    return make_problem(Leaves, optimizer, lambda model, batch: batch["x"].mean() * model.scale[...], batch)


# By leaf, in the order bias, first, last, scale, stack, stack_bias.
HOMES: dict[str, tuple[int, list[Home]]] = {
    "two stages": (2, [(Slot(s),) for s in (0, 0, 1, 1, 0, 1)]),
    "three stages": (3, [(Slot(s),) for s in (2, 0, 2, 1, 1, 0)]),
    "two stages, a stack in pieces": (
        2,
        [
            (Slot(0),),
            (Slot(0),),
            (Slot(1),),
            (Slot(1),),
            (Slot(0, 0, 1), Slot(1, 1, 4)),
            (Slot(0, 0, 1), Slot(1, 1, 4)),
        ],
    ),
    "three stages, a stack in pieces": (
        3,
        [
            (Slot(0),),
            (Slot(0),),
            (Slot(2),),
            (Slot(2),),
            (Slot(0, 0, 1), Slot(1, 1, 3), Slot(2, 3, 4)),
            (Slot(0, 0, 1), Slot(1, 1, 3), Slot(2, 3, 4)),
        ],
    ),
}


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
    "decay of matrices": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "multi transform": lambda: optax.multi_transform(
        {"matrix": optax.adamw(1e-2), "other": optax.sgd(0.1, momentum=0.9)}, by_rank
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), is_matrix),
    "multi steps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ).gradient_transformation(),
    "apply if finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "block clipping": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "zero nans": lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 5)),
}


def split_of(problem: Problem, homes: list[Home], num_stages: int, *, skip: bool, weighted: bool) -> SplitUpdate:
    closed = check_optimizer(problem, skip_nonfinite=skip)
    count = len(problem.optimizer_names)
    return split_update(closed, homes, count, num_stages - 1, num_stages, weighted)


def run_split(split: SplitUpdate, inputs: dict[Any, Any]) -> dict[Any, Any]:
    """Run the programs in their order, with values on one stage reachable only there or by a transfer."""
    arrays: dict[tuple[Value, int], Any] = {}
    pending = list(split.transfers)

    def read(value: Value, stage: int) -> Any:
        if (value, stage) in arrays:
            return arrays[value, stage]
        assert value.input_key is not None, "a value is used before it is there"
        kind, index, slot = value.input_key
        assert slot.stage in (None, stage), "an input is used on a stage that does not hold it"
        return inputs[kind, index, slot]

    def move(before: int) -> None:
        for transfer in [t for t in pending if t[0] < before]:
            pending.remove(transfer)
            _, source, target = transfer
            assert source.stage is not None
            assert target.stage is not None
            arrays[target, target.stage] = read(source, source.stage)

    for program in split.programs:
        move(program.depth)
        outs = program([read(v, program.stage) for v in program.inputs])
        arrays.update(((v, program.stage), x) for v, x in zip(program.outputs, outs, strict=True))
    move(10**9)
    return {key: read(value, key[2].stage) for key, value in split.results.items()}


def cut(value: Any, home: Home, num_stages: int) -> dict[Slot, Any]:
    if home[0].stage is None:
        return {home[0]: value} | {Slot(s): value for s in range(num_stages)}
    return {slot: value if slot.start is None else value[slot.start : slot.stop] for slot in home}


def numbers(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


def joined(results: dict[Any, Any], kind: str, index: int, home: Home, num_stages: int) -> np.ndarray:
    if home[0].stage is None:
        copies = [numbers(results[kind, index, Slot(s)]) for s in range(num_stages)]
        assert all((copy == copies[0]).all() for copy in copies)
        return copies[0]
    parts = [numbers(results[kind, index, slot]) for slot in home]
    return parts[0] if home[0].start is None else np.concatenate(parts)


def check_split(optimizer: Any, where: str, *, skip: bool = False, bad_step: int | None = None) -> SplitUpdate:
    problem = problem_with(optimizer)
    num_stages, homes = HOMES[where]
    split = split_of(problem, homes, num_stages, skip=skip, weighted=True)
    whole = flat_update(problem, skip_nonfinite=skip)
    params = [np.asarray(v) for v in problem.make_values(nnx.Rngs(0))]
    state = jax.tree.leaves(problem.optimizer.init(problem.treedefs["params"].unflatten(params)))
    rng = np.random.default_rng(0)

    def one_step(params: Any, state: Any, gradients: Any, loss: Any) -> Any:
        expected = whole(gradients, jnp.float32(WEIGHT), loss, state, params)
        inputs: dict[Any, Any] = {}
        groups = [
            ("gradient", gradients, homes),
            ("parameter", params, homes),
            ("optimizer", state, split.optimizer_homes),
        ]
        groups += [
            ("weight", [jnp.float32(WEIGHT)], [(Slot(num_stages - 1),)]),
            ("loss", [loss], [(Slot(num_stages - 1),)]),
        ]
        for kind, values, places in groups:
            for i, (value, home) in enumerate(zip(values, places, strict=True)):
                inputs.update(((kind, i, slot), part) for slot, part in cut(value, home, num_stages).items())
        return expected, {_flat(key): value for key, value in run_split(split, inputs).items()}

    step = jax.jit(one_step)
    for number in range(NUM_STEPS):
        gradients = [np.asarray(5 * rng.standard_normal(p.shape), "float32") for p in params]
        if number == bad_step:
            gradients[2][0, 0] = np.nan
        (new_params, new_state), made = step(params, state, gradients, jnp.float32(1))
        results = {_unflat(key): value for key, value in made.items()}
        for kind, values, places in (("parameter", new_params, homes), ("optimizer", new_state, split.optimizer_homes)):
            for i, (value, home) in enumerate(zip(values, places, strict=True)):
                found = joined(results, kind, i, home, num_stages)
                np.testing.assert_allclose(
                    found, numbers(value), rtol=1e-5, atol=1e-6, err_msg=f"{kind} {i} at step {number}"
                )
        params, state = new_params, new_state
    assert bad_step is None or all(np.isfinite(p).all() for p in params)
    return split


def _flat(key: Any) -> str:
    kind, index, slot = key
    return f"{kind} {index} {slot.stage} {slot.start} {slot.stop}"


def _unflat(text: str) -> Any:
    kind, index, *numbers = text.split()
    return kind, int(index), Slot(*(None if n == "None" else int(n) for n in numbers))


@pytest.mark.parametrize(("name", "where"), [(n, list(HOMES)[i % 4]) for i, n in enumerate(OPTIMIZERS)])
def test_split_step_is_the_step(name: str, where: str) -> None:
    check_split(OPTIMIZERS[name](), where)


@pytest.mark.parametrize("name", ["clip", "adamw", "multi steps", "adafactor", "lamb", "multi transform"])
def test_stacks_in_pieces(name: str) -> None:
    check_split(OPTIMIZERS[name](), "three stages, a stack in pieces")


@pytest.mark.parametrize(("name", "skip"), [("apply if finite", False), ("zero nans", False), ("adamw", True)])
def test_a_gradient_that_is_not_finite(name: str, skip: bool) -> None:
    check_split(OPTIMIZERS[name](), "two stages, a stack in pieces", skip=skip, bad_step=1)


@pytest.mark.parametrize("where", HOMES)
def test_moments_live_with_their_parameter_and_little_travels(where: str) -> None:
    split = check_split(OPTIMIZERS["clip"](), where)
    problem = problem_with(OPTIMIZERS["clip"]())
    _, homes = HOMES[where]
    # A lone number may live wherever the norm it is scaled by is known.
    names = [leaf.name for leaf in problem.of_kind("params")]
    for name, home in zip(problem.optimizer_names, split.optimizer_homes, strict=True):
        owner = [i for i, leaf in enumerate(names) if name.endswith("/" + leaf)]
        if not name.endswith("scale"):
            assert home == (homes[owner[0]] if owner else (Slot(None),)), name
    # A global norm is a few numbers; no leaf is ever sent.
    assert all(value.shape == () for _, value, _ in split.transfers)


def test_what_couples_nothing_sends_nothing() -> None:
    split = check_split(optax.adam(1e-2), "three stages")
    sent = [value for _, value, _ in split.transfers if value.input_key is None or value.input_key[0] != "weight"]
    assert sent == []
