"""``arena-jax profile``: share, show and delete measured pieces, and what they change."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arena_jax.cli.app import main
from arena_jax.compiler.cost import hardware_of
from arena_jax.grid import Allocation, Profile, ProfileStore
from arena_jax.grid.profiles import to_json

STEP = Profile(
    device_type="l20", kind="step", piece={"model": "gpt_1_3b", "grid": "l20:1/s1"}, seconds=3.0, computed_s=2.0
)
DOT = Profile(
    device_type="l20",
    kind="dot",
    piece={"dtype": "float16", "shape": [1, 512, 256, 1024]},
    seconds=1e-3,
    computed_s=5e-4,
    measured_at=9.0,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["profile", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_measurement_of_a_new_type_corrects_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allocation, args = Allocation("l20", 1, 1), ("float16", np.array([1e12]), np.array([1e8]))
    before = hardware_of(allocation)
    path = tmp_path / "step.json"
    path.write_text(to_json([STEP]))
    assert run(capsys, "import", str(path))[0] == 0
    after = hardware_of(allocation)
    assert after.generation != before.generation
    for kind in ("dot", "conv", "elementwise"):
        computed = before.op_s(kind, *args) - before.launch_s
        assert after.op_s(kind, *args) - after.launch_s == pytest.approx(1.5 * computed)
    # A piece of its own says more of its kind than a whole step does.
    path.write_text(to_json([DOT]))
    run(capsys, "import", str(path))
    known = hardware_of(allocation)
    assert known.correction("dot") == 2.0
    assert known.correction("elementwise") == 1.5
    assert known.products == {("dot", "float16", (1.0, 512.0, 256.0, 1024.0)): 1e-3}
    assert hardware_of(Allocation("a100-40", 1, 1)).corrections == {}


def test_export_and_import_share_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str], own_home: Path) -> None:
    ProfileStore(own_home / "profiles.sqlite").put([STEP, DOT, replace(DOT, device_type="a10")])
    path = tmp_path / "out.json"
    assert run(capsys, "export", str(path), "--type", "l20")[0] == 0
    assert run(capsys, "prune", "--all")[0] == 0
    assert run(capsys, "ls")[1] == ""
    assert run(capsys, "import", str(path))[0] == 0
    code, out, _ = run(capsys, "ls", "--json")
    assert code == 0
    assert [(e["device_type"], e["kind"]) for e in json.loads(out)["entries"]] == [("l20", "step"), ("l20", "dot")]


def test_show_says_the_factors(capsys: pytest.CaptureFixture[str], own_home: Path) -> None:
    ProfileStore(own_home / "profiles.sqlite").put([STEP, DOT])
    code, out, _ = run(capsys, "show", "l20")
    assert code == 0
    assert "l20: dot takes 2.00 of what is computed" in out
    assert "l20: step takes 1.50 of what is computed" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert run(capsys, "show", "l21")[0] == 2


def test_a_damaged_store_is_named_and_kept(capsys: pytest.CaptureFixture[str], own_home: Path) -> None:
    own_home.mkdir()
    (own_home / "profiles.sqlite").write_bytes(b"not a store" * 500)
    code, _, err = run(capsys, "ls")
    assert code == 0
    assert "is kept as profiles.sqlite.set-aside-" in err
    assert list(own_home.glob("*set-aside*"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("prune",), "say which profiles to delete"),
        (("prune", "--all", "--type", "l20"), "say which profiles to delete"),
        (("run", "gpt_tiny", "--on", "cpu:2", "--on", "a100:2"), "one device is of one type"),
        (("run", "gpt_tiny", "--on", "cpu:2", "--on", "cpu:4"), "differ with their number"),
        (("run", "gpt_tiny", "--on", "a100:2"), "the device here is a cpu"),
    ],
)
def test_faults_are_named(args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *args)
    assert (code, says in err) == (2, True)


def test_a_file_that_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe")
    code, _, err = run(capsys, "import", str(path))
    assert (code, "is not JSON" in err) == (2, True)
