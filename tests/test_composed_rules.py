"""Rules of loops and branches, put together from what is inside, checked by running them on slices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from arena_jax.compiler.dims import Rule, rule_of
from tests.test_dims import cut, integers, normal


def loop(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (jnp.int32(0), x))[1]


def until(x: Any) -> Any:
    """A loop whose test reads the array."""
    return lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 0.1, lambda y: y * 0.5, x)


def branch(x: Any, w: Any) -> Any:
    pick = jnp.int32(1)
    return lax.switch(pick, [lambda a, b: a @ b, lambda a, b: jnp.tanh(a)[:, :1] + b[:1]], x, w)


# name -> (function, operands, the primitive, per operand an einsum with dots for what stays whole, the result's).
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, list[str], str]] = {
    "a loop over elements": (loop(jnp.sin), (normal(4, 6),), "while", ["ab"], "ab"),
    "a loop that normalises": (loop(lambda x: x / x.sum(1, keepdims=True)), (normal(4, 6) + 9,), "while", ["a."], "a."),
    "a loop that accumulates": (loop(lambda x: jnp.cumsum(x, 0)), (normal(4, 6),), "while", [".b"], ".b"),
    "a loop that transposes": (loop(lambda x: x.T), (normal(4, 4),), "while", [".."], ".."),
    "a loop that squares": (loop(lambda x: x @ x), (0.3 * normal(4, 4),), "while", [".."], ".."),
    "a loop that regroups": (
        loop(lambda x: jax.nn.softmax(x.reshape(x.shape[0], -1, 3), -1).reshape(x.shape)),
        (normal(4, 6),),
        "while",
        ["ab"],
        "ab",
    ),
    "a loop until small": (until, (normal(4, 6),), "while", [".."], ".."),
    "a branch": (branch, (normal(4, 6), normal(6, 6)), "cond", ["a.", "..b"], "ab"),
    "a custom derivative": (jax.nn.relu, (normal(4, 6),), "custom_jvp_call", [], ""),
}


def single(name: str) -> tuple[Any, Rule | None]:
    function, args, primitive, _, _ = CASES[name]
    found = [eqn for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns if eqn.primitive.name == primitive]
    return found[0], rule_of(found[0])


def letters(dims: Any, rule: Rule) -> str:
    """Per dim the first factor that may be sharded, numbered; a dot where there is none."""
    return "".join(str(d[0]) if d and d[0] not in rule.fixed else "." for d in dims)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][3]])
def test_a_loop_or_branch_on_slices_gives_slices(name: str) -> None:
    function, args, _, _, wanted = CASES[name]
    eqn, rule = single(name)
    assert rule is not None
    operands = rule.operands[len(eqn.invars) - len(args) :]
    whole = np.asarray(function(*args))
    free = sorted({f for dims in (*operands, rule.results[-1]) for d in dims for f in d} - rule.fixed)
    for factor in free:
        size = rule.sizes[factor]
        for start, stop in ((0, size // 2), (size // 2, size)):
            parts = [cut(np.asarray(a), d, rule, factor, start, stop) for a, d in zip(args, operands, strict=True)]
            made = np.asarray(function(*parts))
            expected = cut(whole, rule.results[-1], rule, factor, start, stop)
            np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    found = letters(rule.results[-1], rule)
    assert [x == "." for x in found] == [x == "." for x in wanted]


def test_calls_and_custom_derivatives_are_left_to_be_entered() -> None:
    _, rule = single("a custom derivative")
    assert rule is None


def test_what_is_inside_and_unknown_stays_whole() -> None:
    def solve(x: Any) -> Any:
        return loop(lambda y: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y))(x)

    (eqn,) = [e for e in jax.make_jaxpr(solve)(normal(4, 6)).jaxpr.eqns if e.primitive.name == "while"]
    rule = rule_of(eqn)
    assert rule is not None
    assert letters(rule.results[-1], rule) == ".."


def test_rows_pass_through_a_lookup_in_a_loop() -> None:
    """Walking a table from a start per row: rows are free, the table stays whole."""

    def walk(table: Any, ids: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.take(table, c[1])), (jnp.int32(0), ids))

    (eqn,) = [e for e in jax.make_jaxpr(walk)(integers(8, 8), integers(8, 4)).jaxpr.eqns if e.primitive.name == "while"]
    rule = rule_of(eqn)
    assert rule is not None
    where = [i for i, a in enumerate(eqn.invars) if a.aval.shape == (8,)]
    assert [letters(rule.operands[i], rule) for i in where] == ["."]
    assert letters(rule.results[-1], rule) != "."
