"""Compiling for hardware elsewhere: targets, the account, the correction, and what happens without a compiler."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arena_jax import home
from arena_jax.cli import main
from arena_jax.compiler.cost import Hardware
from arena_jax.compiler.hlo import Collective
from arena_jax.deviceless import client, extras
from arena_jax.deviceless.account import Resident, StageAccount, account_of_stage, account_of_step
from arena_jax.deviceless.client import CompiledPlan, CompileFailed, compile_plans
from arena_jax.deviceless.correction import collective_s, correct
from arena_jax.deviceless.extras import CompilerMissing
from arena_jax.deviceless.store import Compiled, ProgramStore, fingerprint
from arena_jax.deviceless.target import gpu_config, gpu_topology, tpu_slice
from arena_jax.errors import UsageError
from arena_jax.grid import (
    CATALOGUE,
    Allocation,
    Estimate,
    GridShape,
    IndexRow,
    Plan,
    StageEstimate,
    StagePlan,
    Submesh,
)

DATA = Path(os.environ.get("ARENA_JAX_DATA", "../shared/data")) / "gpu_target_configs"
# The cards in XLA's own descriptions that the catalogue has in the same form.
CARDS = {
    "Tesla_V100-SXM2-16GB": "v100-16",
    "NVIDIA_A100-SXM4-40GB": "a100-40",
    "NVIDIA_A100-SXM4-80GB": "a100-80",
    "NVIDIA_H100_80GB_HBM3": "h100-sxm",
    "NVIDIA_H100_PCIe": "h100-pcie",
    "NVIDIA_H200_141GB_HBM3e": "h200",
    "NVIDIA_B200": "b200",
}
EXACT = (
    *("threads_per_block_limit", "threads_per_warp", "shared_memory_per_block", "shared_memory_per_core"),
    *("threads_per_core_limit", "core_count", "fpus_per_core", "shared_memory_per_block_optin", "major"),
    *("registers_per_core_limit", "registers_per_block_limit", "thread_dim_limit_x", "thread_dim_limit_z"),
    "feature_extension",
)
NEAR = ("memory_bandwidth", "l2_cache_size", "device_memory_size", "clock_rate_ghz")


def fields_of(text: str) -> dict[str, str]:
    """Scalar fields, the first of each name."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"^\s*(\w+): (\S+)$", text, re.MULTILINE):
        found.setdefault(name, value)
    return found


@pytest.mark.parametrize("card", CARDS)
def test_a_gpu_is_described_as_xla_describes_it(card: str) -> None:
    path = DATA / f"{card}.txtpb"
    if not path.exists():
        pytest.skip(f"no descriptions of XLA's in {DATA}; set ARENA_JAX_DATA")
    theirs, ours = fields_of(path.read_text()), fields_of(gpu_config(CATALOGUE[CARDS[card]]))
    assert {name: ours[name] for name in EXACT} == {name: theirs[name] for name in EXACT}
    for name in NEAR:  # the datasheet rounds, and drivers keep some memory
        assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=0.08), name


def test_an_a100_in_numbers() -> None:
    ours = fields_of(gpu_config(CATALOGUE["a100-80"]))
    # 164 KiB of shared memory a multiprocessor, 163 of them for one block; 1.41 GHz boost clock.
    assert (ours["shared_memory_per_core"], ours["shared_memory_per_block_optin"]) == ("167936", "166912")
    assert (ours["core_count"], ours["fpus_per_core"], ours["clock_rate_ghz"]) == ("108", "64", "1.4106")


def test_every_gpu_of_the_catalogue_can_be_described() -> None:
    for device in CATALOGUE.types.values():
        if device.platform == "cuda":
            assert device.name in gpu_config(device)


def test_a_type_without_its_facts_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"lacks its compute_capability") as caught:
        gpu_config(replace(CATALOGUE["a100"], name="mine", compute_capability=None))
    assert "[types.mine]" in caught.value.hint
    with pytest.raises(UsageError, match=r"compute capability 8\.7"):
        gpu_config(replace(CATALOGUE["a100"], compute_capability="8.7"))


def test_topologies() -> None:
    assert gpu_topology(Submesh(2, 8)) == "2x1x8"
    assert [tpu_slice(CATALOGUE["tpu-v5e"], n) for n in (1, 4, 8, 9)] == ["v5e:2x2", "v5e:2x2", "v5e:2x4", "v5e:4x4"]
    assert tpu_slice(CATALOGUE["tpu-v5p"], 16) == "v5p:2x2x4"
    with pytest.raises(UsageError, match="no v5e slice has 300 chips"):
        tpu_slice(CATALOGUE["tpu-v5e"], 300)
    with pytest.raises(UsageError, match="cannot compile for a100"):
        tpu_slice(CATALOGUE["a100"], 4)


# What was compiled, kept.

COMPILED = Compiled(
    argument_bytes=100,
    output_bytes=50,
    alias_bytes=40,
    temp_bytes=30,
    collectives=(Collective(kind="all_reduce", num_bytes=8.0, size=2, stride=1, count=3.0, beside_flops=5.0),),
    compile_s=1.5,
    output_specs=((), ("dp", None), (("dp", "tp"),)),
)


def test_a_program_is_read_back_as_it_was_kept(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    name = fingerprint("module", "a100", {"jax": "1"}, {})
    assert store.get(name) is None
    store.put(name, COMPILED)
    assert store.get(name) == COMPILED
    assert len(list(tmp_path.rglob("*"))) == 2  # the file and its folder; nothing temporary


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "[]", "{}", '{"format": 99, "fingerprint": "NAME", "compiled": {}}', '{"format": 1, "finger'],
)
def test_a_damaged_or_foreign_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    store = ProgramStore(tmp_path)
    name = fingerprint("module", "a100", {}, {})
    store.put(name, COMPILED)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    path.write_text(text.replace("NAME", name))
    assert store.get(name) is None
    store.put(name, COMPILED)
    assert store.get(name) == COMPILED


def test_a_file_under_another_name_is_not_served(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    one, other = (fingerprint(text, "a100", {}, {}) for text in ("one", "other"))
    store.put(one, COMPILED)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    (tmp_path / other[:2]).mkdir(exist_ok=True)
    path.rename(tmp_path / other[:2] / f"{other}.json")
    assert store.get(other) is None


def test_the_fingerprint_changes_with_everything_that_decides() -> None:
    base: tuple[Any, ...] = ("module", "a100", {"jax": "1"}, {"level": 0})
    others = [("modul2", *base[1:]), (base[0], "h100", *base[2:]), (*base[:2], {"jax": "2"}, base[3]), (*base[:3], {})]
    assert len({fingerprint(*case) for case in [base, *others]}) == 5
    # Parts do not run into each other.
    assert fingerprint("ab", "c", {}, {}) != fingerprint("a", "bc", {}, {})


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ProgramStore(tmp_path / "file")
    store.put(fingerprint("a", "b", {}, {}), COMPILED)
    assert store.get(fingerprint("a", "b", {}, {})) is None


# The account, by hand.


def test_the_step_of_one_stage() -> None:
    looped = Collective(kind="all_reduce", num_bytes=10.0, size=4, stride=1, count=24.0)
    at_end = Collective(kind="all_gather", num_bytes=20.0, size=2, stride=4, count=3.0)
    account = account_of_step(replace(COMPILED, collectives=(looped, at_end)), num_microbatches=8)
    assert account.memory_bytes == 100 + 50 - 40 + 30
    assert account.microbatch == (replace(looped, count=3.0),)
    assert account.once == (at_end,)


def test_a_stage_of_a_pipeline_at_its_fullest() -> None:
    forward = Compiled(output_bytes=70, temp_bytes=500)  # of which 60 are kept
    backward = Compiled(output_bytes=40, alias_bytes=30, temp_bytes=300)
    update = Compiled(output_bytes=90, alias_bytes=80, temp_bytes=5)
    resident = Resident(always=1000, kept=60, received=7)
    programs = {"forward": [forward], "backward": [backward], "update": [update]}
    # Forward of the first: what stays, what arrived, and its own 570.
    assert account_of_stage(programs, resident, in_flight=1).memory_bytes == 1000 + 7 + 570
    # With eight in flight, seven lie there while the eighth runs; backwards eight, and 310.
    assert account_of_stage(programs, resident, in_flight=8).memory_bytes == 1000 + 7 + 7 * 60 + 570
    large_backward = {**programs, "backward": [replace(backward, temp_bytes=600)]}
    assert account_of_stage(large_backward, resident, in_flight=8).memory_bytes == 1000 + 7 + 8 * 60 + 610
    large_update = {**programs, "update": [replace(update, temp_bytes=2000), update]}
    assert account_of_stage(large_update, resident, in_flight=1).memory_bytes == 1000 + 2010 + 15
    start = {**programs, "start": [Compiled(output_bytes=5000)]}  # the sums of gradients, which are resident
    assert account_of_stage(start, resident, in_flight=1) == account_of_stage(programs, resident, in_flight=1)


def test_a_refused_program_makes_its_stage_miss_memory() -> None:
    refused = Compiled(missing_bytes=123, message="RESOURCE_EXHAUSTED: too large")
    account = account_of_stage({"forward": [refused]}, Resident(), 1)
    assert (account.missing_bytes, account.message) == (123, "RESOURCE_EXHAUSTED: too large")
    assert StageAccount.from_json(json.loads(json.dumps(account.to_json()))) == account


# The correction, by hand.

HARDWARE = Hardware(device=CATALOGUE["a100-80"], allocation=Allocation("a100-80", 1, 4))
GIB = 2**30


def row_of(num_stages: int) -> IndexRow:
    per = 4 // num_stages
    plan = Plan(
        model_fingerprint="m",
        global_batch=16,
        grid=GridShape.parse(f"a100-80:4/s{num_stages}"),
        num_microbatches=8,
        stages=tuple(
            StagePlan(layers=(2 * s, 2 * s + 1), submesh=Submesh(1, per), dp=1, tp=per) for s in range(num_stages)
        ),
    )
    stage = StageEstimate(
        compute_s=1.0,
        communication_s=0.5,
        memory_bytes=10 * GIB,
        forward_s=0.5,
        update_s=0.3,
        sync_s=0.2,
        communication={"forward": 0.2, "backward": 0.3},
        memory={"parameters": 4 * GIB, "activations": 6 * GIB},
    )
    estimate = Estimate(
        step_time_s=99.0,
        memory_bytes=10 * GIB,
        device_memory_bytes=HARDWARE.usable_bytes,
        stages=(stage,) * num_stages,
        flops=1e12,
        breakdown={"boundary_s": 0.25},
    )
    return IndexRow(grid=plan.grid, num_microbatches=8, plan=plan, estimate=estimate)


def compiled_of(row: IndexRow, *stages: StageAccount) -> CompiledPlan:
    assert row.plan is not None
    return CompiledPlan(plan=row.plan, stages=stages)


def test_collectives_and_memory_replace_those_of_the_estimate() -> None:
    big = Collective(kind="all_reduce", num_bytes=1e9, size=2, stride=1, count=3.0)
    small = replace(big, num_bytes=1e6, count=1.0)
    row = row_of(2)
    stages = StageAccount(memory_bytes=12 * GIB, microbatch=(big,)), StageAccount(memory_bytes=9 * GIB, once=(small,))
    corrected = correct(row, compiled_of(row, *stages), HARDWARE)
    estimate = corrected.row.estimate
    assert estimate is not None
    each = collective_s(big, HARDWARE, Submesh(1, 2))
    end = collective_s(small, HARDWARE, Submesh(1, 2))
    assert each > 1e9 / 300e9 > end > 0  # an all-reduce of two moves its bytes once over the link
    first, second = estimate.stages
    assert (first.communication_s, second.communication_s) == (pytest.approx(3 * each), 0.0)
    assert (first.update_s, second.update_s) == (pytest.approx(0.1), pytest.approx(0.1 + end))
    # Stage 0 is the slowest, and runs all eight; the other runs its one behind it.
    assert estimate.step_time_s == pytest.approx(8 * (1 + 3 * each) + 1 + 0.25 + 0.1 + end)
    assert sum(estimate.breakdown.values()) == pytest.approx(estimate.step_time_s)
    assert estimate.memory_bytes == 12 * GIB
    assert sum(first.memory.values()) == 12 * GIB
    assert (corrected.missing_bytes, corrected.row.feasible) == (0, True)


def test_what_runs_beside_a_collective_hides_it() -> None:
    row = row_of(1)
    open_one = Collective(kind="all_reduce", num_bytes=1e9, size=4, stride=1)
    alone = collective_s(open_one, HARDWARE, Submesh(1, 4))
    bytes_of_half = HARDWARE.efficiency.bytes_per_s(HARDWARE.device) * alone / 2
    for beside, left in ((0.0, alone), (bytes_of_half, alone / 2), (10 * bytes_of_half, 0.0)):
        account = StageAccount(memory_bytes=GIB, microbatch=(replace(open_one, beside_bytes=beside),))
        corrected = correct(row, compiled_of(row, account), HARDWARE)
        assert corrected.row.estimate is not None
        assert corrected.row.estimate.stages[0].communication_s == pytest.approx(left)
        assert corrected.communication_s == pytest.approx(8 * alone)
        assert corrected.hidden_s == pytest.approx(8 * (alone - left))


@pytest.mark.parametrize("by_compiler", [False, True])
def test_a_plan_that_does_not_fit_is_refused_with_the_bytes_missing(by_compiler: bool) -> None:
    row = row_of(1)
    usable = HARDWARE.usable_bytes
    account = StageAccount(memory_bytes=0 if by_compiler else usable + 77, missing_bytes=77 if by_compiler else 0)
    corrected = correct(row, compiled_of(row, account), HARDWARE)
    assert corrected.missing_bytes == 77
    assert not corrected.row.feasible
    assert corrected.row.reason.endswith("77 too many")
    assert corrected.row.least_memory_bytes == usable + 77


# The command.

RECIPE = """
summary: a gpt small enough for tests
model: {name: gpt, vocabulary: 256, sequence_length: 16, hidden: 32, num_layers: 2, num_heads: 2}
data: {kind: text, files: [text.txt]}
global_batch: 8
steps: 2
tracking: {enabled: false}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """``plan(*arguments)``: exit code, the JSON of the last line, the lines before it, stderr."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1000)
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    # The tests' own flags are of the CPU's compiler.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, dict[str, Any], list[str], str]:
        code = main(["plan", "tiny.yaml", *arguments, "--aot", "--json"])
        said = capsys.readouterr()
        *lines, last = said.out.splitlines()
        return code, json.loads(last), lines, said.err

    return run


def test_without_the_extra_the_analytic_estimate_stands_and_a_hint_says_how(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_version", lambda name: None if "cuda" in name or name == "libtpu" else "0.10.2")
    code, report, _, err = plan("--on", "a100:2", "--stages", "1", "--on", "tpu-v5e:2")
    assert code == 0
    assert report["best"]["a100-40:2"]
    by_allocation = {entry["allocation"]: entry for entry in report["compiled"]}
    assert "jax-cuda12-plugin" in by_allocation["a100-40:2"]["missing"]
    assert "jax-cuda12-plugin==0.10.2" in by_allocation["a100-40:2"]["hint"]
    assert "libtpu" in by_allocation["tpu-v5e:2"]["missing"]
    assert "[cuda-aot]" in err
    assert "[tpu-aot]" in err


def test_a_plugin_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"jaxlib": "0.10.2", "jax": "0.10.2", "jax-cuda12-plugin": "0.9.0", "jax-cuda12-pjrt": "0.9.0"}
    monkeypatch.setattr(extras, "_version", lambda name: found.get(name, "12.9"))
    with pytest.raises(CompilerMissing, match=r"plugin 0\.9\.0 beside jaxlib 0\.10\.2"):
        extras.versions("cuda")


def test_a_compiler_that_dies_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(1)
    assert row.plan is not None
    monkeypatch.setattr(client, "versions", lambda platform: {})
    monkeypatch.setattr(client, "_environment", lambda: {"PYTHONHOME": "/nowhere"})  # no Python starts with that
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path))
    with pytest.raises(CompileFailed, match=r"process ended with \d+: \S+") as caught:
        list(compile_plans("gpt_tiny", [], [row.plan]))
    assert "without --aot" in caught.value.hint
    assert str(tmp_path) in caught.value.hint
    assert "encodings" in (tmp_path / "deviceless" / "failed.log").read_text()


def test_a_cpu_is_left_to_train(plan: Any) -> None:
    code, report, _, err = plan("--on", "cpu:2", "--stages", "1")
    assert (code, report["compiled"]) == (0, [])
    assert "--aot is for GPUs and TPUs" in err


@pytest.mark.parametrize(
    ("platform", "spec", "stages"), [("cuda", "a100-80:2", 1), ("cuda", "v100:4", 2), ("tpu", "tpu-v5e:4", 1)]
)
def test_plans_compile_for_hardware_that_is_not_here(plan: Any, platform: str, spec: str, stages: int) -> None:
    wrong = extras.what_is_wrong(platform)
    if wrong:
        pytest.skip(f"no {platform} compiler: {wrong}; install the extra [{extras.EXTRAS[platform]}]")
    arguments = ("--on", spec, "--stages", str(stages), "plan.num_microbatches=2")
    code, report, lines, _ = plan(*arguments)
    assert code == 0
    (entry,) = report["compiled"]
    (grid,) = report["grids"]
    assert entry["fits"]
    assert grid["memory_bytes"] == entry["memory_bytes"] > 0
    assert grid["step_time_s"] == entry["step_time_s"]
    assert len(entry["stages"]) == stages
    assert any(line.startswith("compiled") for line in lines)
    assert any(not program["known"] for program in entry["programs"])
    assert len(list(home.deviceless().rglob("*.json"))) == len({p["fingerprint"] for p in entry["programs"]})
    _, again, _, _ = plan(*arguments)
    (second,) = again["compiled"]
    assert all(program["known"] for program in second["programs"])
    assert second["stages"] == entry["stages"]
