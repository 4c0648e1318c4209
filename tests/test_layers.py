"""Layers: as many as can be, about equal, with nothing but the residual stream across their borders."""

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.compiler import analyse, make_problem
from arena_jax.compiler.layers import MAX_LAYERS, find_layers
from tests.problems import BATCH, recipe_analysis

# What crosses between two blocks of the tiny models: rows x positions x hidden, in float32.
STREAM_BYTES = BATCH * 16 * 32 * 4


@pytest.mark.parametrize("model", ["gpt", "bert"])
@pytest.mark.parametrize("variation", ["", "model.scan_layers=true", "model.remat=true"])
def test_only_the_residual_stream_crosses(model: str, variation: str) -> None:
    layers = recipe_analysis(model, *([variation] if variation else [])).layers
    assert layers.live_bytes == (0, *(STREAM_BYTES,) * (layers.num_layers - 1))


@pytest.mark.parametrize("model", ["gpt", "bert", "moe", "wide_resnet"])
def test_layers_cover_the_program_in_about_equal_shares(model: str) -> None:
    layers = recipe_analysis(model).layers
    assert 4 <= layers.num_layers <= MAX_LAYERS
    assert list(layers.starts) == sorted(set(layers.starts))
    assert max(layers.flops) <= 1.5 * sum(layers.flops) / layers.num_layers
    assert all(flops >= 0 for flops in layers.flops)


def test_experts_pass_on_the_stream_and_one_sum() -> None:
    layers = recipe_analysis("moe").layers
    assert set(layers.live_bytes[1:]) <= {STREAM_BYTES, STREAM_BYTES + 4}


def test_a_scan_can_be_cut_between_any_two_layers() -> None:
    unrolled = recipe_analysis("gpt", "model.num_layers=8").layers
    scanned = recipe_analysis("gpt", "model.num_layers=8", "model.scan_layers=true").layers
    assert sum(scanned.flops) == pytest.approx(sum(unrolled.flops), rel=0.02)
    inside = [p for p in scanned.starts if p.iteration]
    assert [p.iteration for p in inside] == list(range(1, 8))
    assert len({p.node for p in inside}) == 1
    # Blocks that are one unit in both: every block of the scan, every rematerialised one.
    whole = recipe_analysis("gpt", "model.num_layers=8", "model.remat=true").layers
    assert scanned.num_layers == whole.num_layers
    assert scanned.flops == pytest.approx(whole.flops, rel=0.02)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_fewer_layers_when_asked(most: int) -> None:
    analysis = recipe_analysis("gpt", "model.num_layers=8")
    layers = find_layers(analysis.graph, most)
    assert layers.num_layers == most
    assert sum(layers.flops) == pytest.approx(sum(analysis.layers.flops))


def test_cuts_lie_in_program_order_at_real_work() -> None:
    analysis = recipe_analysis("gpt")
    nodes = [p.node for p in analysis.layers.starts]
    assert all(a < b for a, b in pairwise(nodes))
    assert all(analysis.graph.nodes[n].placed for n in nodes[1:])


def test_an_equation_that_outweighs_the_rest_is_a_layer_of_its_own() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["wide"]
        for weight in params["narrow"]:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def params(_: nnx.Rngs) -> Any:
        return {"wide": jnp.ones((4096, 8)), "narrow": [jnp.ones((8, 8))] * 6}

    batch = {"x": np.ones((BATCH, 4096), "float32")}
    layers = analyse(make_problem(params, optax.sgd(0.1), loss, batch)).layers
    assert layers.flops[0] > 0.9 * sum(layers.flops)
    assert layers.num_layers >= 4
    assert max(layers.flops[1:]) < 0.5 * sum(layers.flops[1:])


def test_cuts_of_equal_weight_make_equal_layers() -> None:
    """All blocks pass on the same bytes, and eight of them make four layers of two, embedding and head aside."""
    analysis = recipe_analysis("bert", "model.num_layers=8")
    layers = find_layers(analysis.graph, 4)
    assert layers.num_layers == 4
    assert max(layers.flops) <= 1.35 * min(layers.flops)


def test_heavy_cuts_where_as_many_layers_are_wanted() -> None:
    graph = recipe_analysis("wide_resnet").graph
    light, heavy = find_layers(graph), find_layers(graph, only_light=False)
    assert heavy.num_layers >= light.num_layers
    assert sum(heavy.flops) == pytest.approx(sum(light.flops))
