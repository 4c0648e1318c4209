"""The bundled models: their sizes, their switches, and that a compiler can trace them."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.bundled import load_file, model_path
from arena_jax.job import build
from arena_jax.recipe import find_recipes, load_recipe
from arena_jax.values import Weighted

gpt, bert, moe, wide_resnet = (load_file(model_path(name)) for name in ("gpt", "bert", "moe", "wide_resnet"))

SMALL: dict[Any, dict[str, Any]] = {
    gpt: {"vocabulary": 32, "sequence_length": 16, "hidden": 32, "num_layers": 4, "num_heads": 4},
    bert: {"vocabulary": 40, "sequence_length": 16, "hidden": 32, "num_layers": 4, "num_heads": 4},
    moe: {
        "vocabulary": 32,
        "sequence_length": 16,
        "hidden": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_experts": 4,
        "feed_forward": 64,
        "expert_group_size": 16,
    },
    wide_resnet: {
        "image_size": 8,
        "image_channels": 1,
        "num_classes": 10,
        "blocks": (1, 3),
        "base_channels": 4,
        "large_stem": False,
    },
}
FAMILIES = pytest.mark.parametrize("module", list(SMALL), ids=lambda m: m.__name__.rpartition(".")[2])


# Compiled once per shape.
TOP2 = jax.jit(moe.top2, static_argnums=1)


def batch_of(module: Any, config: Any, size: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if module is wide_resnet:
        shape = (size, config.image_size, config.image_size, config.image_channels)
        return {"images": rng.random(shape, np.float32), "labels": rng.integers(0, config.num_classes, size)}
    shape = (size, config.sequence_length)
    batch = {"tokens": rng.integers(0, config.vocabulary, shape), "targets": rng.integers(0, config.vocabulary, shape)}
    if module is bert:
        batch["weights"] = (rng.random(shape) < 0.3).astype(np.float32)
    return batch


def number(out: Any) -> jax.Array:
    """The scalar of what a loss function returned."""
    loss = out[0] if isinstance(out, tuple) else out
    return loss.sum / loss.weight if isinstance(loss, Weighted) else loss


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """(constants, carries) of a scan; jax 0.12 keeps them as trees of its inputs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(constants), len(carries)


def value_and_gradients(module: Any, model: nnx.Module, batch: Any) -> tuple[jax.Array, nnx.State]:
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(parameters: nnx.State, rest: nnx.State) -> Any:
        def loss(parameters: nnx.State) -> jax.Array:
            return number(module.loss_fn(nnx.merge(graphdef, parameters, jax.tree.map(lambda x: x, rest)), batch))

        return jax.value_and_grad(loss)(parameters)

    return run(parameters, rest)


def num_parameters(name: str) -> int:
    job = build(load_recipe(name))
    model = nnx.eval_shape(lambda: job.make_model(nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def size_of(name: str) -> float | None:
    """Read ``6_8b`` or ``760m`` off a recipe's name, as a number of parameters."""
    *_, last = name.split("_")
    digits, unit = last[:-1], last[-1]
    if unit not in "mb" or not digits.isdigit():
        return None
    whole = name.split("_")[-2]
    text = f"{whole}.{digits}" if whole.isdigit() else digits
    return float(text) * (1e6 if unit == "m" else 1e9)


@pytest.mark.parametrize("name", [info.name for info in find_recipes() if size_of(info.name)])
def test_a_recipe_has_the_parameters_that_its_name_says(name: str) -> None:
    assert num_parameters(name) == pytest.approx(size_of(name), rel=0.04)


@pytest.mark.parametrize("name", ["bert_15b", "gpt_6_7b", "moe_27b", "wide_resnet_6_8b"])
def test_paper_sizes_trace_without_being_materialised(name: str) -> None:
    job = build(load_recipe(name))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: job.make_model(nnx.Rngs(0))))
    micro = jax.tree.map(lambda s: jax.ShapeDtypeStruct((s.shape[0] // 16, *s.shape[1:]), s.dtype), job.example_batch)

    def run(state: nnx.State, batch: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return number(job.loss_fn(model, batch)), nnx.state(model)

    half = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float16), nnx.filter_state(state, nnx.Param))
    for tree in (state, nnx.merge_state(half, nnx.filter_state(state, nnx.Not(nnx.Param)))):
        loss, after = jax.eval_shape(run, tree, micro)
        assert loss.shape == ()
        assert loss.dtype == jnp.float32
        assert jax.tree.structure(after) == jax.tree.structure(state)


@FAMILIES
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
def test_switches_trace_and_keep_the_state(module: Any, scan: bool, remat: bool) -> None:
    extra = {} if module is wide_resnet else {"dropout": 0.1}
    config = module.Config(**SMALL[module], scan_layers=scan, remat=remat, **extra)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0))))
    leaves, structure = jax.tree.flatten(state)

    def run(leaves: list[Any], batch: Any) -> Any:
        model = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        return number(module.loss_fn(model, batch)), jax.tree.leaves(nnx.state(model))

    closed = jax.make_jaxpr(run)(leaves, batch_of(module, config))
    assert [v.aval.shape for v in closed.jaxpr.outvars[1:]] == [leaf.shape for leaf in leaves]
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(scans) == int(scan)
    stacked = {id(v) for v, leaf in zip(closed.jaxpr.invars, leaves, strict=False) if leaf.shape}
    for equation in scans:
        num_consts, num_carry = scan_sizes(equation.params)
        assert num_consts == 0
        # Whatever is scanned over is a leaf of the model itself, so the stack can be cut by slicing leaves.
        assert all(id(v) in stacked for v in equation.invars[num_carry:])


def stacked_like(scanned: nnx.State, unrolled: nnx.State) -> nnx.State:
    """The leaves of an unrolled model in the arrangement of a scanned one."""
    flat = dict(nnx.to_flat_state(unrolled))
    leaves = []
    for path, variable in nnx.to_flat_state(scanned):
        if path not in flat:
            place = len(path) - path[::-1].index("blocks")
            layers = range(variable.get_value().shape[0])
            value = jnp.stack([flat[(*path[:place], layer, *path[place:])].get_value() for layer in layers])
        else:
            value = flat[path].get_value()
        leaves.append((path, variable.replace(value)))
    return nnx.from_flat_state(leaves)


@FAMILIES
def test_scan_and_remat_change_nothing_but_how(module: Any) -> None:
    sizes = SMALL[module] if module is wide_resnet else {**SMALL[module], "num_layers": 4 if module is moe else 2}
    plain = module.Model(module.Config(**sizes), rngs=nnx.Rngs(1))
    scanned = module.Model(module.Config(**sizes, scan_layers=True, remat=True), rngs=nnx.Rngs(1))
    nnx.update(scanned, stacked_like(nnx.state(scanned), nnx.state(plain)))
    batch = batch_of(module, plain.config)
    loss, gradients = value_and_gradients(module, plain, batch)
    scan_loss, scan_gradients = value_and_gradients(module, scanned, batch)
    np.testing.assert_allclose(scan_loss, loss, rtol=1e-6)
    expected = stacked_like(scan_gradients, gradients)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale), scan_gradients, expected)


@FAMILIES
def test_evaluation_changes_no_state_and_is_repeatable(module: Any) -> None:
    extra = {} if module is wide_resnet else {"dropout": 0.5}
    model = module.Model(module.Config(**SMALL[module], **extra), rngs=nnx.Rngs(0))
    batch = batch_of(module, model.config)
    before = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
    model.eval()
    first, second = number(module.loss_fn(model, batch)), number(module.loss_fn(model, batch))
    assert first == second
    after = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    model.train()
    assert number(module.loss_fn(model, batch)) != first


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_dropout_draws_anew_each_time_and_in_each_layer(scan: bool) -> None:
    config = gpt.Config(**SMALL[gpt], dropout=0.5, scan_layers=scan)
    model = gpt.Model(config, rngs=nnx.Rngs(0))
    batch = batch_of(gpt, config)
    assert gpt.loss_fn(model, batch) != gpt.loss_fn(model, batch)
    counts = [np.asarray(c.get_value()) for _, c in nnx.to_flat_state(nnx.state(model, nnx.RngCount))]
    # Twice per forward pass in a layer (one dropout, two branches), once on the embedding.
    assert sorted({int(c) for count in counts for c in np.ravel(count)}) == [2, 4]
    keys = [jax.random.key_data(k.get_value()) for _, k in nnx.to_flat_state(nnx.state(model, nnx.RngKey))]
    rows = np.concatenate([np.reshape(k, (-1, 2)) for k in keys])
    assert len(np.unique(rows, axis=0)) == len(rows) == 1 + config.num_layers


def test_no_dropout_means_no_random_state() -> None:
    assert not jax.tree.leaves(nnx.state(gpt.Model(gpt.Config(**SMALL[gpt]), rngs=nnx.Rngs(0)), nnx.RngState))


def test_tied_embeddings_share_one_parameter() -> None:
    counts = {}
    for tied in (True, False):
        config = gpt.Config(**SMALL[gpt], tie_embeddings=tied)
        state = nnx.state(gpt.Model(config, rngs=nnx.Rngs(0)), nnx.Param)
        counts[tied] = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert counts[False] - counts[True] == 32 * 32


def test_a_decoder_sees_no_future_and_an_encoder_does() -> None:
    for module, sees in ((gpt, False), (bert, True)):
        model = module.Model(module.Config(**SMALL[module]), rngs=nnx.Rngs(0))
        tokens = jnp.arange(16)[None] % 32
        changed = tokens.at[0, 10].set(0)
        same = np.isclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-7).all()
        assert same != sees


@FAMILIES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loss_is_a_float32_near_the_full_one(module: Any, dtype: str) -> None:
    model = module.Model(module.Config(**SMALL[module]), rngs=nnx.Rngs(0))
    batch = batch_of(module, model.config)
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
    rest_copy = jax.tree.map(jnp.copy, rest)  # the first loss below moves the statistics in place
    full = number(module.loss_fn(nnx.merge(graphdef, parameters, rest), batch))
    half = jax.tree.map(lambda x: x.astype(dtype), parameters)
    batch = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, batch)
    loss = number(module.loss_fn(nnx.merge(graphdef, half, rest_copy), batch))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, full, rtol=0.05)
    # The model's own switch does the same from float32 parameters.
    config = module.Config(**SMALL[module], dtype=dtype)
    switched = number(module.loss_fn(module.Model(config, rngs=nnx.Rngs(0)), batch))
    assert switched.dtype == jnp.float32
    np.testing.assert_allclose(switched, full, rtol=0.05)


@FAMILIES
def test_float64_stays_float64(module: Any) -> None:
    with jax.enable_x64(True):
        config = module.Config(**SMALL[module], param_dtype="float64")
        graphdef, state = nnx.split(nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0))))
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float64")}
        batch = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch_of(module, config))
        loss = jax.eval_shape(lambda state: number(module.loss_fn(nnx.merge(graphdef, state), batch)), state)
        assert loss.dtype == np.dtype("float64")


def test_masked_loss_counts_only_what_is_masked() -> None:
    model = bert.Model(bert.Config(**SMALL[bert]), rngs=nnx.Rngs(0))
    batch = batch_of(bert, model.config)
    loss, metrics = bert.loss_fn(model, batch)
    assert float(loss.weight) == batch["weights"].sum()
    halves = [bert.loss_fn(model, {k: v[rows] for k, v in batch.items()})[0] for rows in (slice(0, 2), slice(2, 4))]
    together = sum(h.sum for h in halves) / sum(h.weight for h in halves)
    np.testing.assert_allclose(together, loss.sum / loss.weight, rtol=1e-6)
    assert 0 <= float(metrics["accuracy"].sum) <= float(loss.weight)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), shape=st.sampled_from([(1, 2, 1), (8, 2, 5), (8, 5, 3), (24, 6, 4), (24, 3, 24)]))
def test_top2_fills_slots_once_and_drops_the_rest(seed: int, shape: tuple[int, int, int]) -> None:
    num_tokens, num_experts, capacity = shape
    logits = jax.random.normal(jax.random.key(seed), (2, num_tokens, num_experts))
    gates = jax.nn.softmax(logits, axis=-1)
    combine, balance = TOP2(gates, capacity)
    combine, gates = np.asarray(combine), np.asarray(gates)
    used = combine > 0
    assert (used.sum(axis=1) <= 1).all()  # a slot holds one token
    assert (used.sum(axis=(2, 3)) <= 2).all()  # a token has two slots at most
    assert float(balance) > 0
    for group in range(2):
        room = [capacity] * num_experts
        best = np.argsort(-gates[group], axis=-1)[:, :2]
        expected = np.zeros((num_tokens, num_experts))
        taken = [0] * num_experts
        for rank in (0, 1):
            for token in range(num_tokens):
                expert = best[token, rank]
                taken[expert] += 1
                if taken[expert] <= room[expert]:
                    expected[token, expert] = gates[group, token, expert] / gates[group, token, best[token]].sum()
        np.testing.assert_allclose(combine[group].sum(-1), expected, rtol=1e-5, atol=1e-7)


def test_batch_statistics_move_towards_the_batch() -> None:
    model = wide_resnet.Model(wide_resnet.Config(**SMALL[wide_resnet]), rngs=nnx.Rngs(0))
    batch = batch_of(wide_resnet, model.config)
    out = model.stem.convolution(batch["images"])
    wide_resnet.loss_fn(model, batch)
    np.testing.assert_allclose(model.stem.norm.mean[...], 0.1 * out.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "wrong"),
    [(gpt, {"num_heads": 5}), (moe, {"num_layers": 3}), (moe, {"num_experts": 1}), (wide_resnet, {"blocks": ()})],
)
def test_sizes_that_contradict_one_another_are_refused(module: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        module.Config(**{**SMALL[module], **wrong})


def test_model_files_load_under_names_of_our_own() -> None:
    assert gpt.__name__.startswith("_arena_jax_files_")
    assert load_file(Path(gpt.__file__)) is gpt
