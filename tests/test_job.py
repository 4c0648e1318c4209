"""Jobs: what a recipe becomes, and that the tiny ones learn."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from arena_jax.bundled import load_function
from arena_jax.errors import DataError, ModelError, UsageError
from arena_jax.job import Job, build, shapes_of
from arena_jax.optimizer import build_optimizer, decayed, learning_rate
from arena_jax.recipe import load_recipe
from arena_jax.recipe.schema import OPTIMIZERS, OptimizerSection
from arena_jax.values import Last, Sum, Weighted

TINY = ("gpt_tiny", "bert_tiny", "moe_tiny", "wide_resnet_tiny")


def number(out: Any) -> jax.Array:
    loss = out[0] if isinstance(out, tuple) else out
    return loss.sum / loss.weight if isinstance(loss, Weighted) else loss


def train(job: Job, num_steps: int) -> list[float]:
    """The plainest training loop there is, on one device."""
    graphdef, parameters, rest = nnx.split(job.make_model(nnx.Rngs(job.seed)), nnx.Param, ...)
    optimizer_state = job.optimizer.init(parameters)

    @jax.jit
    def step(parameters: Any, rest: Any, optimizer_state: Any, batch: Any) -> Any:
        def loss(parameters: Any) -> Any:
            model = nnx.merge(graphdef, parameters, jax.tree.map(lambda x: x, rest))
            return number(job.loss_fn(model, batch)), nnx.state(model, nnx.Not(nnx.Param))

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, optimizer_state = job.optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), after, optimizer_state, value

    losses = []
    data = job.make_data()
    for _ in range(num_steps):
        parameters, rest, optimizer_state, value = step(parameters, rest, optimizer_state, next(data))
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_learns(name: str) -> None:
    gentle = ["optimizer.learning_rate=5e-3"] if name == "wide_resnet_tiny" else []
    job = build(load_recipe(name, ["global_batch=8", "optimizer.warmup_steps=2", *gentle]))
    losses = train(job, 12)
    start = np.log(10 if name == "wide_resnet_tiny" else 256)
    assert losses[0] == pytest.approx(start, abs=0.8)
    assert np.mean(losses[-3:]) < losses[0] - 0.3


@pytest.mark.parametrize("name", TINY)
def test_the_example_batch_is_what_the_data_gives(name: str) -> None:
    job = build(load_recipe(name))
    assert shapes_of(next(job.make_data())) == job.example_batch
    assert job.make_eval_data is not None
    held_out = list(job.make_eval_data())
    assert held_out
    assert shapes_of(held_out[0]) == job.example_batch
    # 48 rows: every data-parallel size of up to 8 devices but 5 and 7 divides them.
    assert job.global_batch == 48
    samples = job.recipe.model.name == "wide_resnet"
    assert job.items_per_batch == ((48, "samples") if samples else (48 * 64, "tokens"))


def test_data_are_opened_at_their_beginning_each_time() -> None:
    job = build(load_recipe("wide_resnet_tiny"))
    first, second = job.make_data(), job.make_data()
    next(first)
    a, b = next(job.make_data()), next(second)
    assert np.array_equal(a["labels"], b["labels"])
    assert first.fingerprint == second.fingerprint


def test_stored_precision_reaches_the_model() -> None:
    job = build(load_recipe("gpt_tiny", ["precision.parameter=bfloat16", "precision.compute=float16"]))
    state = nnx.state(nnx.eval_shape(lambda: job.make_model(nnx.Rngs(0))))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    assert job.precision.compute == "float16"


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_schedules_warm_up_peak_and_end_on_time(schedule: str, accumulate: int) -> None:
    section = OptimizerSection.model_validate(
        {
            "learning_rate": 0.8,
            "schedule": schedule,
            "warmup_steps": 20,
            "final_fraction": 0.1,
            "accumulate_steps": accumulate,
        }
    )
    rate = learning_rate(section, num_updates=100 // accumulate)
    warm, last = 20 // accumulate, 100 // accumulate
    assert 0 < float(rate(0)) <= 0.8 / warm + 1e-6
    assert float(rate(warm)) == pytest.approx(0.8)
    assert float(rate(last)) == pytest.approx(0.8 if schedule == "constant" else 0.08)
    values = [float(rate(i)) for i in range(last)]
    assert values[:warm] == sorted(values[:warm])
    assert values[warm:] == sorted(values[warm:], reverse=True)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_optimizer_builds_and_decays_matrices_only(name: str, weight_decay: float) -> None:
    section = OptimizerSection.model_validate(
        {"name": name, "weight_decay": weight_decay, "clip_norm": 1.0, "learning_rate": 1.0}
    )
    transformation = build_optimizer(section, steps=10)
    parameters = {"up": jnp.ones((4, 4)), "up_bias": jnp.ones(4), "norm": {"scale": jnp.ones(4)}}
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = transformation.update(zeros, transformation.init(parameters), parameters)
    assert bool((updates["up"] != 0).all()) == bool(weight_decay)
    assert not updates["up_bias"].any()
    assert not updates["norm"]["scale"].any()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_options_that_recipes_may_name_are_optax_ones(name: str) -> None:
    given: dict[str, Any] = {
        option: {"nesterov": False, "factored": True, "multiply_by_parameter_scale": True}.get(option, 0.5)
        for option in OPTIMIZERS[name]
    }
    for integer in ("min_dim_size_to_factor", "decay_offset"):
        if integer in given:
            given[integer] = 2
    section = OptimizerSection.model_validate({"name": name, "options": given})
    parameters = {"w": jnp.ones((4, 4))}
    build_optimizer(section, steps=10).init(parameters)


def test_clipping_comes_first_and_accumulation_around_all() -> None:
    section = OptimizerSection.model_validate(
        {"name": "sgd", "learning_rate": 1.0, "clip_norm": 1.0, "accumulate_steps": 2}
    )
    transformation = build_optimizer(section, steps=10)
    parameters = {"w": jnp.zeros(2)}
    state = transformation.init(parameters)
    first, state = transformation.update({"w": jnp.array([30.0, 40.0])}, state, parameters)
    second, _ = transformation.update({"w": jnp.array([30.0, 40.0])}, state, parameters)
    assert not first["w"].any()
    np.testing.assert_allclose(second["w"], [-0.6, -0.8], rtol=1e-6)


def test_models_decay_matrices_and_embeddings_but_no_bias_and_no_scale() -> None:
    for name in TINY:
        state = nnx.state(nnx.eval_shape(lambda name=name: build(load_recipe(name)).make_model(nnx.Rngs(0))), nnx.Param)
        for path, decays in jax.tree_util.tree_leaves_with_path(decayed(state)):
            text = jax.tree_util.keystr(path)
            assert decays == ("bias" not in text and "scale" not in text), text


MODEL = """
from dataclasses import dataclass
from flax import nnx
from .helper import scale

@dataclass(frozen=True)
class Config:
    width: int = 4
    vocabulary: int = 256
    sequence_length: int = 8

class Model(nnx.Module):
    def __init__(self, config, *, rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
    def __call__(self, tokens):
        return scale * self.embed(tokens)

def loss_fn(model, batch):
    return (model(batch["tokens"]) ** 2).mean()

def other_loss(model, batch):
    return model(batch["tokens"]).mean()
"""
RECIPE = "model: {file: ./mine.py, width: 6}\nglobal_batch: 8\nsteps: 2\n"


def test_a_model_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("scale = 2.0")
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    job = build(load_recipe(str(path)))
    assert np.isfinite(train(job, 2)).all()
    path.write_text(RECIPE + "loss: ./mine.py:other_loss\n")
    assert build(load_recipe(str(path))).loss_fn is load_function(f"{tmp_path}/mine.py:other_loss")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int\n"
    )
    (tmp_path / "bad" / "mine.yaml").write_text(RECIPE + "data: {sequence_length: 4}\n")
    with pytest.raises(ModelError, match="defines no Model"):
        build(load_recipe(str(tmp_path / "bad" / "mine.yaml")))


FUNCTION = """
import numpy as np, optax
from flax import nnx

def parts():
    return {
        "make_model": lambda rngs: nnx.Linear(3, 1, rngs=rngs),
        "optimizer": optax.sgd(0.1),
        "loss_fn": lambda model, batch: ((model(batch["x"]) - 1) ** 2).mean(),
        "make_data": lambda: [{"x": np.ones((6, 3), np.float32)}],
        "steps": 9,
    }

def with_recipe(recipe):
    return {**parts(), "name": f"seed {recipe.seed}"}

def wrong():
    return 3

def unknown():
    return {**parts(), "lossfn": 1}

def missing():
    return {"steps": 1}

def batches(*, global_batch, seed, split):
    if split == "validation":
        return None
    return [{"tokens": np.full((global_batch, 8), seed, np.int32)}]
"""


def test_a_job_from_a_function(tmp_path: Path) -> None:
    path = tmp_path / "jobs.py"
    path.write_text(FUNCTION)
    job = build(load_recipe(f"{path}:parts"))
    assert (job.name, job.steps, job.global_batch, job.items_per_batch) == ("parts", 9, 6, (6, "samples"))
    assert job.recipe.steps == 9
    assert train(job, 3)[2] < train(job, 1)[0]
    assert build(load_recipe(f"{path}:parts", ["steps=4"])).steps == 4
    assert build(load_recipe(f"{path}:with_recipe", ["seed=5"])).name == "seed 5"
    for name, words in (("wrong", "returned int"), ("unknown", "did you mean 'loss_fn'"), ("missing", "no make_model")):
        with pytest.raises(ModelError, match=words):
            build(load_recipe(f"{path}:{name}"))
    with pytest.raises(UsageError, match=r"no function 'part'.*did you mean 'parts'"):
        build(load_recipe(f"{path}:part"))
    with pytest.raises(UsageError, match="no module"):
        build(load_recipe("no_such_module_at_all:make"))


def test_data_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(FUNCTION)
    job = build(load_recipe("gpt_tiny", ["data.kind=function", f"data.function={tmp_path}/jobs.py:batches", "seed=3"]))
    assert job.make_eval_data is None
    assert (next(job.make_data())["tokens"] == 3).all()
    assert job.items_per_batch == (48 * 8, "tokens")


def test_images_must_fit_the_model() -> None:
    with pytest.raises(DataError, match="digits are 8 x 8"):
        build(load_recipe("wide_resnet_tiny", ["model.image_size=16"]))
    job = build(load_recipe("wide_resnet_1b"))
    assert job.example_batch["images"].shape == (256, 224, 224, 3)
    with pytest.raises(DataError, match="planning"):
        next(job.make_data())


def test_values_are_pytrees() -> None:
    for value in (Weighted(sum=1.0, weight=2.0), Sum(1.0), Last(1.0)):
        doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(value)
        assert type(doubled) is type(value)
    assert float(jax.jit(lambda w: w.sum / w.weight)(Weighted(sum=1.0, weight=2.0))) == 0.5
