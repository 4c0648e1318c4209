"""Rules of opaque kernels: the text they are written in, the names they go by, their FLOPs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import arena_jax
from arena_jax.compiler.dims import Rule, rule_of
from arena_jax.compiler.flops import eqn_flops
from arena_jax.compiler.rules import kernels
from arena_jax.compiler.rules.einsum import parse
from arena_jax.errors import UsageError

ATTENTION = "b h s d, b h t d, b h t d -> b h s d"


@pytest.fixture(autouse=True)
def only_this_test() -> Iterator[None]:
    before = dict(kernels._registered)
    yield
    kernels._registered.clear()
    kernels._registered.update(before)


def names(rule: Rule, sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """A rule as text, a name per free factor by its size (sizes are distinct), a dot for what stays whole."""
    by_size = {size: name for name, size in sizes.items()}

    def one(dims: Any) -> str:
        return " ".join("".join(by_size[rule.sizes[f]] for f in d if f not in rule.fixed) or "." for d in dims)

    return [one(d) for d in rule.operands], [one(d) for d in rule.results]


def test_attention_in_words() -> None:
    rule = parse(ATTENTION).rule([(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)], [(2, 4, 8, 16)])
    sizes = {"b": 2, "h": 4, "s": 8, "t": 6, "d": 16}
    assert names(rule, sizes) == (["b h s d", "b h . d", "b h . d"], ["b h s d"])
    assert rule.flops == 4 * 2 * 4 * 8 * 6 * 16  # two products, two operations per multiply-add


def test_names_can_be_reduced_or_kept_whole() -> None:
    rule = parse("m k, k n -> m n", reduced="k", fixed=["n"]).rule([(2, 3), (3, 5)], [(2, 5)])
    assert names(rule, {"m": 2, "k": 3, "n": 5}) == (["m k", "k ."], ["m ."])
    assert [rule.sizes[f] for f in rule.reduced] == [3]


def test_a_dim_of_two_names_has_two_factors_major_first() -> None:
    rule = parse("b (k g) d, b k d -> b (k g) d").rule([(2, 12, 5), (2, 3, 5)], [(2, 12, 5)])
    assert [rule.sizes[f] for f in rule.operands[0][1]] == [3, 4]
    assert rule.operands[1][1] == rule.operands[0][1][:1]


def test_broadcast_dims_and_further_operands_are_left_alone() -> None:
    rule = parse("b h, b h -> b h").rule([(2, 3), (1, 3), (7,), ()], [(2, 3)])
    assert rule.operands[1] == ((), rule.operands[0][1])
    assert rule.operands[2:] == [((),), ()]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("b h, b h", {}, "0 '->'"),
        ("b -> b -> b", {}, "2 '->'"),
        ("b h-, b -> b", {}, "'-' is no dim"),
        ("b (h, b -> b", {}, "'(h' is no dim"),
        ("b b -> b", {}, "'b' twice"),
        ("b k -> b", {"reduced": "q"}, "no 'q' to be reduced"),
        ("b k -> b", {"reduced": "b"}, "'b' cannot be reduced"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        arena_jax.sharding_rule("kernel", text, **options)
    assert "kernel" not in kernels.registered_rules()


@pytest.mark.parametrize(
    ("shapes", "results"),
    [([(2, 3)], [(2, 3)]), ([(2, 3), (4, 3)], [(2, 4)]), ([(2, 3), (3, 4)], [(2, 4), (2,)])],
)
def test_a_rule_that_does_not_describe_the_shapes_is_refused(
    shapes: list[tuple[int, ...]], results: list[tuple[int, ...]]
) -> None:
    with pytest.raises(ValueError, match="m k, k n -> m n"):
        parse("m k, k n -> m n").rule(shapes, results)


@given(st.text(alphabet="ab ,.()->", max_size=20))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        rule = parse(text)
    except UsageError:
        return
    assert rule.results


def double(x: Any, *, flops: int = 0, name: str = "double") -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    cost = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0) if flops else None
    spec = pl.BlockSpec((1, 8), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        cost_estimate=cost,
        interpret=True,
        name=name,
    )(x)


def equation(function: Any, *args: Any) -> Any:
    return jax.make_jaxpr(function)(*args).jaxpr.eqns[-1]


def test_a_pallas_kernel_is_known_by_its_name() -> None:
    eqn = equation(double, jnp.ones((4, 8)))
    assert rule_of(eqn) is None
    arena_jax.sharding_rule("double", "a b -> a b", fixed="b")
    rule = rule_of(eqn)
    assert rule is not None
    assert names(rule, {"a": 4, "b": 8}) == (["a ."], ["a ."])
    assert rule_of(equation(lambda x: double(x, name="other"), jnp.ones((4, 8)))) is None


def test_a_rule_that_does_not_fit_its_kernel_warns_and_replicates() -> None:
    arena_jax.sharding_rule("double", "a b c -> a b c")
    with pytest.warns(UserWarning, match="'double' does not fit"):
        assert rule_of(equation(double, jnp.ones((4, 8)))) is None


def test_the_flops_of_a_kernel_are_never_zero() -> None:
    x = jnp.ones((4, 8))
    assert eqn_flops(equation(lambda y: double(y, flops=1000), x)) == 1000
    assert eqn_flops(equation(double, x)) >= 32  # four steps of its body, eight elements each
    arena_jax.sharding_rule("double", "a b -> a b")
    assert eqn_flops(equation(double, x)) == 64
    foreign = equation(lambda y: jax.ffi.ffi_call("elsewhere", jax.ShapeDtypeStruct((4,), "float32"))(y), x)
    assert eqn_flops(foreign) == 32
    arena_jax.sharding_rule("elsewhere", "a b -> a", reduced="b")
    assert eqn_flops(foreign) == 64
    rule = rule_of(foreign)
    assert rule is not None
    assert list(rule.reduced.values()) == ["sum"]


def test_a_function_with_a_derivative_of_its_own_is_known_by_its_name() -> None:
    @jax.custom_vjp
    def flash(q: Any, k: Any) -> Any:
        return jnp.einsum("bhsd,bhtd->bhst", q, k).sum(-1, keepdims=True) * q

    flash.defvjp(lambda q, k: (flash(q, k), (q, k)), lambda res, g: res)
    eqn = equation(flash, jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 6, 5)))
    assert rule_of(eqn) is None
    arena_jax.sharding_rule("flash", "b h s d, b h t d -> b h s d", fixed="d")
    rule = rule_of(eqn)
    assert rule is not None
    assert names(rule, {"b": 2, "h": 3, "s": 4, "t": 6, "d": 5}) == (["b h s .", "b h . ."], ["b h s ."])


def test_the_author_of_a_kernel_may_have_said_it() -> None:
    @custom_partitioning
    def norm(x: Any, scale: Any) -> Any:
        return x / x.sum(-1, keepdims=True) * scale[None]

    def nothing(*_: Any) -> None:
        return None

    norm.def_partition(
        partition=nothing,
        infer_sharding_from_operands=nothing,
        sharding_rule="... d, d -> ... d",
        need_replication_factors=("d",),
    )
    eqn = equation(norm, jnp.ones((2, 3)), jnp.ones(3))
    rule = rule_of(eqn)
    assert rule is not None
    assert names(rule, {"a": 2, "d": 3}) == (["a .", "."], ["a ."])


def test_a_kernel_without_a_rule_follows_its_reference() -> None:
    @custom_partitioning
    def norm(x: Any) -> Any:
        return x / x.sum(-1, keepdims=True)

    norm.def_partition(partition=lambda *_: None)
    rule = rule_of(equation(norm, jnp.ones((2, 3))))
    assert rule is not None
    assert names(rule, {"a": 2, "d": 3}) == (["a ."], ["a ."])


def test_a_shard_map_lies_as_its_specs_say() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    @jax.shard_map(mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"))
    def product(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "model")

    eqn = equation(product, jnp.ones((6, 8)), jnp.ones((8, 5)))
    rule = rule_of(eqn)
    assert rule is not None
    assert names(rule, {"data": 2, "model": 4}) == (["data model", "model ."], ["data ."])
    assert eqn_flops(eqn) >= 2 * 6 * 8 * 5


def cudnn_equation(*, heads: int, kv_heads: int, bias: bool, training: bool) -> Any:
    """What ``jax.nn.dot_product_attention(implementation="cudnn")`` traces to, which needs a GPU to trace."""

    def array(*shape: int) -> Any:
        return SimpleNamespace(aval=jax.core.ShapedArray(shape, np.dtype("bfloat16")))

    q, kv = array(2, 16, heads, 32), array(2, 24, kv_heads, 32)
    empty = array(0)
    return SimpleNamespace(
        primitive=SimpleNamespace(name="dot_product_attention_fwd_wrapper"),
        params={"layout": "AttentionLayout.BTNH"},
        invars=[q, kv, kv, array(1, heads, 16, 24) if bias else empty, *[empty] * 6],
        outvars=[q, array(2, heads, 16)] if training else [q],
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_cudnn_attention_is_split_by_samples_and_heads(heads: int, kv_heads: int, bias: bool, training: bool) -> None:
    eqn = cudnn_equation(heads=heads, kv_heads=kv_heads, bias=bias, training=training)
    rule = rule_of(eqn)
    assert rule is not None
    (b,), (), h, () = [tuple(f for f in d if f not in rule.fixed) for d in rule.operands[0]]
    assert rule.sizes[b] == 2
    assert [rule.sizes[f] for f in h] == ([4] if heads == kv_heads else [3, 4])
    assert rule.operands[1][2] == h[:1]
    assert rule.results[0] == rule.operands[0]
    if bias:
        assert rule.operands[3][:2] == ((), h)
    if training:
        assert rule.results[1][:2] == ((b,), h)
    assert eqn_flops(eqn) == (3 if bias else 2) * 2 * 2 * 16 * 24 * heads * 32


@pytest.mark.parametrize("implementation", ["xla", None])
def test_xla_attention_is_all_known(implementation: Any) -> None:
    q, kv = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 6, 2, 16))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation)

    def unknown(jaxpr: Any) -> list[str]:
        found = []
        for eqn in jaxpr.eqns:
            body = eqn.params.get("jaxpr")
            if body is not None:
                found += unknown(getattr(body, "jaxpr", body))
            elif rule_of(eqn) is None:
                found.append(eqn.primitive.name)
        return found

    assert unknown(jax.make_jaxpr(attend)(q, kv, kv).jaxpr) == []
