"""A jaxpr without its calls computes what it did with them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from arena_jax.compiler._compat import INLINED
from arena_jax.compiler.inlined import inlined

TABLE = np.arange(6.0, dtype=np.float32)


@jax.jit
def scaled(x, y):
    return x * y + TABLE, x


@jax.jit
def twice(x):
    first, same = scaled(x, 2.0)
    second, _ = scaled(first, same)
    return second, 3.0


def model(x, flag):
    a, three = twice(x)
    b, _ = twice(a + three)
    return jax.lax.cond(flag, lambda v: scaled(v, v)[0], jnp.sin, b), x, TABLE


def test_calls_are_replaced_by_what_they_call() -> None:
    x = jnp.linspace(-1.0, 1.0, 6)
    closed = jax.make_jaxpr(model)(x, True)
    assert any(eqn.primitive.name in INLINED for eqn in closed.jaxpr.eqns)
    jaxpr, consts = inlined(closed.jaxpr, closed.consts)
    assert not any(eqn.primitive.name in INLINED for eqn in jaxpr.eqns)
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    assert len(set(made)) == len(made)  # though `twice` and `scaled` are there several times
    for flag in (True, False):
        got = jaxpr_as_fun(closed.__class__(jaxpr, consts))(x, flag)
        for a, b in zip(got, model(x, flag), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_constant_of_several_calls_is_kept_once() -> None:
    closed = jax.make_jaxpr(model)(jnp.ones(6), True)
    _, consts = inlined(closed.jaxpr, closed.consts)
    assert sum(value is TABLE or np.array_equal(value, TABLE) for value in consts) <= 1
