"""The hardware catalogue: complete rows, and a cluster file's own."""

import tomllib
from dataclasses import fields

import pytest

from arena_jax.errors import UsageError
from arena_jax.grid import CATALOGUE, DeviceType
from arena_jax.grid.catalogue import ALIASES


def extended(text: str):
    return CATALOGUE.extended(tomllib.loads(text)["types"])


def test_the_types_of_the_paper_and_the_platforms_that_compile_are_there() -> None:
    for name in ("v100", "a100", "a100-80", "h100", "h200", "a40", "a10", "tpu-v5e", "tpu-v6e", "cpu"):
        assert CATALOGUE[name].name
    assert {CATALOGUE[name].platform for name in CATALOGUE.types} == {"cpu", "cuda", "tpu"}
    assert {alias: CATALOGUE[alias].name for alias in ALIASES} == dict(ALIASES)


@pytest.mark.parametrize("name", sorted(CATALOGUE.types))
def test_rows_are_complete_and_plausible(name: str) -> None:
    row = CATALOGUE[name]
    assert row.name == name
    assert len(row.source) > 20
    assert row.peak_flops["float32"] > 0
    assert 1e9 < row.peak("float64") < row.peak("float32") <= row.peak("bfloat16") < 1e16
    assert 2**33 <= row.memory_bytes <= 2**38
    assert 1e9 <= row.intra_node_bandwidth < row.memory_bandwidth < 1e13
    # A node's network is never faster than what its devices can say to each other together.
    assert 1e9 <= row.inter_node_bandwidth <= row.intra_node_bandwidth * row.devices_per_node
    assert 0 < row.intra_node_latency_s <= row.inter_node_latency_s < 1e-2
    assert 1 <= row.devices_per_node <= 256
    assert row.price_per_hour is None or 0.1 < row.price_per_hour < 50
    # A byte moved is worth between a handful and a thousand operations on real machines.
    assert 1 < row.peak("float32") / row.memory_bandwidth < 1000


def test_dtypes_without_a_rate_of_their_own() -> None:
    v100 = CATALOGUE["v100"]
    assert v100.peak("bfloat16") == v100.peak("float32") < v100.peak("float16")
    tpu = CATALOGUE["tpu-v5e"]
    assert tpu.peak("float64") == tpu.peak("float32") / 2
    assert tpu.peak("int8") == tpu.peak("float32")


def test_a_cluster_file_overrides_a_row() -> None:
    catalogue = extended("[types.a100-40]\ndevices_per_node = 4\nprice_per_hour = 2.0")
    row = catalogue["a100"]
    assert (row.devices_per_node, row.price_per_hour) == (4, 2.0)
    assert row.memory_bytes == CATALOGUE["a100"].memory_bytes
    assert CATALOGUE["a100"].devices_per_node == 8


def test_an_override_of_an_alias_is_what_the_alias_then_means() -> None:
    catalogue = extended("[types.a100]\ndevices_per_node = 4")
    assert catalogue["a100"].devices_per_node == 4
    assert catalogue["a100-40"].devices_per_node == 8


def test_a_cluster_file_adds_rows() -> None:
    catalogue = extended(
        """
        [types.mine]
        like = "a10"
        memory_bytes = 48_000_000_000
        [types.fast-cpu]
        threads = 2
        [types.odd]
        peak_flops = 1e12
        memory_bytes = 8_000_000_000
        memory_bandwidth = 1e11
        devices_per_node = 3
        """
    )
    assert catalogue["mine"].peak_flops == CATALOGUE["a10"].peak_flops
    assert catalogue["mine"].memory_bytes == 48_000_000_000
    assert (catalogue["fast-cpu"].platform, catalogue["fast-cpu"].threads) == ("cpu", 2)
    assert catalogue["odd"].peak("bfloat16") == 1e12
    assert all(getattr(catalogue["odd"], f.name) is not None for f in fields(DeviceType) if f.name not in _OPTIONAL)
    with pytest.raises(UsageError):
        CATALOGUE["mine"]


_OPTIONAL = ("price_per_hour", "threads")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[types.a100]\nmemory_byte = 5", "types.a100: unknown key 'memory_byte' (did you mean 'memory_bytes'?)"),
        ("[types.a100]\nname = 'x'", "unknown key 'name'"),
        ("[types.new]\nmemory_bytes = 5", "missing peak_flops, memory_bandwidth, devices_per_node"),
        ("[types.new]\nlike = 'a1000'", "unknown device type 'a1000' (did you mean 'a100"),
    ],
)
def test_faults_are_named(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        extended(text)
    assert says in str(caught.value)


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100-sxm'"):
        CATALOGUE["h100-sxn"]
