"""What cannot be trained is refused by name, before anything compiles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

from arena_jax.compiler import Constraints, Problem, analyse, make_problem, plan_problem
from arena_jax.compiler.trace import trace_loss
from arena_jax.errors import ArenaError, ModelError, PlanError, UsageError
from arena_jax.grid import GridShape, Plan, StagePlan, Submesh
from arena_jax.runtime import Program, compile_program
from arena_jax.runtime.optimizer import check_optimizer
from arena_jax.values import Weighted
from tests.doubles import BATCH, WIDTH, Toy, ToyLoader, toy_loss


def example() -> dict[str, np.ndarray]:
    return next(ToyLoader())


def problem(**changes: Any) -> Problem:
    values = {"model": Toy, "optimizer": optax.adam(1e-2), "loss_fn": toy_loss, "batch": example(), **changes}
    return make_problem(values["model"], values["optimizer"], values["loss_fn"], values["batch"])


def predicted(model: Toy, batch: Any) -> jax.Array:
    return model(batch["x"])


def a_plan(problem: Problem, **changes: Any) -> Plan:
    stage = StagePlan(layers=(0, 0), submesh=Submesh(1, 1), dp=1, tp=1)
    plan = Plan(
        model_fingerprint=trace_loss(problem).fingerprint,
        global_batch=BATCH,
        grid=GridShape.parse("cpu:1"),
        num_microbatches=1,
        stages=(stage,),
    )
    return replace(plan, **changes)


@pytest.fixture(scope="module")
def program() -> Program:
    p = problem()
    return compile_program(p, a_plan(p, stages=(_all_layers(p),)))


def _all_layers(problem: Problem, num_devices: int = 1) -> StagePlan:
    last = analyse(problem).layers.num_layers - 1
    return StagePlan(layers=(0, last), submesh=Submesh(1, num_devices), dp=num_devices, tp=1)


# Losses.

LOSSES: dict[str, tuple[Callable[[Toy, Any], Any], str]] = {
    "no reduction": (lambda m, b: predicted(m, b) - b["y"], r"must return a scalar, it returned shape \(8, 6\)"),
    "a vector of one": (lambda m, b: predicted(m, b).mean(keepdims=True)[0], r"returned shape \(1,\)"),
    "an integer": (lambda m, b: jnp.sum(predicted(m, b) > 0), "floating scalar, it returned int32"),
    "nothing": (lambda m, b: None, "must return a scalar, it returned NoneType"),
    "a text": (lambda m, b: "loss", "it returned str"),
    "aux that is no dict": (lambda m, b: (predicted(m, b).mean(), predicted(m, b)), "where a dict of metrics"),
    "three values": (lambda m, b: (predicted(m, b).mean(), {}, 1), "it returned tuple"),
    "a weight per row": (lambda m, b: Weighted(predicted(m, b).sum(), jnp.ones(BATCH)), r"it returned shape \(8,\)"),
    "a metric per row": (
        lambda m, b: (predicted(m, b).mean(), {"error": predicted(m, b)}),
        r"metric 'error' has shape \(8, 6\)",
    ),
    "a metric that is no number": (
        lambda m, b: (predicted(m, b).mean(), {"note": "fine"}),
        "metric 'note' is str, metrics are numbers",
    ),
    "a branch on a value": (
        lambda m, b: predicted(m, b).mean() if predicted(m, b).mean() > 0 else jnp.float32(0),
        "not known while tracing",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss_fn, says = LOSSES[name]
    with pytest.raises(ModelError, match=says):
        trace_loss(problem(loss_fn=loss_fn))


class Counting(nnx.Module):
    """Keeps something it has seen."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.toy = Toy(rngs)
        self.seen = nnx.Variable(jnp.zeros((1, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.set_value(jnp.concatenate([self.seen[...], x]))
        return self.toy(x)


def test_state_that_grows() -> None:
    with pytest.raises(ModelError, match=r"changed the shape of 'seen': \(1, 6\) to \(9, 6\)"):
        trace_loss(problem(model=Counting))


# Losses that act on the outside.


def host(value: Any) -> np.ndarray:
    return np.asarray(value)


def calls_back(model: Toy, batch: Any) -> jax.Array:
    x = jax.pure_callback(host, jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32), batch["x"])
    return toy_loss(model, batch | {"x": x})


def calls_back_in_a_loop(model: Toy, batch: Any) -> jax.Array:
    def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
        return total + io_callback(host, jax.ShapeDtypeStruct((), np.float32), total), None

    return toy_loss(model, batch) + jax.lax.scan(body, jnp.float32(0), None, length=2)[0]


def prints_in_order(model: Toy, batch: Any) -> jax.Array:
    jax.debug.print("rows {x}", x=batch["x"].sum(), ordered=True)
    return toy_loss(model, batch)


def prints(model: Toy, batch: Any) -> jax.Array:
    jax.debug.print("rows {x}", x=batch["x"].sum())
    return toy_loss(model, batch)


ELSEWHERE = nnx.Variable(jnp.zeros(()))


def writes_elsewhere(model: Toy, batch: Any) -> jax.Array:
    ELSEWHERE.set_value(ELSEWHERE[...] + 1)
    return toy_loss(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (
            calls_back,
            r"calls back to the host: jax.pure_callback of `host` at .*test_refusals.py:\d+:\d+ \(calls_back\)",
        ),
        (calls_back_in_a_loop, r"jax.experimental.io_callback of `host` at .*test_refusals.py:\d+.*body\)"),
        (prints_in_order, r"(?s)prints in order: jax.debug.print at .*\(prints_in_order\).*drop ordered=True"),
        (writes_elsewhere, r"(?s)writes to an nnx Variable outside of its model.*an attribute of the model"),
    ],
)
def test_losses_that_act_on_the_outside(loss_fn: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        trace_loss(problem(loss_fn=loss_fn))


def test_a_loss_that_prints_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"jax.debug.print at .*test_refusals.py:\d+.*\(prints\): runs once a microbatch"
    ):
        trace_loss(problem(loss_fn=prints))


# Optimizers.


@pytest.mark.parametrize("make", [lambda: optax.polyak_sgd(), lambda: optax.lbfgs()], ids=["polyak_sgd", "lbfgs"])
def test_optimizers_that_need_the_loss(make: Callable[[], Any]) -> None:
    with pytest.raises(ModelError, match=r"(?s)update.*program.grad_step"):
        check_optimizer(problem(optimizer=make()))


def test_an_optimizer_that_is_none() -> None:
    bound = nnx.Optimizer(Toy(nnx.Rngs(0)), optax.adam(1e-2), wrt=nnx.Param)
    for wrong in (bound, "adam", optax.adam, None):
        with pytest.raises(ModelError, match="not an optax transformation"):
            problem(optimizer=wrong)


# Models.


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda rngs: 5, "factory returned int, neither an nnx.Module nor a tree of arrays"),
        (lambda rngs: None, "factory returned NoneType, neither an nnx.Module nor a tree of arrays"),
        (5, "the model is a int, neither"),
        (lambda rngs: nnx.BatchNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs), "no trainable parameter"),
    ],
    ids=["a number", "nothing", "no factory", "no parameter"],
)
def test_models(model: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        problem(model=model)


def test_keys_that_depend_on_the_sharding() -> None:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(Toy(rngs), nnx.Dropout(0.1, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))))

    with pytest.raises(ModelError, match=r"(?s)only threefry gives the same numbers.*jax.random.key"):
        problem(model=make)


# Batches.


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.zeros((8, 6)), "y": np.zeros((4, 6))}, "x: 8, y: 4"),
        ({"x": np.zeros((0, 6)), "y": np.zeros((0, 6))}, "at least 1"),
        ({"x": 1.0}, "only scalars"),
        ({}, "the batch has no arrays"),
        ({"x": np.zeros((8, 6)), "y": "text"}, "batch leaf 'y' is no array"),
    ],
    ids=["unlike rows", "no rows", "only scalars", "empty", "a text"],
)
def test_batches(batch: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        problem(batch=batch)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b["x"], "structure"),
        (lambda b: {"x": b["x"]}, "structure"),
        (lambda b: b | {"z": b["x"]}, "structure"),
        (lambda b: b | {"y": b["y"][:4]}, "'y' has 4 rows, the others 8"),
        (lambda b: {k: v[:4] for k, v in b.items()}, "the batch has 4 rows, the global batch is 8"),
        (lambda b: b | {"y": b["y"][:, :3]}, r"'y' has shape \(8, 3\)"),
        (lambda b: b | {"y": np.float32(1)}, r"'y' has shape \(\)"),
        (lambda b: b | {"y": b["y"].astype(complex)}, "'y' is complex128, expected float32"),
    ],
)
def test_batches_at_a_step(program: Program, change: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        program.step(program.init(), change(example()))


class Empty(nnx.Module):
    """Has a parameter without elements, and adds what it makes of an empty leaf of the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.toy = Toy(rngs)
        self.none = nnx.Param(jnp.zeros((0, WIDTH)))

    def __call__(self, batch: Any) -> jax.Array:
        return self.toy(batch["x"]) + batch["none"] @ self.none[...]


def test_dims_of_size_zero() -> None:
    """They are no fault: they train as the model without them does."""
    batch = example() | {"none": np.zeros((BATCH, 0), np.float32)}
    whole = make_problem(Empty, optax.adam(1e-2), lambda m, b: jnp.mean((m(b) - b["y"]) ** 2), batch)
    (row,) = plan_problem(whole, [GridShape.parse("cpu:2")], num_microbatches=2)
    assert row.plan is not None, row.reason
    program = compile_program(whole, row.plan)
    losses = []
    state = program.init()
    for _ in range(2):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    model, losses_by_hand = Toy(nnx.Rngs(0)), []
    graph, params = nnx.split(model)
    moments = optax.adam(1e-2).init(params)
    for _ in range(2):
        loss, gradient = jax.value_and_grad(lambda p: toy_loss(nnx.merge(graph, p), example()))(params)
        updates, moments = optax.adam(1e-2).update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
        losses_by_hand.append(float(loss))
    np.testing.assert_allclose(losses, losses_by_hand, rtol=1e-5)


# Pins.


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"zero": 3, "dp": 1}, "pinned zero 3 shards over dp, and no stage here has a dp of 2 or more"),
        ({"zero": 1, "tp": 2}, "pinned zero 1 shards over dp"),
        ({"dp": 2, "tp": 2}, "pinned dp 2 and tp 2 make 4 devices a stage, a stage here has 2"),
        ({"dp": 4}, "pinned dp 4 forms no submesh here"),
    ],
)
def test_pins_that_no_stage_can_have(pins: dict[str, Any], says: str) -> None:
    (row,) = plan_problem(problem(), [GridShape.parse("a100:2")], constraints=Constraints(**pins))
    assert row.plan is None
    assert says in row.reason


def test_pins_that_contradict_each_other() -> None:
    with pytest.raises(UsageError, match=r"plan\.space=alpa has no ZeRO, and plan.zero=3 is pinned"):
        plan_problem(problem(), [GridShape.parse("a100:2")], constraints=Constraints(zero=3, space="alpa"))


# Plans.


def test_plans_for_something_else() -> None:
    p = problem()
    stages = (_all_layers(p),)
    with pytest.raises(PlanError, match="for a global batch of 16, the problem has 8"):
        compile_program(p, a_plan(p, stages=stages, global_batch=16))
    more = (replace(stages[0], layers=(0, stages[0].layers[1] + 1)),)
    with pytest.raises(PlanError, match="layers, this model has"):
        compile_program(p, a_plan(p, stages=more))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_plans_of_another_model(num_microbatches: int) -> None:
    """Of the same batch and number of layers, but another width."""
    p, other = problem(), problem(model=lambda rngs: Toy(rngs, hidden=12))
    plan = a_plan(other, stages=(_all_layers(p),), num_microbatches=num_microbatches)
    with pytest.raises(PlanError, match=r"(?s)was made for model .*make it again"):
        compile_program(p, plan)


def test_more_devices_than_there_are() -> None:
    p = problem()
    plan = a_plan(p, stages=(_all_layers(p, 64),), grid=GridShape.parse("cpu:64"))
    with pytest.raises(UsageError, match=r"(?s)needs 64 devices, jax has 8.*JAX_NUM_CPU_DEVICES=64"):
        compile_program(p, plan)
    plan = a_plan(p, stages=(_all_layers(p, 2),), grid=GridShape.parse("cpu:2"))
    with pytest.raises(UsageError, match="needs 2 devices, jax has 1"):
        compile_program(p, plan, jax.devices()[:1])


def test_every_refusal_is_for_the_user() -> None:
    assert all(issubclass(kind, ArenaError) and issubclass(kind, ValueError) for kind in (ModelError, PlanError))
