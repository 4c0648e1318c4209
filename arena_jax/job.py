"""From a recipe to what is trained: model, optimizer, loss and data. Nothing is read or materialised yet."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from arena_jax import data
from arena_jax.bundled import load_file, load_function
from arena_jax.compiler import Problem, make_problem
from arena_jax.errors import DataError, ModelError, nearest
from arena_jax.grid import Precision
from arena_jax.optimizer import build_optimizer
from arena_jax.recipe import Recipe, model_config

LossFn = Callable[[Any, Any], Any]
"""``(model, batch) -> loss | Weighted``, or that and a dict of metrics."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, ready to be traced.

    Attributes:
        name: what the run is called.
        make_model: ``rngs -> nnx.Module``; called under ``nnx.eval_shape`` to trace, sharded to initialise.
        optimizer: any optax transformation.
        loss_fn: see :data:`LossFn`.
        make_data: opens the training data at its beginning.
        make_eval_data: opens the validation batches, from the first; ``None`` where there are none.
        example_batch: pytree of ``jax.ShapeDtypeStruct`` at the global batch.
        global_batch: samples per step.
        steps: optimizer steps of the whole run.
        seed: of initialisation and dropout; the data has used it for its order.
        items_per_batch: how many of what (``"tokens"`` or ``"samples"``) a step consumes.
        precision: dtypes of the run.
        recipe: where all of this came from.
    """

    name: str
    make_model: Callable[[nnx.Rngs], nnx.Module]
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    make_data: Callable[[], data.Loader]
    make_eval_data: Callable[[], Iterable[Any]] | None
    example_batch: Any
    global_batch: int
    steps: int
    seed: int
    items_per_batch: tuple[int, str]
    precision: Precision
    recipe: Recipe

    def problem(self) -> Problem:
        """What is trained, abstractly."""
        return make_problem(
            self.make_model,
            self.optimizer,
            self.loss_fn,
            self.example_batch,
            precision=self.precision,
            axis_rules=self.recipe.plan.axis_rules,
            specs=self.recipe.plan.specs,
            seed=self.seed,
        )


def build(recipe: Recipe) -> Job:
    """Return the job of a recipe.

    Raises:
        ModelError: a model file without ``Model`` or ``loss_fn``, or a function recipe that returns
            something else than a job.
        DataError: data that is missing, or does not fit the model.
    """
    precision = Precision(**recipe.precision.model_dump())
    if recipe.function:
        return _from_function(recipe, precision)
    path = recipe.model_file
    assert path is not None  # the recipe was checked
    module = load_file(path)
    config = _config(module, path, recipe)
    make_data, make_eval_data, example_batch = _data(recipe, config)
    return Job(
        name=recipe.name,
        make_model=lambda rngs: module.Model(config, rngs=rngs),
        optimizer=build_optimizer(recipe.optimizer, steps=recipe.steps),
        loss_fn=load_function(recipe.loss) if recipe.loss else module.loss_fn,
        make_data=make_data,
        make_eval_data=make_eval_data,
        example_batch=example_batch,
        global_batch=recipe.global_batch,
        steps=recipe.steps,
        seed=recipe.seed,
        items_per_batch=_items(example_batch, recipe.global_batch),
        precision=precision,
        recipe=recipe,
    )


def _config(module: Any, path: Path, recipe: Recipe) -> Any:
    for name in ("Config", "Model", "loss_fn"):
        if not hasattr(module, name) and not (name == "loss_fn" and recipe.loss):
            raise ModelError(
                f"{str(path)!r} defines no {name}{nearest(name, vars(module))}",
                hint="a model file defines Config, Model(config, rngs=rngs) and loss_fn(model, batch)",
            )
    # The recipe's checks used a twin of this class, read without importing the file.
    checked = model_config(path, recipe.model.config)
    values = {field.name: getattr(checked, field.name) for field in dataclasses.fields(checked)}
    # A model that can be made in the dtype it is stored in is, its running statistics included.
    if recipe.precision.parameter and "param_dtype" in values and "param_dtype" not in recipe.model.config:
        values["param_dtype"] = recipe.precision.parameter
    return module.Config(**values)


MakeData = Callable[[], data.Loader]
MakeEvalData = Callable[[], Iterable[Any]] | None


def _data(recipe: Recipe, config: Any) -> tuple[MakeData, MakeEvalData, Any]:
    """Return the factories of training and validation data, and the batch's shapes."""
    section, batch = recipe.data, recipe.global_batch
    if section.kind == "function":
        return _own_data(recipe)
    if section.kind in ("digits", "images"):
        example = _image_shapes(section.kind, batch, config)
    else:
        example = _token_shapes(recipe, config)

    def make_data() -> data.Loader:
        return data.SampleLoader(open_source(recipe, config, "train"), global_batch=batch, seed=recipe.seed)

    def make_eval_data() -> Iterable[Any]:
        return data.EvalBatches(
            open_source(recipe, config, "validation"), global_batch=batch, num_batches=recipe.eval.batches
        )

    return make_data, make_eval_data if section.validation_fraction else None, example


def open_source(recipe: Recipe, config: Any, split: Any) -> data.Source:
    """Open one split of a recipe's data; ``config`` is the model's, for its sizes."""
    section = recipe.data
    if section.kind == "digits":
        return data.Digits(split=split, validation_fraction=section.validation_fraction)
    if section.kind == "images":
        return data.Shapes(split=split)
    vocabulary = getattr(config, "vocabulary", None)
    if section.kind == "stdlib":
        corpus = data.standard_library()
    elif section.kind == "text":
        corpus = data.text_files(section.files)
    else:
        corpus = data.token_file(str(section.path), dtype=section.dtype)
    windows = data.TokenWindows(
        corpus,
        _sequence_length(recipe, config),
        split=split,
        validation_fraction=section.validation_fraction,
        vocabulary=vocabulary,
    )
    if section.objective == "next":
        return windows
    return data.MaskedWindows(windows, mask_token=section.mask_token, mask_rate=section.mask_rate, seed=recipe.seed)


def _sequence_length(recipe: Recipe, config: Any) -> int:
    length = recipe.data.sequence_length or getattr(config, "sequence_length", None)
    if length is None:
        raise DataError("data.sequence_length is needed, as the model names none")
    return int(length)


def _token_shapes(recipe: Recipe, config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (recipe.global_batch, _sequence_length(recipe, config))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    example = {"tokens": tokens, "targets": tokens}
    if recipe.data.objective == "masked":
        example["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return example


def _image_shapes(kind: str, batch: int, config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    wanted = (data.DIGIT_SIZE, 1) if kind == "digits" else None
    size = (getattr(config, "image_size", None), getattr(config, "image_channels", None))
    if wanted is not None and size not in ((None, None), wanted):
        raise DataError(
            f"the model wants images of {size[0]} x {size[0]} with {size[1]} channels; digits are 8 x 8 with 1",
            hint="set model.image_size=8 model.image_channels=1",
        )
    height, channels = wanted or size
    if height is None or channels is None:
        raise DataError("data.kind=images takes its shape from model.image_size and model.image_channels")
    return {
        "images": jax.ShapeDtypeStruct((batch, height, height, channels), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def _own_data(recipe: Recipe) -> tuple[MakeData, MakeEvalData, Any]:
    function = load_function(str(recipe.data.function))

    def make(split: str) -> Any:
        return function(global_batch=recipe.global_batch, seed=recipe.seed, split=split)

    def make_data() -> data.Loader:
        return data.as_loader(make("train"))

    example = shapes_of(next(make_data()))
    has_validation = make("validation") is not None
    return make_data, (lambda: make("validation")) if has_validation else None, example


def shapes_of(batch: Any) -> Any:
    """Return the shapes and dtypes of a batch as jax will see them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))), batch
    )


def _items(example: Any, global_batch: int) -> tuple[int, str]:
    """Count tokens where the batch holds sequences of ids, else samples."""
    tokens = example.get("tokens") if isinstance(example, Mapping) else None
    return (tokens.size, "tokens") if tokens is not None and len(tokens.shape) == 2 else (global_batch, "samples")


def _from_function(recipe: Recipe, precision: Precision) -> Job:
    """Call a recipe's function; it may take the recipe, and returns a job or what makes one."""
    function = load_function(str(recipe.function))
    made = function(recipe) if inspect.signature(function).parameters else function()
    if isinstance(made, Job):
        return made
    if not isinstance(made, Mapping):
        raise ModelError(
            f"{recipe.function!r} returned {type(made).__name__}",
            hint="return a dict with make_model, optimizer, loss_fn and make_data, or a Job",
        )
    given = dict(made)
    known = {field.name for field in dataclasses.fields(Job)}
    for key in given:
        if key not in known:
            raise ModelError(f"{recipe.function!r} returned an unknown key {key!r}{nearest(key, known)}")
    missing = [key for key in ("make_model", "optimizer", "loss_fn", "make_data") if key not in given]
    if missing:
        raise ModelError(f"{recipe.function!r} returned no {', '.join(missing)}")
    make_own = given["make_data"]
    given["make_data"] = lambda: data.as_loader(make_own())
    if "example_batch" not in given:
        given["example_batch"] = shapes_of(next(given["make_data"]()))
    leading = {leaf.shape[0] for leaf in jax.tree.leaves(given["example_batch"]) if leaf.shape}
    if len(leading) != 1:
        raise ModelError(f"batch leaves must share their leading dim, got {sorted(leading)}")
    given["global_batch"] = leading.pop()
    # What the user set on the command line wins over what the function says.
    for key in ("steps", "seed"):
        if key not in given or key in recipe.model_fields_set:
            given[key] = getattr(recipe, key)
    recipe = recipe.model_copy(update={key: given[key] for key in ("global_batch", "steps", "seed")})
    return Job(
        **{
            "name": recipe.name,
            "make_eval_data": None,
            "items_per_batch": _items(given["example_batch"], given["global_batch"]),
            "precision": precision,
            "recipe": recipe,
            **given,
        }
    )
