# ruff: noqa: E501 (texts as the compilers print them)
"""Reading collectives out of compiled programs, on texts in the forms that XLA's compilers print."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.compiler.hlo import Collective, collective_bytes, collectives

# Cut down from what the CUDA compiler makes of a scan of five layers, with half of each on a device.
CUDA = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%add.clone (x.3: f16[], y.1: f16[]) -> f16[] {
  %x.3 = f16[] parameter(0)
  %y.1 = f16[] parameter(1)
  ROOT %add.6 = f16[] add(%x.3, %y.1)
}

%gemm_computation (p0: f16[64,32], p1: f16[32,16]) -> f16[64,16] {
  %p0 = f16[64,32]{1,0} parameter(0)
  %p1 = f16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f16[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (param: (s32[], f16[64,32], f16[32,16])) -> (s32[], f16[64,32], f16[32,16]) {
  %param = (s32[], f16[64,32]{1,0}, f16[32,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %x = f16[64,32]{1,0} get-tuple-element(%param), index=1
  %w = f16[32,16]{1,0} get-tuple-element(%param), index=2
  %all-reduce-start = f16[64,32]{1,0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add.clone
  %gemm = f16[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_computation
  %copy = f16[64,32]{1,0} copy(%x)
  %all-reduce-done = f16[64,32]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %tuple = (s32[], f16[64,32]{1,0}, f16[32,16]{1,0}) tuple(%i, %all-reduce-done, %w)
}

%condition (param.1: (s32[], f16[64,32], f16[32,16])) -> pred[] {
  %param.1 = (s32[], f16[64,32]{1,0}, f16[32,16]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

%wrapped_scatter (p.2: f32[1024]) -> f32[256] {
  %p.2 = f32[1024]{0} parameter(0)
  ROOT %rs = f32[256]{0} reduce-scatter(%p.2), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add.clone
}

ENTRY %main (a: f16[64,32], w.1: f16[32,16], g: f32[1024], e: bf16[8]) -> f16[64,32] {
  %a = f16[64,32]{1,0} parameter(0)
  %w.1 = f16[32,16]{1,0} parameter(1)
  %g = f32[1024]{0} parameter(2)
  %e = bf16[8]{0} parameter(3)
  %zero = s32[] constant(0)
  %tuple.1 = (s32[], f16[64,32]{1,0}, f16[32,16]{1,0}) tuple(%zero, %a, %w.1)
  %while.1 = (s32[], f16[64,32]{1,0}, /*index=2*/f16[32,16]{1,0}) while(%tuple.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %gather-start = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%e), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %gather-done = bf16[16]{0} all-gather-done(%gather-start)
  %scatter-start = ((f32[1024]{0}), f32[256]{0}) async-start(%g), calls=%wrapped_scatter
  %scatter-done = f32[256]{0} async-done(%scatter-start)
  %both = (f32[64]{0}, f32[32]{0}) all-reduce(%g, %g), channel_id=9, replica_groups={{0,2},{1,3}}, to_apply=%add.clone
  %permuted = (f16[64]{0}, f16[64]{0}, u32[], u32[]) collective-permute-start(%a), channel_id=4, source_target_pairs={{0,2},{2,0}}
  %permute-done = f16[64]{0} collective-permute-done(%permuted)
  ROOT %out = f16[64,32]{1,0} get-tuple-element(%while.1), index=1
}
"""


def test_kinds_bytes_groups_and_counts() -> None:
    found = {(c.kind, c.size, c.stride): c for c in collectives(CUDA)}
    assert {key: (c.num_bytes, c.count) for key, c in found.items()} == {
        ("all_reduce", 2, 1): (64 * 32 * 2, 5.0),  # once in each round of the loop
        ("all_gather", 2, 2): (16 * 2, 1.0),  # the gathered size, not the operand beside it
        ("reduce_scatter", 4, 1): (1024 * 4, 1.0),  # before scattering
        ("all_reduce", 2, 2): ((64 + 32) * 4, 1.0),  # two arrays in one
        ("permute", 2, 2): (64 * 2, 1.0),
    }


def test_bytes_add_up_by_kind() -> None:
    assert collective_bytes(CUDA) == {
        "all_reduce": 5 * 64 * 32 * 2 + 96 * 4,
        "all_gather": 32,
        "reduce_scatter": 4096,
        "permute": 128,
    }


def test_what_runs_between_start_and_end_is_beside() -> None:
    (reduced,) = (c for c in collectives(CUDA) if c.stride == 1 and c.kind == "all_reduce")
    assert reduced.beside_flops == 2 * 64 * 16 * 32
    assert reduced.beside_bytes == 2 * 64 * 32 * 2  # the copy reads and writes; the product's bytes are its own
    others = [c for c in collectives(CUDA) if c != reduced]
    assert all(c.beside_flops == c.beside_bytes == 0 for c in others)


def test_two_that_run_together_share_what_runs_beside_them() -> None:
    text = CUDA.replace(
        "  %gemm = ",
        "  %second = f16[64,32]{1,0} all-reduce-start(%x), channel_id=8, replica_groups={{0,1},{2,3}}, "
        "to_apply=%add.clone\n  %gemm = ",
    ).replace("  ROOT %tuple = ", "  %second-done = f16[64,32]{1,0} all-reduce-done(%second)\n  ROOT %tuple = ")
    assert sum(c.beside_flops * c.count for c in collectives(text)) == 5 * 2 * 64 * 16 * 32


def test_tiled_layouts_of_a_tpu_do_not_confuse_shapes() -> None:
    text = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (p: bf16[128,256]) -> bf16[128,256] {
  %p = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[256,256]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%p), replica_groups={{0,1,2,3}}
  %done = bf16[256,256]{1,0:T(8,128)(2,1)} all-gather-done(%start)
  ROOT %ar = bf16[128,256]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups={{0,2}}, to_apply=%add
}
"""
    assert collectives(text) == (
        Collective(kind="all_gather", num_bytes=256 * 256 * 2, size=4, stride=1),
        Collective(kind="all_reduce", num_bytes=128 * 256 * 2, size=2, stride=2),
    )


def test_a_program_without_collectives_has_none() -> None:
    assert (
        collectives("HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n") == ()
    )
    assert collectives("") == ()


def _with_order(dims: list[int]) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    return st.tuples(st.just(dims), st.permutations(range(len(dims))))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(_with_order), st.data())
def test_groups_in_iota_form_are_those_that_numpy_makes(case: tuple[list[int], list[int]], data: st.DataObject) -> None:
    dims, order = case
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    # A group is a run of the transposed ids: a suffix of its dims.
    size = math.prod(ids.shape[data.draw(st.integers(0, len(dims))) :])
    groups = ids.reshape(-1, size)
    text = (
        "HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n  %p = f32[2]{0} parameter(0)\n"
        f"  ROOT %ar = f32[2]{{0}} all-reduce(%p), replica_groups=[{len(groups)},{size}]<=[{','.join(map(str, dims))}]"
        f"T({','.join(map(str, order))}), to_apply=%add\n}}\n"
    )
    (found,) = collectives(text)
    assert found.size == size
    assert found.stride == (groups[0][1] - groups[0][0] if size > 1 else 1)


@pytest.mark.parametrize("dtype", ["pred", "s4", "f8e4m3fn", "bf16", "f32", "c64"])
def test_sizes_of_element_types(dtype: str) -> None:
    text = (
        f"HloModule m\n\nENTRY %main (p: {dtype}[6]) -> {dtype}[6] {{\n  %p = {dtype}[6]{{0}} parameter(0)\n"
        f"  ROOT %ar = {dtype}[6]{{0}} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%add\n}}\n"
    )
    bits = {"pred": 8, "s4": 4, "f8e4m3fn": 8, "bf16": 16, "f32": 32, "c64": 64}[dtype]
    assert collectives(text)[0].num_bytes == 6 * bits / 8


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['a'=2,'b'=4] {'a'}", (2, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", (4, 1)),
        ("mesh['a'=2,'b'=4] {'a','b'}", (8, 1)),
        ("mesh['a'=8,'b'=1] {'a'}", (8, 1)),
        ("mesh['a'=8,'b'=2] {'a':(1)2}", (2, 8)),
        ("mesh['a'=8,'b'=2] {'a':(2)4}", (4, 2)),
    ],
)
def test_groups_along_axes_of_a_mesh(groups: str, expected: tuple[int, int]) -> None:
    text = (
        "HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n  %p = f32[2]{0} parameter(0)\n"
        f"  ROOT %ar = f32[2]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add\n}}\n"
    )
    (found,) = collectives(text)
    assert (found.size, found.stride) == expected


def test_products_that_a_tpu_has_as_convolutions_are_beside() -> None:
    text = """\
HloModule m, is_scheduled=true

%fused (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[64,16]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(1)
  %start = bf16[64,32]{1,0:T(8,128)(2,1)} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
  %f = bf16[64,16]{1,0:T(8,128)(2,1)} fusion(%p, %q), kind=kOutput, calls=%fused
  %done = bf16[64,32]{1,0:T(8,128)(2,1)} all-reduce-done(%start)
  ROOT %r = bf16[64,16]{1,0:T(8,128)(2,1)} copy(%f)
}
"""
    assert collectives(text)[0].beside_flops == 2 * 64 * 16 * 32


def test_a_loop_without_a_known_count_counts_as_its_condition_says() -> None:
    """So the TPU compiler prints loops, and collectives that start with their operands beside them."""
    text = CUDA.replace(', backend_config={"known_trip_count":{"n":"5"}}', "").replace(
        "  ROOT %lt = pred[] constant(true)\n",
        "  %limit = s32[]{:T(128)} constant(7)\n  %i.1 = s32[] get-tuple-element(%param.1), index=0\n"
        "  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT\n",
    )
    (looped,) = (c for c in collectives(text) if c.stride == 1 and c.kind == "all_reduce")
    assert looped.count == 7


def test_a_scatter_that_starts_with_its_operand_counts_that_once() -> None:
    text = """\
HloModule m, is_scheduled=true

ENTRY %main (p: f32[1024]) -> f32[256] {
  %p = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0}, f32[256]{0}) reduce-scatter-start(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
  ROOT %done = f32[256]{0} reduce-scatter-done(%start)
}
"""
    assert collectives(text) == (Collective(kind="reduce_scatter", num_bytes=4096, size=4, stride=1),)


def test_the_tpu_compilers_scatter_is_an_all_reduce_in_a_computation_of_its_own() -> None:
    text = """\
HloModule m, is_scheduled=true

%all-reduce-scatter.1.clone (p.1: bf16[8192,64]) -> bf16[1024,64] {
  %p.1 = bf16[8192,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.2 = bf16[8192,64]{1,0:T(8,128)(2,1)} all-reduce(%p.1), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %zero = u32[] constant(0)
  %shard = u32[] partition-id()
  ROOT %slice = bf16[1024,64]{1,0} dynamic-slice(%all-reduce.2, %shard, %zero), dynamic_slice_sizes={1024,64}
}

ENTRY %main (p: bf16[8192,64]) -> bf16[1024,64] {
  %p = bf16[8192,64]{1,0} parameter(0)
  ROOT %fusion.1 = bf16[1024,64]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1.clone
}
"""
    assert collectives(text) == (Collective(kind="reduce_scatter", num_bytes=2 * 8192 * 64, size=8, stride=1),)


def test_a_collective_that_several_fusions_share_counts_once() -> None:
    text = """\
HloModule m, is_scheduled=true

%begin (p.1: bf16[16,64]) -> (bf16[16,64], bf16[64,64]) {
  %p.1 = bf16[16,64]{1,0} parameter(0)
  %all-gather.1 = bf16[64,64]{1,0} all-gather(%p.1), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %custom-call.1 = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) custom-call(%p.1, %all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (p.2: bf16[16,64], p.3: bf16[64,64]) -> bf16[64,64] {
  %p.2 = bf16[16,64]{1,0} parameter(0)
  %p.3 = bf16[64,64]{1,0} parameter(1)
  ROOT %all-gather.2 = bf16[64,64]{1,0} all-gather(%p.2), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (p: bf16[16,64]) -> bf16[64,64] {
  %p = bf16[16,64]{1,0} parameter(0)
  %async-collective-start = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) fusion(%p), kind=kCustom, calls=%begin
  %whole = bf16[64,64]{1,0} get-tuple-element(%async-collective-start), index=1
  ROOT %async-collective-done = bf16[64,64]{1,0} fusion(%p, %whole), kind=kCustom, calls=%beside
}
"""
    assert collectives(text) == (Collective(kind="all_gather", num_bytes=2 * 64 * 64, size=4, stride=1),)
