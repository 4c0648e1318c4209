"""What couples samples: said by the trace, and borne out by numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.compiler import make_problem
from arena_jax.compiler.coupling import couples_samples
from arena_jax.compiler.trace import trace_loss
from arena_jax.values import Weighted
from tests.doubles import WIDTH, Toy
from tests.problems import random_batch, recipe_analysis, recipe_problem

ROWS = 8


@pytest.mark.parametrize(
    "case",
    [("gpt",), ("gpt", "model.scan_layers=true"), ("gpt", "model.remat=true"), ("bert",), ("moe",)],
    ids=" ".join,
)
def test_models_whose_samples_are_alone(case: tuple[str, ...]) -> None:
    assert recipe_analysis(*case).coupling == ""


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (("gpt", "model.dropout=0.1"), "dropout"),
        (("gpt", "model.dropout=0.1", "model.scan_layers=true"), "dropout"),
        (("wide_resnet",), "beyond a sum"),
        # Two sequences share the slots of an expert.
        (("moe", "model.expert_group_size=32"), "beyond a sum"),
    ],
    ids=str,
)
def test_models_whose_samples_meet(case: tuple[str, ...], says: str) -> None:
    assert says in recipe_analysis(*case).coupling


def error(model: Toy, batch: Any) -> jax.Array:
    return (model(batch["x"]) - batch["y"]) ** 2


def mask(batch: Any) -> jax.Array:
    return (batch["y"] > 0).astype("float32")


def scanned(model: Toy, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, _: (model(x), None), batch["x"], length=3)
    return jnp.mean((x - batch["y"]) ** 2)


def over_rows_scanned(model: Toy, batch: Any) -> jax.Array:
    def step(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(total + model(row[None])[0]), None

    return jax.lax.scan(step, jnp.zeros(WIDTH), batch["x"])[0].sum()


ALONE: dict[str, Callable[[Toy, Any], Any]] = {
    "a mean": lambda m, b: error(m, b).mean(),
    "a mean of sums": lambda m, b: error(m, b).sum(-1).mean(),
    "a scaled sum of two": lambda m, b: 0.5 * error(m, b).mean() + 0.1 * jnp.abs(m(b["x"])).mean(),
    "a penalty on parameters": lambda m, b: error(m, b).mean() + 0.1 * jnp.sum(m.up.kernel[...] ** 2),
    "a softmax of each row": lambda m, b: (jax.nn.softmax(m(b["x"])) * b["y"]).sum(-1).mean(),
    "a sort in each row": lambda m, b: jnp.sort(m(b["x"]), axis=1)[:, 0].mean(),
    "rows turned around": lambda m, b: m(b["x"]).T.mean(),
    "a flattening": lambda m, b: error(m, b).reshape(-1).mean(),
    "a scan over depth": scanned,
    "a mask in a mean": lambda m, b: (error(m, b) * mask(b)).mean(),
    "a weighted sum": lambda m, b: Weighted(jnp.sum(error(m, b) * mask(b)), jnp.sum(mask(b))),
}
TOGETHER: dict[str, Callable[[Toy, Any], Any]] = {
    "a normaliser from the batch": lambda m, b: jnp.sum(error(m, b) * mask(b)) / jnp.sum(mask(b)),
    "batch statistics": lambda m, b: ((m(b["x"]) - m(b["x"]).mean(0, keepdims=True)) ** 2).mean(),
    "the largest error": lambda m, b: error(m, b).max(),
    "the root of a mean": lambda m, b: jnp.sqrt(error(m, b).mean()),
    "a product of means": lambda m, b: error(m, b).mean() * m(b["x"]).mean(),
    "a contrast of rows": lambda m, b: jax.nn.log_softmax(m(b["x"]) @ m(b["x"]).T).mean(),
    "a softmax over rows": lambda m, b: (jax.nn.softmax(m(b["x"]), axis=0) * b["y"]).sum(),
    "neighbours": lambda m, b: (m(b["x"]) * jnp.roll(m(b["x"]), 1, axis=0)).mean(),
    "the order of rows": lambda m, b: jnp.cumsum(m(b["x"]), axis=0).mean(),
    "a scan over rows": over_rows_scanned,
    "pairs of rows": lambda m, b: jax.nn.softmax(m(b["x"]).reshape(-1, 2 * WIDTH)).max(-1).mean(),
    "a clipped weight": lambda m, b: Weighted(jnp.sum(error(m, b) * mask(b)), jnp.maximum(jnp.sum(mask(b)), 1000.0)),
    "some rows": lambda m, b: error(m, b)[:2].mean(),
}


def coupling(loss: Callable[[Toy, Any], Any]) -> str:
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    return couples_samples(trace_loss(make_problem(Toy, optax.sgd(0.1), loss, {"x": x, "y": x})))


def in_parts(loss: Callable[[Toy, Any], Any], num_parts: int) -> float:
    """The loss from microbatches, as the runtime combines it."""
    rng = np.random.default_rng(0)
    batch = {k: rng.standard_normal((ROWS, WIDTH)).astype("float32").reshape(num_parts, -1, WIDTH) for k in "xy"}
    graphdef, state = nnx.split(Toy(nnx.Rngs(0)))
    total = weight = 0.0
    for m in range(num_parts):
        value = loss(nnx.merge(graphdef, state), {k: jnp.asarray(v[m]) for k, v in batch.items()})
        value = value if isinstance(value, Weighted) else Weighted(value, 1.0)
        total, weight = total + float(value.sum), weight + float(value.weight)
    return total / weight


@pytest.mark.parametrize("name", ALONE)
def test_losses_of_samples_alone(name: str) -> None:
    assert coupling(ALONE[name]) == ""


@pytest.mark.parametrize("name", TOGETHER)
def test_losses_of_samples_together(name: str) -> None:
    assert coupling(TOGETHER[name])


@pytest.mark.parametrize("name", ["a mean", "a penalty on parameters", "a weighted sum", "a flattening"])
def test_microbatches_do_not_change_what_is_alone(name: str) -> None:
    assert in_parts(ALONE[name], 4) == pytest.approx(in_parts(ALONE[name], 1), rel=1e-5)


@pytest.mark.parametrize("name", ["a normaliser from the batch", "batch statistics", "the largest error", "some rows"])
def test_microbatches_change_what_is_together(name: str) -> None:
    assert in_parts(TOGETHER[name], 4) != pytest.approx(in_parts(TOGETHER[name], 1), rel=1e-3)


def test_experts_see_the_same_groups_in_every_microbatch() -> None:
    """The trace says that nothing couples: then halves average to the whole."""
    problem = recipe_problem("moe")
    batch = random_batch(problem)
    graphdef, *state = nnx.split(problem_model(problem), ...)
    loss = jax.jit(lambda state, b: problem.loss_fn(nnx.merge(graphdef, *state), b))
    halves = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(2)]
    values = [_number(loss(state, part)) for part in (batch, *halves)]
    assert values[0] == pytest.approx((values[1] + values[2]) / 2, rel=1e-5)


def problem_model(problem: Any) -> nnx.Module:
    values = problem.make_values(nnx.Rngs(0))
    states, start = [], 0
    for kind in ("params", "frozen", "state"):
        count = len(problem.of_kind(kind))
        states.append(problem.treedefs[kind].unflatten(values[start : start + count]))
        start += count
    return nnx.merge(problem.graphdef, *states)


def _number(out: Any) -> float:
    loss = out[0] if isinstance(out, tuple) else out
    return float(loss)
