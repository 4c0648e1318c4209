"""A ``fit`` call on its way to the service: what is carried, and what is never unpickled."""

import os
import runpy
import threading
from pathlib import Path

import numpy as np
import pytest

import arena_jax
from arena_jax.closure import read_closure
from arena_jax.errors import UsageError
from arena_jax.service.server import Server
from tests.service.stub import Bench

ROOT = Path(__file__).resolve().parents[2]


class Data:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Data) and other.rows == self.rows


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    server = Server(tmp_path / "state", bench.requests.answer)
    yield bench
    server.close()


def give(state, **changes):
    scale = 3.0
    arguments = {"steps": 40, "state": state, "max_devices": 2, "seed": 7, **changes}
    return arena_jax.submit(lambda rngs: rngs, "sgd", lambda model, batch: scale * batch, Data(5), **arguments)


def test_the_call_is_carried_and_queued(bench, tmp_path):
    job = bench.store.job(give(tmp_path / "state"))
    assert (job.id, job.spec.kind, job.spec.steps, job.spec.max_devices) == ("fit-1", "closure", 40, 2)
    carried = read_closure(tmp_path / "state/closures" / os.path.basename(job.spec.recipe))
    assert (carried["data"], carried["steps"], carried["options"]) == (Data(5), 40, {"seed": 7})
    assert carried["loss_fn"](None, 2.0) == 6.0
    bench.run(5)
    assert bench.job(job).phase == "running"


def test_the_example_that_the_readme_names(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ARENA_JAX_SERVICE", str(tmp_path / "state"))
    runpy.run_path(str(ROOT / "examples/own_model.py"), run_name="__main__")
    job = bench.store.job(capsys.readouterr().out.strip())
    assert (job.id, job.spec.kind) == ("own_model-1", "closure")
    carried = read_closure(Path(job.spec.recipe))
    assert carried["loss_fn"](lambda x: x, {"x": np.ones(3), "y": np.zeros(3)}) == 1.0


def test_what_cannot_be_carried_is_said(bench, tmp_path):
    with pytest.raises(UsageError, match="submit takes no 'grid'"):
        give(tmp_path / "state", grid="cpu:4")
    with pytest.raises(UsageError, match="cannot be carried"):
        give(tmp_path / "state", callbacks=(threading.Lock().acquire,))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_could_have_written_is_not_unpickled(bench, tmp_path, mode):
    give(tmp_path / "state")
    (path,) = (tmp_path / "state/closures").glob("*.pkl")
    path.chmod(mode)
    with pytest.raises(UsageError, match="could have written it"):
        read_closure(path)
    link = tmp_path / "link.pkl"
    path.chmod(0o600)
    link.symlink_to(path)
    with pytest.raises(UsageError, match="could have written it"):
        read_closure(link)
