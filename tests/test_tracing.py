"""Tracing quickly: what it must not change, and what it must not look at again and again."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval

from arena_jax.compiler import make_problem
from arena_jax.compiler.dims import RuleBook, rule_of
from arena_jax.compiler.trace import trace_loss
from arena_jax.compiler.tracing import quick_tracing
from tests.problems import recipe_problem

MODELS = ("gpt", "moe", "wide_resnet")


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def message_of_missing_sharding() -> str:
    said = []

    def ask(x: jax.Array) -> jax.Array:
        assert not hasattr(x, "sharding")
        assert getattr(x, "sharding", "none") == "none"
        with pytest.raises(AttributeError, match="'sharding' attribute is not available") as caught:
            _ = (x + 1).sharding
        said.append(str(caught.value))
        return x

    jax.make_jaxpr(ask)(1.0)
    return said[0]


def test_a_tracer_still_has_no_sharding_and_says_the_same() -> None:
    before = message_of_missing_sharding()
    with quick_tracing():
        assert message_of_missing_sharding() == before
    assert message_of_missing_sharding() == before
    assert "sharding" not in partial_eval.DynamicJaxprTracer.__dict__


def test_collections_go_on_behind_it() -> None:
    with quick_tracing():
        assert not gc.isenabled()
        with quick_tracing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), quick_tracing():
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    with quick_tracing():
        pass
    assert not gc.isenabled()


def test_several_threads_trace_at_once() -> None:
    inside, leave = threading.Barrier(3), threading.Event()

    def trace() -> None:
        with quick_tracing():
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=trace) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    with quick_tracing():
        pass
    assert not gc.isenabled()
    leave.set()
    for thread in threads:
        thread.join()
    assert gc.isenabled()
    assert "sharding" not in partial_eval.DynamicJaxprTracer.__dict__


class Normalised(nnx.Module):
    """Keys at initialisation, running statistics in the loss: flax writes both through their variables."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


def test_no_write_of_a_variable_explains_where_a_tracer_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*args: Any) -> Any:
        raise AssertionError("looked for the origin of a tracer")

    monkeypatch.setattr(partial_eval.DynamicJaxprTracer, "_origin_msg", explain)
    batch = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    problem = make_problem(Normalised, optax.sgd(0.1), lambda m, b: m(b["x"]).sum(), batch)
    assert {leaf.name for leaf in problem.leaves} >= {"norm/mean", "linear/kernel"}
    trace_loss(problem)


@pytest.mark.parametrize("model", MODELS)
def test_a_book_of_rules_says_what_the_rules_say(model: str) -> None:
    jaxpr = trace_loss(recipe_problem(model)).jaxpr
    book = RuleBook()
    for eqn in jaxpr.eqns:
        assert book.rule_of(eqn) == rule_of(eqn)


def test_equal_equations_are_looked_at_once() -> None:
    def twice(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.sin(x) @ x
        return x.reshape(2, 2, 4)

    jaxpr = jax.make_jaxpr(twice)(jnp.ones((4, 4))).jaxpr
    book = RuleBook()
    rules = [book.rule_of(eqn) for eqn in jaxpr.eqns]
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    sines = [rule for name, rule in zip(names, rules, strict=True) if name == "sin"]
    products = [rule for name, rule in zip(names, rules, strict=True) if name == "dot_general"]
    assert sines[0] is sines[1]
    assert products[0] is products[1]
    assert len({id(rule) for rule in rules}) == len(set(names))


def test_parameters_without_a_hash_are_looked_at_every_time() -> None:
    eqn = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns[0]
    odd = eqn.replace(params={**eqn.params, "note": []})
    assert RuleBook().rule_of(odd) == rule_of(odd)
