"""A real training under the real service: planned, started, moved, finished, with the losses of ``fit``."""

import os
import sys
import time

import pytest

import arena_jax
from arena_jax.cli import main
from arena_jax.scheduler import Cluster
from arena_jax.service.local import LocalExecutor
from arena_jax.service.local_index import LocalIndexer
from arena_jax.service.own_processes import processes_of
from arena_jax.service.rules import Rules
from arena_jax.service.service import Options, Service
from tests.service.stub import TABLES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc"),
    pytest.mark.skipif("ARENA_JAX_LONG" not in os.environ, reason="takes a minute; `make verify` runs it"),
]
STEPS = 60


def training():
    """A training small enough that its steps cost nothing; it goes to other processes by value."""
    import numpy as np
    import optax
    from flax import nnx

    rows = np.random.default_rng(0).normal(size=(4, 8, 6)).astype("float32")
    data = [{"x": x, "y": x.sum(axis=1, keepdims=True)} for x in rows]

    def make(rngs):
        return nnx.Linear(6, 1, rngs=rngs)

    def loss_fn(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    return make, optax.sgd(0.05), loss_fn, data


def test_a_fit_call_is_planned_moved_and_finished_with_the_same_losses(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ARENA_JAX_SERVICE", str(tmp_path / "s"))
    # Nominal speeds so low that a step takes about a tenth of a second.
    types = {name: {"threads": 1, "peak_flops": 2e4, "memory_bandwidth": 2e4} for name in ("quick", "slow")}
    tables = {**TABLES, "types": types}
    cluster = Cluster.from_tables(tables)
    options = Options(state=tmp_path / "s", cluster=cluster, rules=Rules(change_cost_s=1.0))
    indexer = LocalIndexer(tmp_path / "s", cluster, tables)
    service = Service(options, lambda store: (LocalExecutor(tmp_path / "s", cluster), indexer))
    service.start()
    try:
        name = arena_jax.submit(*training(), steps=STEPS, max_devices=1, types=["quick"])
        assert main(["submit", "--cmd", "echo $ARENA_JAX_DEVICES", "--on", "slow:2", "--name", "beside"]) == 0
        moved = False
        until = time.monotonic() + 300
        while (job := service.store.job(name)).phase not in ("finished", "failed"):
            assert time.monotonic() < until, (job.phase, job.reason, job.step)
            service.tick()
            time.sleep(0.05)
            if job.step >= 20 and not moved:  # to other devices: a checkpoint, and a new process
                moved = True
                assert main(["drain", "quick/0"]) == 0
    finally:
        service.close()
        indexer.close()
    assert (job.phase, job.step, job.run) == ("finished", STEPS, 2), (job.reason, job.log_tail)
    assert [e["kind"] for e in service.store.events(job=name) if "how" in e] == ["start", "migrate"]
    assert service.store.job("beside-2").phase == "finished"
    assert not processes_of(f"{tmp_path}/s/jobs/", prefix=True)
    undisturbed = arena_jax.fit(*training(), steps=STEPS, grid="cpu:1")
    losses = {step: loss for step, _, loss, _ in service.store.points(job.number)}
    assert sorted(losses) == list(range(1, STEPS + 1))
    for record in undisturbed.history:
        assert losses[record.step] == pytest.approx(record.loss, rel=1e-5, abs=1e-9)
    at = {step: seconds for step, seconds, _, _ in service.store.points(job.number)}
    nominal_s = service.store.index(job.plan_key)["quick:1"][0]
    assert (at[18] - at[8]) / 10 > 0.8 * nominal_s > 0.01  # no faster than its type
    capfd.readouterr()
