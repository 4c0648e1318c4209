"""Clusters, profiles and jobs that cannot be meant: one clear error each."""

from pathlib import Path

import pytest

from arena_jax.errors import UsageError
from arena_jax.scheduler import Cluster, RestartCosts, Scenario, Settings, Workload, load_profiles, make_policy
from arena_jax.scheduler.seeds import scale_arrivals
from tests.scheduler.build import A100, cluster, job, profiles, workload


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "no nodes"),
        ({"nodes": [{"type": "a100", "count": 0, "devices": 4}]}, "no nodes"),
        ({"nodes": [{"type": "a1000", "count": 1}]}, "unknown device type 'a1000'"),
        ({"nodes": [{"count": 1}]}, r"nodes\[0\] has no 'type'"),
        ({"nodes": [{"type": "a100", "count": -1}]}, "whole number of at least 0"),
        ({"nodes": [{"type": "a100", "count": 1, "devices": 0}]}, "whole number of at least 1"),
        ({"nodes": [{"type": "a100", "count": 1.5}]}, "whole number"),
        ({"nodes": [{"type": "a100", "cuont": 1}]}, "unknown key 'cuont'"),
        ({"node": []}, "unknown table 'node'"),
        ({"nodes": 5}, "'nodes' must be tables"),
        ({"nodes": {"type": "a100"}}, "'nodes' must be tables"),
        ({"nodes": [{"type": 5}]}, "type must be a name, got 5"),
        ({"nodes": [{"type": "a100"}], "types": {"a100": 3}}, "'types' must be tables"),
        ({"nodes": [{"type": "a100", "count": 1, "devices": d} for d in (2, 4)]}, "twice"),
    ],
)
def test_clusters(tables: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster.from_tables(tables)


def test_cluster_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read cluster file"):
        Cluster.load(tmp_path / "none.toml")
    path = tmp_path / "c.toml"
    path.write_text("nodes = [")
    with pytest.raises(UsageError, match="is not TOML"):
        Cluster.load(path)
    path.write_text(
        '[[nodes]]\ntype = "slow"\ncount = 2\ndevices = 3\n[types.slow]\nlike = "a10"\nprice_per_hour = 0.5\n'
    )
    assert Cluster.load(path).prices_per_hour().tolist() == [0.5]


def test_a_job_that_fits_nowhere_says_why() -> None:
    with pytest.raises(UsageError, match=r"job 'big' .* may not use any of its feasible allocations"):
        workload([job("big", min_devices=16)])
    with pytest.raises(UsageError, match="no feasible plan on any of its devices"):
        workload([job("A")], cluster(v100=(1, 4)), profiles(m=A100))


def test_missing_profiles_are_all_named() -> None:
    with pytest.raises(UsageError) as caught:
        workload([job("A", model="mm"), job("B", model="zzz"), job("C")])
    assert "job 'A': no profile of model 'mm' (did you mean 'm'?)" in str(caught.value)
    assert "job 'B'" in str(caught.value)


def test_doubled_ids() -> None:
    with pytest.raises(UsageError, match="'A' occurs twice"):
        workload([job("A"), job("A", 5)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrival_s": -1.0}, "arrival"),
        ({"arrival_s": float("nan")}, "arrival"),
        ({"arrival_s": 1e308}, "arrival"),
        ({"num_steps": 1e300}, "steps"),
        ({"num_steps": 0}, "steps"),
        ({"num_steps": float("inf")}, "steps"),
        ({"weight": 0.0}, "weight"),
        ({"arrival_s": 10.0, "deadline_s": 5.0}, "deadline"),
        ({"deadline_s": float("nan")}, "deadline"),
        ({"num_devices": 0}, "requested number"),
        ({"min_devices": 4, "max_devices": 2}, "min_devices"),
    ],
)
def test_jobs(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job("A", **fields)  # type: ignore[arg-type]


def test_profiles_with_impossible_times() -> None:
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="seconds a step"):
            Workload.build([job("A")], cluster(a100=(1, 4)), profiles(m={"a100:1": seconds}))


def test_profile_files(tmp_path: Path) -> None:
    on = cluster(a100=(1, 4))
    with pytest.raises(UsageError, match="cannot read profiles"):
        load_profiles(tmp_path / "none.csv", on)
    path = tmp_path / "p.csv"
    path.write_text("family,params\nbert,1B\n")
    with pytest.raises(UsageError, match="lacks the columns"):
        load_profiles(path, on)
    header = "family,params,global_batch,gpu,nodes,gpus_per_node,seconds\n"
    path.write_text(header + "bert,1B,8,a100,1,1,-4\nbert,1B,8,a1000,1,1,4\nbert,1B,8,a100,one,1,4\n")
    with pytest.raises(UsageError) as caught:
        load_profiles(path, on)
    assert all(f"line {n}" in str(caught.value) for n in (2, 3, 4))


def test_profile_files_that_are_something_else(tmp_path: Path) -> None:
    on = cluster(a100=(1, 4))
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"profiles '.*b.csv' is not UTF-8"):
        load_profiles(binary, on)
    index = tmp_path / "index.db"
    index.write_bytes(b"SQLite format 3\x00" + b"junk" * 100)
    with pytest.raises(UsageError, match=r"is no plan index of this version; it is now 'index.db.set-aside"):
        load_profiles(index, on)
    folder = tmp_path / "elasticflow"
    folder.mkdir()
    for text, message in (
        ("a,b\n3,4\n", "lacks the columns global_batch_size"),
        ("global_batch_size,1,x\n3,4,5\n", "line 2: 'x' is no number of devices"),
        ("global_batch_size,1\n3,-1\nx,2\n", "2 malformed rows"),
    ):
        (folder / "m.csv").write_text(text)
        with pytest.raises(UsageError, match=message):
            load_profiles(folder, on)


def test_types_that_do_not_exist_are_all_named() -> None:
    with pytest.raises(UsageError) as caught:
        workload([job("A", device_type="z900"), job("B", allowed_types=("a100", "zz"))])
    assert "job 'A': unknown device type 'z900'" in caught.value.message
    assert "job 'B': unknown device type 'zz'" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"error": -1.0}, "error of estimates"),
        ({"error": float("nan")}, "error of estimates"),
        ({"straggler_share": 2.0}, "share of stragglers"),
        ({"failures_per_day": -3.0}, "failures per node"),
    ],
)
def test_scenarios(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Scenario(jobs=(job("A"),), cluster=cluster(a100=(1, 4)), profiles=profiles(m=A100), **fields)  # type: ignore[arg-type]


def test_policies_by_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'arena'"):
        make_policy("arean")
    with pytest.raises(UsageError, match="no such form"):
        make_policy("fcfs@paper")


def test_settings_and_costs() -> None:
    with pytest.raises(UsageError, match="round_s"):
        Settings(round_s=-1)
    for horizon in (0.0, -5.0, float("nan")):
        with pytest.raises(UsageError, match="horizon_s"):
            Settings(horizon_s=horizon)
    with pytest.raises(UsageError, match="needs rounds"):
        Settings(quantise=True)
    with pytest.raises(UsageError, match="restart cost 'grow'"):
        RestartCosts(grow=float("nan"))
    with pytest.raises(UsageError, match="arrival scale"):
        scale_arrivals([job("A")], 0.0)
