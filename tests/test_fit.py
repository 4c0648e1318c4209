"""``fit`` with the real compiler: what it gives back, what it leaves alone, what it refuses."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import flax.linen as linen
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import arena_jax
from arena_jax.errors import CheckpointError, DataError, NonFiniteLossError, PlanError, UsageError
from arena_jax.events import read_events
from arena_jax.runtime.checkpoint import CheckpointOptions
from arena_jax.runtime.hooks import ScriptedHook
from tests.doubles import BATCH, WIDTH, Toy, ToyLoader, toy_loss


def batches(count: int) -> list[dict[str, np.ndarray]]:
    loader = ToyLoader()
    return [next(loader) for _ in range(count)]


def fit(data: Any = None, *, steps: int = 5, **options: Any) -> arena_jax.FitResult:
    options = {"grid": "cpu:1", "model": Toy, "optimizer": optax.adam(1e-2), "loss_fn": toy_loss, **options}
    model, optimizer, loss_fn = (options.pop(name) for name in ("model", "optimizer", "loss_fn"))
    return arena_jax.fit(model, optimizer, loss_fn, batches(5) if data is None else data, steps=steps, **options)


def by_hand(steps: int, data: list[dict[str, np.ndarray]]) -> tuple[list[float], nnx.State]:
    """The same training as a plain Flax loop."""
    model = Toy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Toy, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, gradient = nnx.value_and_grad(toy_loss)(model, batch)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, data[i % len(data)])) for i in range(steps)]
    return losses, nnx.state(model, nnx.Param)


def parameters(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.parametrize("grid", ["cpu:1", "cpu:2/s1", "cpu:2/s2"])
def test_fit_does_what_a_plain_loop_does(grid: str) -> None:
    result = fit(grid=grid)
    losses, state = by_hand(5, batches(5))
    assert (result.step, result.stop_reason, result.run_id) == (5, "done", "")
    assert str(result.plan.grid).startswith(grid.partition("/")[0])
    np.testing.assert_allclose([r.loss for r in result.history], losses, rtol=1e-5)
    for mine, theirs in zip(parameters(result.model), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert isinstance(result.model, Toy)
    assert int(optax.tree.get(result.optimizer_state, "count")) == 5
    x = batches(1)[0]["x"]
    assert result.model(jnp.asarray(x)).shape == (BATCH, WIDTH)


def test_auto_uses_all_devices() -> None:
    result = fit(steps=1, grid="auto")
    assert result.plan.grid.num_devices == len(jax.devices())


def test_a_list_of_devices_is_a_grid() -> None:
    devices = jax.devices()[4:6]
    result = fit(steps=1, grid=devices)
    assert result.plan.grid.num_devices == 2


def test_nothing_passed_in_is_changed_or_donated() -> None:
    model, data = Toy(nnx.Rngs(0)), [jax.tree.map(jnp.asarray, b) for b in batches(3)]
    before, before_data = parameters(model), [jax.tree.map(np.asarray, b) for b in data]
    result = fit(data, model=model, steps=3)
    for old, new in zip(before, parameters(model), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(jax.tree.leaves(before_data), jax.tree.leaves(data), strict=True):
        assert not new.is_deleted()
        np.testing.assert_array_equal(old, new)
    assert result.model is not model
    assert any((a != b).any() for a, b in zip(before, parameters(result.model), strict=True))


def test_resume_is_bit_equal_and_under_another_plan_close(tmp_path: Path) -> None:
    whole = fit(ToyLoader(), steps=8)
    first = fit(ToyLoader(), steps=4, checkpoint=CheckpointOptions(directory=tmp_path / "run", every=2))
    loader = ToyLoader()
    second = fit(loader, steps=8, checkpoint=CheckpointOptions(directory=tmp_path / "run", every=2))
    assert second.run_id == first.run_id != ""
    # The first batch is looked at for its shapes; the steps draw 4 to 7.
    assert loader.given == [0, 4, 5, 6, 7]
    for mine, theirs in zip(parameters(second.model), parameters(whole.model), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    third = fit(ToyLoader(), steps=8, checkpoint=tmp_path / "run", resume=6, grid="cpu:2/s2")
    for mine, theirs in zip(parameters(third.model), parameters(whole.model), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    reasons = [e["reason"] for e in read_events(tmp_path / "run") if e["kind"] == "plan"]
    assert reasons == ["start", "resume", "resume"]


def test_a_list_of_batches_resumes_and_an_iterator_is_refused(tmp_path: Path) -> None:
    whole = fit(batches(3), steps=7)
    fit(batches(3), steps=4, checkpoint=tmp_path / "list")
    second = fit(batches(3), steps=7, checkpoint=tmp_path / "list")
    assert [r.loss for r in second.history] == [r.loss for r in whole.history[4:]]
    fit(iter(batches(9)), steps=4, checkpoint=tmp_path / "iterator")
    with pytest.raises(DataError, match="get_state and set_state"):
        fit(iter(batches(9)), steps=7, checkpoint=tmp_path / "iterator")


def test_grain_iterators_resume(tmp_path: Path) -> None:
    def data() -> Any:
        rows = {"x": np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)}
        samples = grain.MapDataset.range(64).seed(3).shuffle().repeat()
        return samples.map(lambda i: {"x": rows["x"][i], "y": rows["x"][i]}).batch(BATCH).to_iter_dataset()

    whole = fit(data(), steps=6)
    fit(data(), steps=3, checkpoint=tmp_path / "run")
    second = fit(data(), steps=6, checkpoint=tmp_path / "run")
    assert [r.loss for r in second.history] == [r.loss for r in whole.history[3:]]


def test_linen_models_come_through_the_bridge() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(WIDTH)(jnp.tanh(linen.Dense(16)(x)))

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(Net(), rngs=rngs), jnp.zeros((1, WIDTH)))

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    result = fit(model=make, loss_fn=loss_fn, steps=20)
    assert result.history[-1].loss < result.history[0].loss


def test_frozen_parameters_stay() -> None:
    model = Toy(nnx.Rngs(0))
    result = fit(model=model, trainable=nnx.PathContains("down"), steps=3)
    np.testing.assert_array_equal(np.asarray(result.model.up.kernel[...]), np.asarray(model.up.kernel[...]))
    assert (np.asarray(result.model.down.kernel[...]) != np.asarray(model.down.kernel[...])).any()


def test_evaluation_and_metrics_reach_the_callbacks() -> None:
    def loss_fn(model: Toy, batch: Any) -> Any:
        error = model(batch["x"]) - batch["y"]
        return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error)), "rows": arena_jax.Sum(jnp.float32(len(error)))}

    events: list[dict[str, Any]] = []
    held_out = batches(2)
    held_out[1] = {k: v[:3] for k, v in held_out[1].items()}
    result = fit(loss_fn=loss_fn, steps=4, eval_data=held_out, eval_every=2, callbacks=[events.append])
    assert set(result.history[0].metrics) == {"worst", "rows"}
    assert result.history[0].metrics["rows"] == BATCH
    assert [e["step"] for e in events if e["kind"] == "eval"] == [2, 4]
    x = np.concatenate([b["x"] for b in held_out])
    y = np.concatenate([b["y"] for b in held_out])
    expected = float(jnp.mean((result.model(jnp.asarray(x)) - y) ** 2))
    assert [e for e in events if e["kind"] == "eval"][-1]["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_nan_stops_or_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match="step 3"):
        fit(ToyLoader(bad_at=3), steps=6, checkpoint=CheckpointOptions(directory=tmp_path / "run", every=1))
    result = fit(ToyLoader(bad_at=3), steps=6, nonfinite="skip")
    assert np.isnan(result.history[2].loss)
    assert np.isfinite(result.history[-1].loss)
    assert all(np.isfinite(leaf).all() for leaf in parameters(result.model))


def test_init_from_another_run(tmp_path: Path) -> None:
    first = fit(steps=3, checkpoint=tmp_path / "run")
    second = fit(steps=0, init_from=tmp_path / "run", seed=5)
    for mine, theirs in zip(parameters(second.model), parameters(first.model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_checkpoints_of_another_model_are_refused(tmp_path: Path) -> None:
    fit(steps=2, checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another model.*'params/down/kernel': float32\[16,6\]"):
        fit(steps=4, checkpoint=tmp_path / "run", model=lambda rngs: Toy(rngs, hidden=8))
    with pytest.raises(CheckpointError, match="another optimizer"):
        fit(steps=4, checkpoint=tmp_path / "run", optimizer=optax.sgd(1e-2, momentum=0.9))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"steps": -1}, UsageError, "steps is -1"),
        ({"steps": 2.5}, UsageError, "steps is 2.5"),
        ({"nonfinite": "ignore"}, UsageError, "nonfinite is 'ignore'"),
        ({"resume": "maybe"}, UsageError, "resume is 'maybe'"),
        ({"resume": "must"}, UsageError, "without a checkpoint directory"),
        ({"eval_every": 0}, UsageError, "eval_every is 0"),
        ({"eval_every": 1}, UsageError, "without eval_data"),
        ({"eval_every": 1, "eval_data": iter([])}, UsageError, "an iterator that one evaluation uses up"),
        ({"data": []}, DataError, "empty"),
        ({"data": iter([])}, DataError, "no batch"),
        ({"data": 5}, DataError, "iterable of batches"),
        ({"grid": "cpu:64"}, UsageError, r"64 devices, jax has 8\n.*JAX_NUM_CPU_DEVICES=64"),
        ({"grid": "a100:2"}, UsageError, "jax runs on cpu:8 here"),
        ({"grid": "cpu"}, UsageError, "neither an allocation nor a grid shape"),
        ({"plan": "nowhere.json"}, PlanError, "cannot read plan"),
        ({"init_from": "nowhere"}, CheckpointError, "no checkpoint"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fit(**options)


def test_without_a_tracker_mlflow_is_not_imported(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        import optax
        import arena_jax
        from tests.doubles import Toy, ToyLoader, toy_loss
        arena_jax.fit(Toy, optax.sgd(0.1), toy_loss, ToyLoader(), steps=1, grid="cpu:1", checkpoint="run")
        sys.exit("mlflow" in sys.modules)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False).returncode == 0


def test_compile_serves_ones_own_loop_and_swaps_by_hand() -> None:
    data = batches(5)
    program = arena_jax.compile(Toy, optax.adam(1e-2), toy_loss, data[0], grid="cpu:2/s2")
    other = arena_jax.compile(Toy, optax.adam(1e-2), toy_loss, data[0], grid="cpu:4/s1")
    state = program.init(nnx.Rngs(0))
    losses = []
    for i, batch in enumerate(data):
        if i == 3:
            state, program = other.reshard_from(state, program), other
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, by_hand(5, data)[0], rtol=1e-5)
    assert float(program.eval_step(state, data[0])["loss"]) > 0


def test_plan_needs_no_hardware() -> None:
    index = arena_jax.plan(Toy, optax.adam(1e-2), toy_loss, batches(1)[0], on=["a100:8", "h100:2x8"])
    for text in ("a100:8", "h100:2x8"):
        row = index.best(arena_jax.Allocation.parse(text))
        assert row is not None
        assert row.feasible


def test_a_coupled_loss_keeps_its_microbatches_through_swaps_and_resumes(tmp_path: Path) -> None:
    """BatchNorm sees a microbatch: another number of them would be another training."""

    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.toy = Toy(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.toy(self.norm(x))

    def run(**options: Any) -> arena_jax.FitResult:
        return fit(ToyLoader(), model=Normed, **options)

    whole = run(steps=6, grid="cpu:1")
    script = ScriptedHook(["2: cpu:2/s2"])
    swapped = run(steps=4, grid="cpu:1", hook=script, checkpoint=tmp_path / "run")
    assert [str(s.target) for s in swapped.swaps] == ["cpu:2/s2"]
    resumed = run(steps=6, grid="cpu:4/s2", checkpoint=tmp_path / "run")
    numbers = {result.plan.num_microbatches for result in (whole, swapped, resumed)}
    assert len(numbers) == 1
    losses = [r.loss for r in (*swapped.history, *resumed.history)]
    np.testing.assert_allclose(losses, [r.loss for r in whole.history], rtol=1e-4)
