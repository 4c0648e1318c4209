"""Settings of the whole test run. Nothing here imports jax: its settings go through the environment,
so that tests of the parts without jax stay fast and started processes inherit them.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.cheap_xla import XLA_FLAGS

NUM_CPU_DEVICES = 8
ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A file is one worker's. Those that take minutes come first, so that no worker is left with one at the end.
LONG_FILES = (
    "test_same_numbers.py",
    "test_strangers.py",
    "test_train_cli.py",
    "test_models.py",
    "test_job.py",
    "test_processes.py",
    "test_kinds_of_models.py",
    "test_live_resize.py",
    "test_relaunch.py",
)

_HOME = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files from what the code gives now"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A home of its own per run: a stored plan or profile must never stand in for a computed one.
    config.stash[_HOME] = tempfile.mkdtemp(prefix="arena-jax-test-")
    environment = {
        "ARENA_JAX_HOME": config.stash[_HOME],
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(NUM_CPU_DEVICES),
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS),
        # Started processes run this checkout, installed or not.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    cache = getattr(config, "cache", None)  # absent under `-p no:cacheprovider`
    if cache is not None:
        # Compiled programs depend on their input only, so these may outlive the run.
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache.mkdir("jax-compile")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        Path(config.stash[_HOME], "numba").symlink_to(cache.mkdir("numba"))
    os.environ.update(environment)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_HOME], ignore_errors=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """``golden(path, text)``: compare with a committed file, or rewrite it under ``--update-golden``."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"{path} is missing; run pytest --update-golden and read the difference"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} changed; pytest --update-golden rewrites it"

    return compare


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data from others; tests that need it skip where it is absent."""
    default = ROOT / "../shared/data"
    folder = Path(os.environ.get("ARENA_JAX_DATA", default))
    if not folder.is_dir():
        pytest.skip("no folder of measured data (set ARENA_JAX_DATA)")
    return folder
