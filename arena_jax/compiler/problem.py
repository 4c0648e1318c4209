"""What is to be trained: a model's leaves, its loss, its optimizer and its global batch, abstractly.

Nothing here materialises a parameter. A :class:`Problem` is the single description that tracing,
planning, lowering and checkpoints share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.core.spmd import get_logical_axis_rules

from arena_jax.compiler._compat import is_key, mesh_in_use
from arena_jax.compiler.annotations import AxisRules, DimNames, Required, annotation_of, pinned
from arena_jax.compiler.meshless import names_a_mesh, run_without_mesh
from arena_jax.compiler.model_tree import ParameterTree, is_array_tree, loss_of_tree
from arena_jax.compiler.tracing import quick_tracing
from arena_jax.errors import ModelError, UsageError
from arena_jax.grid import Precision

PyTree = Any
LossFn = Callable[[Any, PyTree], Any]

# Which collection a leaf of the model belongs to.
PARAMS, FROZEN, STATE = "params", "frozen", "state"
KINDS = (PARAMS, FROZEN, STATE)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the model: its path, collection and abstract value."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_key(self) -> bool:
        return is_key(self)

    @property
    def num_bytes(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size * (8 if self.is_key else jnp.dtype(self.dtype).itemsize)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class BatchLeaf:
    """One array of the batch: name, shape of one *row* (or of the scalar), dtype."""

    name: str
    row_shape: tuple[int, ...]
    dtype: Any
    has_rows: bool

    def struct(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *self.row_shape) if self.has_rows else (), self.dtype)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A training problem. Make one with :func:`make_problem`.

    Attributes:
        leaves: all arrays of the model, parameters first, then frozen ones, then other state.
        batch: the arrays of the global batch.
        global_batch: rows of the global batch.
        optimizer: any optax transformation.
        precision: dtype policy of the run.
        trainable: an nnx filter of what gets a gradient; ``None`` for all floating parameters.
        seed: seed of the model's ``nnx.Rngs``.
        mesh: what the caller had set as jax's mesh, ``None`` for none: the loss is traced under it, and
            nothing else runs under it.
        logical_rules: flax's logical axis rules that were in force, for the same.
        annotations: name of a parameter -> how its annotation, or the user's pin, says that it lies.
        axis_rules: what the axis names in the traced loss stand for.
    """

    leaves: tuple[Leaf, ...]
    batch: tuple[BatchLeaf, ...]
    global_batch: int
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    precision: Precision
    seed: int
    graphdef: Any = field(repr=False)
    treedefs: Mapping[str, Any] = field(repr=False)
    batch_treedef: Any = field(repr=False)
    trainable: Any = field(repr=False)
    make_values: Callable[[nnx.Rngs], list[Any]] = field(repr=False)
    concrete: bool = False
    mesh: Any = field(default=None, repr=False)
    logical_rules: Any = field(default=(), repr=False)
    annotations: Mapping[str, Required] = field(default_factory=dict)
    axis_rules: AxisRules = field(default_factory=AxisRules)

    def of_kind(self, kind: str) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == kind)

    @cached_property
    def num_parameters(self) -> int:
        """Number of scalar parameters, frozen ones included."""
        return sum(_size(leaf.shape) for leaf in self.leaves if leaf.kind != STATE)

    @property
    def params_struct(self) -> PyTree:
        """The trainable parameters as the abstract ``nnx.State`` that optax sees."""
        return self.treedefs[PARAMS].unflatten([leaf.struct for leaf in self.of_kind(PARAMS)])

    @cached_property
    def eval_graphdef(self) -> Any:
        """The graph definition of the same model in ``.eval()`` mode; the caller's stays as it was."""
        states = [self.treedefs[kind].unflatten([leaf.struct for leaf in self.of_kind(kind)]) for kind in KINDS]
        copy = nnx.merge(self.graphdef, *states)
        copy.eval()
        return nnx.split(copy, *_filters(self.trainable))[0]

    @cached_property
    def optimizer_struct(self) -> PyTree:
        """Abstract optimizer state."""
        try:
            with quick_tracing():
                return jax.eval_shape(self.optimizer.init, self.params_struct)
        except Exception as error:
            raise ModelError(f"the optimizer's init failed on these parameters: {error}") from error

    @cached_property
    def optimizer_names(self) -> tuple[str, ...]:
        """A stable name for every leaf of the optimizer state."""
        paths = jax.tree_util.tree_flatten_with_path(self.optimizer_struct)[0]
        return tuple(path_name(path) for path, _ in paths)

    def accumulation_dtype(self, dtype: Any) -> Any:
        """Gradients accumulate in the policy's dtype, or in the parameter's where that is wider."""
        return jnp.promote_types(jnp.dtype(self.precision.accumulation), dtype)

    def rows_of(self, num_microbatches: int) -> int:
        """Rows of one microbatch."""
        return self.global_batch // num_microbatches

    def with_batch(self, global_batch: int) -> "Problem":
        return replace(self, global_batch=global_batch)


@quick_tracing()
def make_problem(
    model: nnx.Module | PyTree | Callable[[nnx.Rngs], nnx.Module | PyTree],
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    precision: Precision | None = None,
    trainable: Any = None,
    axis_rules: Mapping[str, str | None] | None = None,
    specs: Mapping[str, Sequence[DimNames]] | None = None,
    seed: int = 0,
) -> Problem:
    """Describe a training problem without materialising anything new.

    Args:
        model: a module, a tree of arrays (which ``loss_fn`` then gets in place of a module), or a factory
            ``rngs -> module or tree`` (then parameters are only ever made sharded).
        optimizer: any optax transformation.
        loss_fn: ``(model, batch) -> loss``, or ``Weighted``, or ``(that, metrics)``.
        batch: a global batch, arrays or ``jax.ShapeDtypeStruct``; leaves share their leading dim,
            scalars are broadcast.
        precision: dtype policy, ``None`` for the model's own dtypes.
        trainable: an nnx filter as in ``nnx.Optimizer``'s ``wrt``; the rest gets no gradient.
        axis_rules: axis names of the model's annotations and constraints -> ``"dp"``, ``"tp"``, or ``None``
            for one that shards nothing; beside the defaults (data, batch, fsdp; model, tensor, mp).
        specs: name or pattern of parameters -> how they have to lie, axis names dim by dim, ``None`` for a whole dim.
        seed: seed for ``nnx.Rngs``.

    Raises:
        ModelError, UsageError: what was received and what would work.
    """
    precision = precision or Precision()
    rules = AxisRules(axis_rules)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ModelError(
            f"the optimizer is a {type(optimizer).__name__}, not an optax transformation",
            hint="pass the optax transformation itself, e.g. optax.adamw(1e-3), not an nnx.Optimizer",
        )
    make_model, abstract = _abstract_model(model, seed)
    if isinstance(abstract, ParameterTree):
        loss_fn = loss_of_tree(loss_fn)
    filters = _filters(trainable)
    graphdef, *states = nnx.split(abstract, *filters)
    leaves: list[Leaf] = []
    annotations: dict[str, Required] = {}
    treedefs = {}
    for kind, state in zip(KINDS, states, strict=True):
        paths, treedefs[kind] = jax.tree_util.tree_flatten_with_path(state)
        for path, value in paths:
            dtype = _parameter_dtype(value, precision) if kind != STATE else value.dtype
            leaves.append(Leaf(name=path_name(path), kind=kind, shape=tuple(value.shape), dtype=dtype))
        if kind != STATE:
            annotations |= _annotations(state, rules)
    if not any(leaf.kind == PARAMS for leaf in leaves):
        raise ModelError(
            "the model has no trainable parameter",
            hint="parameters are nnx.Param variables; `trainable` selects among them",
        )
    shapes = {leaf.name: leaf.shape for leaf in leaves if leaf.kind != STATE}
    annotations |= pinned(specs or {}, shapes, annotations, rules)
    _refuse_keys(leaves)
    batch_leaves, batch_treedef, rows = _describe_batch(batch)
    problem_leaves = tuple(leaves)

    def make_values(rngs: nnx.Rngs) -> list[Any]:
        module = make_model(rngs)
        values = [v for state in nnx.split(module, *filters)[1:] for v in jax.tree.leaves(state)]
        return [
            v if leaf.is_key else jnp.asarray(v).astype(leaf.dtype)
            for v, leaf in zip(values, problem_leaves, strict=True)
        ]

    mesh = mesh_in_use()
    concrete = isinstance(model, nnx.Module) or is_array_tree(model)
    return Problem(
        leaves=problem_leaves,
        batch=batch_leaves,
        global_batch=rows,
        optimizer=optimizer,
        loss_fn=loss_fn,
        precision=precision,
        seed=seed,
        graphdef=graphdef,
        treedefs=treedefs,
        batch_treedef=batch_treedef,
        trainable=trainable,
        make_values=make_values if mesh is None or concrete else _off_mesh(make_values, seed),
        concrete=concrete,
        mesh=mesh,
        logical_rules=get_logical_axis_rules(),
        annotations=annotations,
        axis_rules=rules,
    )


def path_name(path: tuple[Any, ...]) -> str:
    """``blocks/0/mlp/kernel`` for a jax key path; nnx's trailing ``.value`` is dropped."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    if len(parts) > 1 and parts[-1] == "value":
        parts.pop()
    return "/".join(parts)


def _abstract_model(model: Any, seed: int) -> tuple[Callable[[nnx.Rngs], nnx.Module], nnx.Module]:
    if isinstance(model, nnx.Module):
        return lambda _: model, model
    if is_array_tree(model):
        tree = ParameterTree(model)
        return lambda _: tree, tree
    if not callable(model) or isinstance(model, linen.Module):
        raise ModelError(
            f"the model is a {type(model).__name__}, neither an nnx.Module, a tree of arrays, nor a factory of one",
            hint="wrap a Linen module as lambda rngs: nnx.bridge.ToNNX(module, rngs).lazy_init(example)",
        )

    def make(rngs: nnx.Rngs) -> nnx.Module:
        # Annotations are read, not followed: flax would put a value on the mesh that is set, and wants one to be.
        with nnx.use_eager_sharding(False):
            made = model(rngs)
        if is_array_tree(made):
            return ParameterTree(made)
        if not isinstance(made, nnx.Module):
            raise ModelError(
                f"the model factory returned {type(made).__name__}, neither an nnx.Module nor a tree of arrays",
                hint="a factory takes nnx.Rngs and returns the module or its parameters",
            )
        return made

    # Not nnx.eval_shape, which wants every annotation to name axes of the mesh that is set.
    graphdefs: list[Any] = []

    def split() -> Any:
        graphdef, state = nnx.split(make(nnx.Rngs(seed)))
        graphdefs.append(graphdef)
        return state

    state = jax.eval_shape(split)
    return make, nnx.merge(graphdefs[-1], state)


def _off_mesh(make_values: Callable[[nnx.Rngs], list[Any]], seed: int) -> Callable[[nnx.Rngs], list[Any]]:
    """The same function as it is on the mesh that is set now, to be called under none."""
    graphdef, state = nnx.split(nnx.Rngs(seed))
    closed = jax.make_jaxpr(lambda s: make_values(nnx.merge(graphdef, s)))(state)
    if not names_a_mesh(closed.jaxpr):
        return make_values

    def make(rngs: nnx.Rngs) -> list[Any]:
        given = nnx.split(rngs)[1]
        theirs: Any = jax.tree.structure(given)
        if theirs != jax.tree.structure(state):  # rngs of other streams
            return make_values(rngs)
        return run_without_mesh(closed.jaxpr, closed.consts, jax.tree.leaves(given))

    return make


def _annotations(state: Any, rules: AxisRules) -> dict[str, Required]:
    found = {}
    for path, variable in jax.tree_util.tree_flatten_with_path(state, lambda x: isinstance(x, nnx.Variable))[0]:
        name = path_name(path)
        required = annotation_of(variable, name, getattr(variable, "shape", ()), rules)
        if required is not None:
            found[name] = required
    return found


def _filters(trainable: Any) -> tuple[Any, Any, Any]:
    """Trainable, frozen, and other state; integer parameters have no gradient and count as frozen."""

    def is_floating(path: Any, value: Any) -> bool:
        return jnp.issubdtype(value.dtype, jnp.floating)

    wrt = nnx.All(nnx.Param, is_floating) if trainable is None else nnx.All(nnx.Param, is_floating, trainable)
    return wrt, nnx.All(nnx.Param, nnx.Not(wrt)), nnx.Not(nnx.Param)


def _parameter_dtype(value: Any, precision: Precision) -> Any:
    if precision.parameter is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value.dtype
    return jnp.dtype(precision.parameter)


def _refuse_keys(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        if leaf.is_key and "fry" not in str(leaf.dtype):
            raise ModelError(
                f"{leaf.name} is a {leaf.dtype} key; only threefry gives the same numbers under every sharding",
                hint="use jax.random.key(seed), or jax_default_prng_impl=threefry2x32",
            )


def _describe_batch(batch: PyTree) -> tuple[tuple[BatchLeaf, ...], Any, int]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
    if not paths:
        raise UsageError("the batch has no arrays")
    described: list[BatchLeaf] = []
    rows: dict[str, int] = {}
    for path, value in paths:
        name = path_name(path) or "batch"
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            value = jnp.asarray(value) if isinstance(value, int | float | bool) else None
        if value is None:
            raise UsageError(f"batch leaf {name!r} is no array", hint="a batch is a pytree of arrays and scalars")
        has_rows = len(value.shape) > 0
        if has_rows:
            rows[name] = value.shape[0]
        described.append(
            BatchLeaf(
                name=name,
                row_shape=tuple(value.shape[1:]),
                dtype=jax.dtypes.canonicalize_dtype(value.dtype),
                has_rows=has_rows,
            )
        )
    counts = set(rows.values())
    if len(counts) != 1 or 0 in counts:
        received = ", ".join(f"{name}: {n}" for name, n in rows.items()) or "only scalars"
        raise UsageError(
            f"batch leaves must share a leading dim of at least 1; received {received}",
            hint="give every array one row per sample; scalars are broadcast",
        )
    return tuple(described), treedef, counts.pop()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
