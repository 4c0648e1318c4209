"""What is installed, and what `make setup` says when it cannot."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

import arena_jax
from arena_jax import solver_setup
from arena_jax.errors import ArenaError
from arena_jax.home import cache_sizes, compile_cache, home

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, unpacked as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    unpacked = folder / "site-packages"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_wheel_has_no_other_top_level_module(wheel):
    names = {path.name for path in wheel.iterdir()}
    assert names == {"arena_jax", f"arena_jax-{arena_jax.__version__}.dist-info"}


def test_wheel_carries_every_model_recipe_and_data_file(wheel):
    for kind, pattern in (("models", "*.py"), ("recipes", "*.yaml")):
        here = {path.name: path.read_bytes() for path in (ROOT / kind).glob(pattern)}
        assert here
        assert {path.name: path.read_bytes() for path in (wheel / "arena_jax/_bundled" / kind).glob(pattern)} == here
    assert (wheel / "arena_jax/grid/catalogue.toml").is_file()
    assert (wheel / "arena_jax/py.typed").is_file()


def test_installed_wheel_finds_its_own_recipes_and_models(wheel, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    for verb in (["ls", "--json"], ["validate", "gpt_tiny"]):
        done = subprocess.run(
            [sys.executable, "-m", "arena_jax", *verb],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "--json" in verb:
            assert str(wheel / "arena_jax/_bundled/recipes/gpt_tiny.yaml") in done.stdout


def test_sources_of_the_wheel_are_all_of_the_package(wheel):
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "arena_jax").rglob("*.py")}
    there = {path.relative_to(wheel).as_posix() for path in (wheel / "arena_jax").rglob("*.py")}
    assert {name for name in there if "/_bundled/" not in name} == here


def test_version_is_stated_once_in_effect():
    assert PROJECT["version"] == arena_jax.__version__


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_direct_dependency_is_pinned_within_its_range(python):
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pins = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name.lower() not in pins, f"{pin.name} is pinned twice on Python {python}"
            (exact,) = pin.specifier
            assert exact.operator == "=="
            pins[pin.name.lower().replace("_", "-")] = exact.version
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for text in [*PROJECT["dependencies"], *extras]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower().replace("_", "-")]), f"{text} on Python {python}"


def test_constraints_name_no_host_and_no_file():
    assert not re.search(r"://|@|^-|\bfile:", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def make(tmp_path, python_script):
    """`make setup` in a copy of the set-up files, with a made-up interpreter."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{python_script}\n")
    python.chmod(0o755)
    return subprocess.run(
        ["make", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_make_setup_refuses_an_old_python_by_name(tmp_path):
    done = make(tmp_path, '[ "$1" = -V ] && echo "Python 3.9.2" || exit 1')
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_setup_names_the_package_where_venv_is_missing(tmp_path):
    done = make(tmp_path, 'if [ "$1" = -m ]; then mkdir -p .venv/bin; echo "ensurepip is not available"; exit 1; fi')
    assert done.returncode == 2
    assert "python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.fixture
def empty_environment(tmp_path, monkeypatch):
    """A virtual environment without alpa, as far as solver_setup can tell."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    return tmp_path


def test_failed_install_of_alpa_is_one_clear_message_and_leaves_nothing(empty_environment, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ArenaError, match="No matching distribution found") as caught:
        solver_setup.install_alpa()
    assert "pip install --no-deps --target" in caught.value.hint
    assert list((empty_environment / "venv" / "solvers").iterdir()) == []
    assert solver_setup.alpa_folder() is None
    assert solver_setup.main() == 1
    assert capsys.readouterr().err.startswith("warning: pip could not install alpa==0.2.3")


def fake_pip(command, **_):
    target = Path(command[command.index("--target") + 1])
    (target / "alpa").mkdir(parents=True)
    (target / "alpa/__init__.py").touch()
    (target / "alpa-0.2.3.dist-info").mkdir()
    return subprocess.CompletedProcess(command, 0, "", "")


def test_alpa_goes_into_a_folder_of_its_own(empty_environment, monkeypatch):
    monkeypatch.setattr(subprocess, "run", fake_pip)
    folder = solver_setup.install_alpa()
    assert folder == empty_environment / "venv" / "solvers" / "alpa" == solver_setup.alpa_folder()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it is there already"))
    assert solver_setup.install_alpa() == folder


def test_alpa_falls_back_to_the_home_where_the_environment_is_read_only(empty_environment, monkeypatch):
    (empty_environment / "venv").write_text("not a folder")
    monkeypatch.setattr(subprocess, "run", fake_pip)
    assert solver_setup.install_alpa() == empty_environment / "home" / "solvers" / "alpa"


def test_alpa_is_not_importable_in_this_process():
    assert find_spec("alpa") is None


def test_home_follows_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path))
    compile_cache().mkdir()
    (compile_cache() / "program").write_bytes(b"x" * 100)
    assert home() == tmp_path
    sizes = {cache.name: (cache.num_files, cache.size_bytes) for cache in cache_sizes()}
    assert sizes == {"compile": (1, 100), "plans": (0, 0), "profiles": (0, 0), "numba": (0, 0), "deviceless": (0, 0)}
    monkeypatch.delenv("ARENA_JAX_HOME")
    assert home().name == "arena-jax"


def test_importing_the_package_imports_nothing_else():
    code = "import sys, arena_jax; print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'numpy', 'flax')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves_and_is_documented():
    for name in arena_jax.__all__:
        assert getattr(arena_jax, name).__doc__, name
    assert set(arena_jax.__all__) <= set(dir(arena_jax))


def test_a_submodule_does_not_hide_the_function_of_its_name():
    code = "import arena_jax.fit, arena_jax; assert callable(arena_jax.fit); from arena_jax.fit import fit"
    subprocess.run([sys.executable, "-c", code], check=True)
