"""Allocations, submeshes and grid shapes, against counting by brute force."""

import re
from collections import Counter
from itertools import combinations_with_replacement, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.errors import UsageError
from arena_jax.grid import (
    CATALOGUE,
    Allocation,
    GridShape,
    Submesh,
    grids_of,
    logical_meshes,
    place,
    submesh_choices,
    tilings,
)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    name = draw(st.sampled_from(sorted(CATALOGUE.types)))
    per_node = draw(st.integers(1, CATALOGUE[name].devices_per_node))
    return Allocation(name, draw(st.integers(1, 40)), per_node)


@given(allocations(), st.data())
def test_text_reads_back(allocation: Allocation, data: st.DataObject) -> None:
    assert Allocation.parse(str(allocation)) == allocation
    explicit = f"{allocation.device_type}:{allocation.num_nodes}x{allocation.devices_per_node}"
    assert Allocation.parse(explicit) == allocation
    grid = GridShape(allocation, data.draw(st.integers(1, allocation.num_devices)))
    assert GridShape.parse(str(grid)) == grid
    assert GridShape.parse(str(allocation)) == GridShape(allocation, 1)


@given(allocations(), st.integers(1, 100))
def test_more_devices_than_a_node_has_names_what_works(allocation: Allocation, more: int) -> None:
    name = allocation.device_type
    wanted = CATALOGUE[name].devices_per_node + more
    with pytest.raises(UsageError) as caught:
        Allocation.parse(f"{name}:{wanted}")
    offered = re.search(r"write (\S+) for", caught.value.hint)
    assert offered is not None, caught.value.hint
    assert Allocation.parse(offered[1]).num_devices == wanted


def test_aliases_mean_their_type() -> None:
    assert str(GridShape.parse("a100:2x4/s2")) == "a100-40:2x4/s2"
    assert Allocation.parse("h100:8").device_type == "h100-sxm"
    assert Allocation.parse(" v100:1x4 ") == Allocation.parse("v100-32:4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100", "write TYPE:K, TYPE:NxD"),
        ("", "write TYPE:K"),
        (":4", "write TYPE:K"),
        ("a100:", "write TYPE:K"),
        ("a100:4x", "write TYPE:K"),
        ("a100:-4", "write TYPE:K"),
        ("a100:2x4x2", "write TYPE:K"),
        ("a100:2x4/s", "write TYPE:K"),
        ("a100:4/2", "write TYPE:K"),
        ("a100:0", "at least 1"),
        ("a100:0x4", "at least 1"),
        ("a100:2x4/s0", "use 1 to 8 stages"),
        ("a100:2x4/s9", "use 1 to 8 stages"),
        ("a1000:4", "did you mean 'a100"),
        ("a10:4", "a10:2x2"),
    ],
)
def test_what_cannot_be_meant_says_what_can(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        GridShape.parse(text)
    assert says in str(caught.value)


def test_a_grid_where_an_allocation_is_wanted() -> None:
    with pytest.raises(UsageError, match="write a100-40:4"):
        Allocation.parse("a100:4/s2")


def test_submeshes_lie_inside_a_node_or_are_whole_nodes() -> None:
    assert {str(s) for s in submesh_choices(Allocation("a100-40", 3, 8))} == {"1x1", "1x2", "1x4", "1x8", "2x8", "3x8"}
    assert {str(s) for s in submesh_choices(Allocation("cpu", 1, 6))} == {"1x1", "1x2", "1x4", "1x6"}


def _node_fillings(per_node: int) -> set[tuple[Submesh, ...]]:
    """All ways to fill one node with powers of two smaller than it."""
    powers = [1 << k for k in range(per_node.bit_length()) if 1 << k < per_node]
    return {
        tuple(Submesh(1, n) for n in chosen)
        for count in range(1, per_node + 1)
        for chosen in combinations_with_replacement(powers, count)
        if sum(chosen) == per_node
    }


def _partitions(total: int, most: int) -> list[tuple[int, ...]]:
    if total == 0:
        return [()]
    return [(k, *rest) for k in range(min(total, most), 0, -1) for rest in _partitions(total - k, k)]


def _by_brute_force(num_nodes: int, per_node: int) -> dict[int, set[frozenset[tuple[Submesh, int]]]]:
    """Number of stages -> the multisets of submeshes that fill the allocation, node by node."""
    found: dict[int, set[frozenset[tuple[Submesh, int]]]] = {}
    fillings = sorted(_node_fillings(per_node))
    for num_whole in range(num_nodes + 1):
        for parts in _partitions(num_whole, num_whole):
            whole = tuple(Submesh(n, per_node) for n in parts)
            for chosen in combinations_with_replacement(fillings, num_nodes - num_whole):
                stages = [*whole, *(s for filling in chosen for s in filling)]
                found.setdefault(len(stages), set()).add(frozenset(Counter(stages).items()))
    return found


@pytest.mark.parametrize(
    ("num_nodes", "per_node"), [(1, 1), (1, 4), (1, 6), (1, 7), (1, 8), (2, 2), (2, 4), (3, 4), (4, 1), (2, 6), (3, 3)]
)
def test_tilings_are_all_packings(num_nodes: int, per_node: int) -> None:
    allocation = Allocation("cpu", num_nodes, per_node)
    expected = _by_brute_force(num_nodes, per_node)
    for num_stages in range(1, allocation.num_devices + 1):
        found = tilings(GridShape(allocation, num_stages))
        assert len(found) == len(set(found))
        assert {frozenset(Counter(t).items()) for t in found} == expected.get(num_stages, set())
    grids = grids_of(allocation, allocation.num_devices)
    assert {grid.num_stages for grid in grids} == set(expected)
    assert [grid.num_stages for grid in grids_of(allocation, 2)] == [s for s in (1, 2) if s in expected]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("cpu:6/s2", {(4, 2)}), ("cpu:4/s3", {(2, 1, 1)}), ("cpu:4/s2", {(2, 2)}), ("cpu:8/s3", {(4, 2, 2)})],
)
def test_promised_tilings(text: str, sizes: set[tuple[int, ...]]) -> None:
    assert {tuple(s.num_devices for s in tiling) for tiling in tilings(GridShape.parse(text))} == sizes


@pytest.mark.parametrize("text", ["cpu:8/s3", "cpu:6/s4", "cpu:2x4/s3", "cpu:3x4/s4", "cpu:2x6/s4", "a100:2x8/s5"])
def test_every_order_of_a_tiling_has_a_place(text: str) -> None:
    grid = GridShape.parse(text)
    per_node = grid.allocation.devices_per_node
    for tiling in tilings(grid):
        for order in set(permutations(tiling)):
            placed = place(grid.allocation, order)
            assert placed is not None
            numbers = [number for stage in placed for number in stage]
            assert sorted(numbers) == list(range(grid.num_devices))
            for submesh, devices in zip(order, placed, strict=True):
                assert len(devices) == submesh.num_devices
                nodes = Counter(number // per_node for number in devices)
                assert len(nodes) == submesh.num_nodes
                assert set(nodes.values()) == {submesh.devices_per_node}


def test_what_does_not_pack_has_no_place() -> None:
    # Two nodes of three hold one pair each.
    allocation = Allocation("cpu", 2, 3)
    pair, one = Submesh(1, 2), Submesh(1, 1)
    assert place(allocation, (pair, pair, pair)) is None
    assert place(allocation, (pair, one, pair, one)) is not None
    assert place(allocation, (Submesh(2, 3), one)) is None


@given(st.integers(1, 200))
def test_logical_meshes_are_the_divisor_pairs(num_devices: int) -> None:
    meshes = list(logical_meshes(num_devices))
    assert len(meshes) == len(set(meshes)) == sum(num_devices % d == 0 for d in range(1, num_devices + 1))
    assert all(dp * tp == num_devices for dp, tp in meshes)
    assert meshes[0] == (num_devices, 1)
