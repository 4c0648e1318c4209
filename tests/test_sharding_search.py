"""The tensor-parallel choices of the search on models whose good answer is known."""

import pytest

from arena_jax.compiler.intra_op import work as w
from arena_jax.compiler.intra_op.flat import Value
from arena_jax.compiler.intra_op.layout import TP, MeshShape
from arena_jax.compiler.intra_op.strategies import reading_work, scattered
from arena_jax.compiler.problem import STATE
from tests.problems import recipe_analysis


def chosen(model: str, tp: int, *overrides: str) -> dict[str, tuple[str | None, ...]]:
    """Parameter path -> its axes, replicated ones included."""
    analysis = recipe_analysis(model, *overrides)
    found = analysis.shardings.find(2, tp).parameters
    return {
        leaf.name: tuple(found.get(i, (None,) * len(leaf.shape)))
        for i, leaf in enumerate(analysis.trace.leaves)
        if leaf.kind != STATE
    }


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_blocks_follow_megatron(model: str, tp: int) -> None:
    """Heads and the first feed-forward matrix by column, what reads them by row: two reductions a block."""
    axes = chosen(model, tp)
    for i in range(4):
        block = f"blocks/blocks/{i}"
        assert axes[f"{block}/attention/qkv"] == (None, None, "tp", None)
        assert axes[f"{block}/attention/out"] == ("tp", None, None)
        assert axes[f"{block}/feed_forward/up"] == (None, "tp")
        assert axes[f"{block}/feed_forward/down"] == ("tp", None)


def test_a_scanned_stack_is_sharded_like_the_unrolled_one() -> None:
    unrolled, stacked = chosen("gpt", 2), chosen("gpt", 2, "model.scan_layers=true")
    for name in ("attention/qkv", "attention/out", "feed_forward/up", "feed_forward/down"):
        assert stacked[f"blocks/blocks/{name}"] == (None, *unrolled[f"blocks/blocks/0/{name}"])


def test_experts_are_spread() -> None:
    """Expert parallelism: devices of a dp group hold different experts, to which rows travel all to all."""
    axes = chosen("moe", 2)
    for i in range(2):
        mixture = f"pairs/blocks/{i}/mixture/mixture"
        assert axes[f"{mixture}/up"] == ("dp", None, "tp")
        assert axes[f"{mixture}/down"] == ("dp", "tp", None)


@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_forward_reductions_are_as_few_as_can_be(model: str) -> None:
    """One all-reduce of the stream for each residual branch; nothing of a block is gathered."""
    analysis = recipe_analysis(model)
    sharding = analysis.shardings.find(2, 2)
    starts = [p.node for p in analysis.layers.starts]
    kinds: dict[str, float] = {}
    for c in w.collectives(sharding.works[starts[1] :].sum(axis=0)):
        if c.phase == w.FORWARD and c.axis == "tp":
            kinds[c.kind] = kinds.get(c.kind, 0) + c.count
    if model == "gpt":
        # 4 blocks with 2 branches; the head's cross entropy may reduce over the vocabulary too.
        assert 8 <= kinds["all_reduce"] <= 8 + 4
        assert kinds.get("all_gather", 0) <= 1
    assert set(kinds) <= {"all_reduce", "all_gather"}


def test_data_parallelism_alone_shards_no_parameter() -> None:
    analysis = recipe_analysis("gpt")
    sharding = analysis.shardings.find(4, 1)
    assert all("tp" not in spec for spec in sharding.parameters.values())
    rows = [spec for spec in sharding.specs.values() if spec]
    assert sum(spec[0] == "dp" for spec in rows) > len(rows) / 2


@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_tensor_parallelism_shares_the_work(model: str) -> None:
    analysis = recipe_analysis(model)
    whole = w.flops(analysis.shardings.find(1, 1).works).sum()
    shared = w.flops(analysis.shardings.find(1, 2).works).sum()
    assert whole / 2 <= shared * (1 + 1e-9)
    assert shared < 0.6 * whole


def test_every_primitive_of_the_models_has_a_rule() -> None:
    for model in ("gpt", "bert", "moe", "wide_resnet"):
        assert recipe_analysis(model).shardings.find(2, 2).unknown == ()


def test_a_parameter_is_gathered_for_both_passes_of_every_microbatch_and_its_gradient_scattered() -> None:
    mesh, value = MeshShape(2, 4), Value(number=0, shape=(8, 16), num_bytes=512, is_float=True)
    moved = reading_work(mesh, value, (TP, 0), (0, 0), needs_gradient=True, is_parameter=True)
    assert [*w.collectives(moved)] == [w.Collective("tp", "all_gather", w.PARAMETER, 1024, 2)]
    frozen = reading_work(mesh, value, (TP, 0), (0, 0), needs_gradient=False, is_parameter=True)
    assert [*w.collectives(frozen)] == [w.Collective("tp", "all_gather", w.PARAMETER, 512, 1)]
    reader = w.empty()
    w.add_collective(reader, "tp", "all_reduce", w.GRADIENT, 800)
    both = reader + scattered(moved, reader)
    assert both[w.collective_at("tp", "all_reduce", w.GRADIENT)] == 800 - 512
    assert both[w.collective_at("tp", "reduce_scatter", w.GRADIENT)] == 512
    assert not scattered(moved, w.empty()).any()  # a reader that is not split has the whole gradient
