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
    assert tpu.peak("int16") == tpu.peak("float32")


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


_OPTIONAL = (
    *(
        "compute_capability",
        "price_per_hour",
        "threads",
        "num_cores",
        "fp32_lanes_per_core",
        "cache_bytes",
        "power_w",
        "process_nm",
    ),
)


def test_every_number_has_a_source() -> None:
    for row in CATALOGUE.types.values():
        for f in fields(DeviceType):
            if f.name not in ("name", "source", "sources", "platform", "threads"):
                assert len(row.source_of(f.name)) > 8, (row.name, f.name)
        assert set(row.sources) <= {f.name for f in fields(DeviceType)}


def test_gpu_rows_hold_what_the_cost_model_reads() -> None:
    for row in CATALOGUE.types.values():
        if row.platform == "cuda":
            facts = (row.num_cores, row.fp32_lanes_per_core, row.cache_bytes, row.power_w, row.process_nm)
            assert None not in facts, row.name
            # Lanes x cores x 2 FLOPs x a clock between 1 and 2.6 GHz is the plain float32 rate.
            clock = row.peak("float32") / (2 * row.num_cores * row.fp32_lanes_per_core)
            assert 1e9 < clock < 2.6e9, (row.name, clock)


def test_a_cluster_file_describes_its_networks() -> None:
    tables = tomllib.loads(
        """
        [networks.fabric]
        types = ["a100", "v100-32"]
        link = "infiniband"
        bandwidth = 100e9
        [networks.board]
        types = ["a100-40"]
        scope = "intra"
        link = "pcie"
        bandwidth = 25e9
        latency_s = 2e-5
        """
    )["networks"]
    catalogue = CATALOGUE.with_networks(tables)
    a100 = catalogue["a100"]
    assert (a100.inter_node_link, a100.inter_node_bandwidth) == ("infiniband", 100e9)
    assert (a100.intra_node_link, a100.intra_node_bandwidth, a100.intra_node_latency_s) == ("pcie", 25e9, 2e-5)
    assert a100.source_of("inter_node_bandwidth") == "networks.fabric of the cluster file"
    assert catalogue["v100"].inter_node_bandwidth == 100e9
    assert catalogue["a100-80"] == CATALOGUE["a100-80"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[networks.a]\ntypes = ['a100']\nspeed = 1", "unknown key 'speed'"),
        ("[networks.a]\ntypes = ['a100']\nlink = 'infinband'", "did you mean 'infiniband'"),
        ("[networks.a]\nlink = 'ethernet'", "names no types"),
        ("[networks.a]\ntypes = ['a100']", "nothing about them"),
        ("[networks.a]\ntypes = ['a100']\nscope = 'rack'\nlink = 'ethernet'", "scope is 'rack'"),
        ("[networks.a]\ntypes = ['a100']\nbandwidth = -1", "inter_node_bandwidth must be a number above 0"),
        (
            "[networks.a]\ntypes = ['a100']\nbandwidth = 1\n[networks.b]\ntypes = ['a100-40']\nbandwidth = 2",
            "a100-40 is on networks.a already",
        ),
    ],
)
def test_faults_of_networks_are_named(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        CATALOGUE.with_networks(tomllib.loads(text)["networks"])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[types.a100]\nmemory_byte = 5", "types.a100: unknown key 'memory_byte' (did you mean 'memory_bytes'?)"),
        ("[types.a100]\nname = 'x'", "unknown key 'name'"),
        ("[types.new]\nmemory_bytes = 5", "missing peak_flops, memory_bandwidth, devices_per_node"),
        ("[types.a100]\nmemory_bytes = -5", "memory_bytes must be a number above 0, got -5"),
        ("[types.a100]\nmemory_kind = 'hbm3'", "memory_kind is 'hbm3' (did you mean 'hbm'?)"),
        ("[types.a100]\npeak_flops = { float16 = 1e12 }", "peak_flops lacks float32"),
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
