"""Trace a problem's loss into one flat jaxpr whose inputs are model leaves and batch leaves.

The loss is traced at the size of one *microbatch*. Calls (``jit``) are inlined, so that every
equation has a position; scans, rematerialised blocks and custom rules stay nested and are addressed
by path (``"12/3"``: equation 3 in the body of equation 12). Plans refer to values by such keys:
``"12:0"`` is the first output of equation 12.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import flax.core.spmd
import flax.errors
import jax
import jax.numpy as jnp
from flax import nnx

from arena_jax.compiler import _compat
from arena_jax.compiler.annotations import Annotations, required_in
from arena_jax.compiler.dims import RuleBook, unknown_primitives
from arena_jax.compiler.effects import check_effects
from arena_jax.compiler.meshless import names_a_mesh, run_without_mesh
from arena_jax.compiler.problem import FROZEN, PARAMS, STATE, Leaf, Problem, path_name
from arena_jax.compiler.tracing import quick_tracing
from arena_jax.errors import ArenaError, ModelError
from arena_jax.values import Last, Sum, Weighted

# How a metric is combined over microbatches, and how many numbers it carries.
MEAN, WEIGHTED, SUM, LAST = "mean", "weighted", "sum", "last"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One entry of the user's metrics: its name and how microbatches are combined."""

    name: str
    kind: str

    @property
    def num_values(self) -> int:
        return 2 if self.kind == WEIGHTED else 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The traced loss.

    The jaxpr's inputs are parameters, frozen parameters, state, batch leaves and captured constants,
    in this order. Its outputs are the loss sum, the loss weight, the metrics' numbers and the new
    state leaves.

    Attributes:
        rows: leading dim of the batch it was traced with.
        weighted: whether the loss carries a weight of its own (else the weight is the constant 1).
        annotations: how the user says that values lie.
    """

    jaxpr: Any = field(repr=False)
    consts: tuple[Any, ...] = field(repr=False)
    leaves: tuple[Leaf, ...] = field(repr=False)
    batch_names: tuple[str, ...]
    batch_has_rows: tuple[bool, ...]
    metrics: tuple[Metric, ...]
    weighted: bool
    rows: int
    annotations: Annotations = field(default_factory=Annotations, repr=False)

    @cached_property
    def input_names(self) -> Mapping[Any, str]:
        """Input variable -> a name for messages and plans."""
        consts = [f"const {i}" for i in range(len(self.consts))]
        names = [*(leaf.name for leaf in self.leaves), *(f"batch {n}" for n in self.batch_names), *consts]
        return dict(zip(self.jaxpr.invars, names, strict=True))

    @cached_property
    def rules(self) -> RuleBook:
        """Sharding rules of the equations."""
        return RuleBook()

    @property
    def leaf_vars(self) -> list[Any]:
        return self.jaxpr.invars[: len(self.leaves)]

    @property
    def state_vars(self) -> list[Any]:
        """Variables of the state leaves, in the order of ``state_atoms``."""
        return [var for var, leaf in zip(self.leaf_vars, self.leaves, strict=True) if leaf.kind == STATE]

    @property
    def batch_vars(self) -> list[Any]:
        return self.jaxpr.invars[len(self.leaves) : len(self.leaves) + len(self.batch_names)]

    @property
    def const_vars(self) -> list[Any]:
        return self.jaxpr.invars[len(self.leaves) + len(self.batch_names) :]

    @property
    def loss_atoms(self) -> list[Any]:
        """Loss sum and weight."""
        return self.jaxpr.outvars[:2]

    @property
    def metric_atoms(self) -> list[Any]:
        return self.jaxpr.outvars[2 : 2 + sum(m.num_values for m in self.metrics)]

    @property
    def state_atoms(self) -> list[Any]:
        """New values of the state leaves, in the order of the leaves of kind ``state``."""
        return self.jaxpr.outvars[2 + sum(m.num_values for m in self.metrics) :]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names and equations; equal for equal computations under one jax version."""
        text = re.sub(r"0x[0-9a-f]+", "0x", self.jaxpr.pretty_print(use_color=False))
        names = repr([(leaf.name, leaf.kind, leaf.shape, str(leaf.dtype)) for leaf in self.leaves])
        return hashlib.blake2b((names + text).encode(), digest_size=8).hexdigest()


@quick_tracing()
def trace_loss(problem: Problem, num_microbatches: int = 1) -> Trace:
    """Trace the training loss at the size of one microbatch."""
    rows = problem.rows_of(num_microbatches)
    if rows * num_microbatches != problem.global_batch:
        raise ArenaError(f"a batch of {problem.global_batch} does not split into {num_microbatches} microbatches")
    trace = _trace(problem, problem.graphdef, rows)
    if num_microbatches == 1:  # as plans are made from; others are the same at another size
        _warn_of_unknown(trace)
    return trace


def _warn_of_unknown(trace: Trace) -> None:
    unknown = unknown_primitives(trace.jaxpr, trace.rules)
    if unknown:
        warnings.warn(
            f"every device runs all of what is not known to be divisible: {', '.join(unknown)}"
            "; arena_jax.sharding_rule describes a kernel",
            stacklevel=3,
        )


def trace_eval(problem: Problem, rows: int) -> Trace:
    """Trace the loss of the model in ``.eval()`` mode at ``rows`` rows."""
    return _trace(problem, problem.eval_graphdef, rows)


@quick_tracing()
def _trace(problem: Problem, graphdef: Any, rows: int) -> Trace:
    seen: dict[str, Any] = {}

    def flat_loss(leaf_values: list[Any], batch_values: list[Any]) -> list[Any]:
        model = _merge(problem, graphdef, leaf_values)
        batch = problem.batch_treedef.unflatten([_cast(x, problem.precision.compute) for x in batch_values])
        loss, metrics = _call_loss(problem, model, batch)
        total, weight = (loss.sum, loss.weight) if isinstance(loss, Weighted) else (loss, 1.0)
        seen["weighted"] = isinstance(loss, Weighted)
        seen["metrics"], numbers = _flatten_metrics(metrics)
        dtype = _loss_dtype(total, problem)
        new_state = _new_state(problem, model, leaf_values)
        return [jnp.asarray(total, dtype), jnp.asarray(weight, dtype), *numbers, *new_state]

    leaf_structs = [leaf.struct for leaf in problem.leaves]
    batch_structs = [leaf.struct(rows) for leaf in problem.batch]
    try:
        with _compat.under_mesh(problem.mesh), flax.core.spmd.logical_axis_rules(problem.logical_rules):
            closed = jax.make_jaxpr(flat_loss)(leaf_structs, batch_structs)
        check_effects(closed.jaxpr)
        consts = list(closed.consts)
        structs = leaf_structs + batch_structs
        with _compat.under_mesh(None):  # a plan has a mesh of its own
            if names_a_mesh(closed.jaxpr):
                closed = jax.make_jaxpr(partial(run_without_mesh, closed.jaxpr, consts))(structs)
                consts = list(closed.consts)
            flat = jax.make_jaxpr(lambda args: inline(closed.jaxpr, consts, args))(structs)
    except jax.errors.ConcretizationTypeError as error:
        raise ModelError(
            f"the loss needs a value that is not known while tracing: {str(error).splitlines()[0]}",
            hint="use jax.lax.cond or jnp.where in place of Python control flow on arrays",
        ) from error
    except flax.errors.TraceContextError as error:
        raise ModelError(
            f"the loss writes to an nnx Variable outside of its model: {str(error).partition(' (')[0]}",
            hint="make the Variable an attribute of the model, or return the value as a metric",
        ) from error
    jaxpr, flat_consts = flat.jaxpr, list(flat.consts)
    jaxpr = _constants_as_inputs(jaxpr)
    annotated = problem.annotations
    return Trace(
        jaxpr=jaxpr,
        consts=tuple(flat_consts),
        leaves=problem.leaves,
        batch_names=tuple(leaf.name for leaf in problem.batch),
        batch_has_rows=tuple(leaf.has_rows for leaf in problem.batch),
        metrics=tuple(seen["metrics"]),
        weighted=seen["weighted"],
        rows=rows,
        annotations=Annotations(
            leaves={i: annotated[leaf.name] for i, leaf in enumerate(problem.leaves) if leaf.name in annotated},
            values=required_in(jaxpr, problem.axis_rules),
        ),
    )


def inline(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    """Evaluate a jaxpr with every call inlined; under a trace this flattens it."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _compat.INLINED:
            body, body_consts = _compat.inner_jaxpr(eqn)
            outs = inline(body, body_consts, values)
        else:
            outs = _compat.bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _merge(problem: Problem, graphdef: Any, leaf_values: list[Any]) -> nnx.Module:
    states, start = [], 0
    for kind in (PARAMS, FROZEN, STATE):
        count = len(problem.of_kind(kind))
        values = leaf_values[start : start + count]
        if kind != STATE:
            values = [_cast(v, problem.precision.compute) for v in values]
        states.append(problem.treedefs[kind].unflatten(values))
        start += count
    return nnx.merge(graphdef, *states)


def _cast(value: Any, dtype: str | None) -> Any:
    if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype == jnp.dtype(dtype):
        return value
    return value.astype(dtype)


def _loss_dtype(total: Any, problem: Problem) -> Any:
    """The output dtype of the precision policy, or wider where the loss itself is wider."""
    return jnp.promote_types(jnp.dtype(problem.precision.output), jnp.asarray(total).dtype)


def _call_loss(problem: Problem, model: nnx.Module, batch: Any) -> tuple[Any, dict[str, Any]]:
    out = problem.loss_fn(model, batch)
    loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    if not isinstance(metrics, dict):
        raise ModelError(
            f"loss_fn returned a {type(metrics).__name__} beside the loss, where a dict of metrics is expected",
            hint="return loss, or (loss, {'accuracy': ...})",
        )
    parts = (loss.sum, loss.weight) if isinstance(loss, Weighted) else (loss,)
    for part in parts:
        shape, dtype = getattr(part, "shape", None), getattr(part, "dtype", None)
        if shape is None and isinstance(part, int | float):
            continue
        if shape != () or dtype is None:
            received = f"shape {shape}" if shape is not None else type(part).__name__
            raise ModelError(
                f"loss_fn must return a scalar, it returned {received}",
                hint="reduce it, e.g. loss.mean(), or return arena_jax.Weighted(loss.sum(), count)",
            )
    if not jnp.issubdtype(jnp.asarray(parts[0]).dtype, jnp.floating):
        raise ModelError(f"loss_fn must return a floating scalar, it returned {jnp.asarray(parts[0]).dtype}")
    return loss, metrics


def _flatten_metrics(metrics: dict[str, Any]) -> tuple[list[Metric], list[Any]]:
    described: list[Metric] = []
    numbers: list[Any] = []
    for name, value in sorted(metrics.items()):
        if isinstance(value, Weighted):
            kind, parts = WEIGHTED, [value.sum, value.weight]
        elif isinstance(value, Sum):
            kind, parts = SUM, [value.value]
        elif isinstance(value, Last):
            kind, parts = LAST, [value.value]
        else:
            kind, parts = MEAN, [value]
        for part in parts:
            if not hasattr(part, "dtype") and not isinstance(part, int | float):
                raise ModelError(
                    f"metric {name!r} is {type(part).__name__}, metrics are numbers",
                    hint="return arrays without dims, Weighted(sum, weight), Sum or Last",
                )
            if jnp.shape(part) != ():
                raise ModelError(
                    f"metric {name!r} has shape {jnp.shape(part)}, metrics are scalars",
                    hint="reduce it, or return Weighted(sum, weight), Sum or Last",
                )
        described.append(Metric(name=name, kind=kind))
        numbers.extend(
            jax.lax.stop_gradient(jnp.asarray(p, jnp.promote_types(jnp.result_type(p), "float32"))) for p in parts
        )
    return described, numbers


def _new_state(problem: Problem, model: nnx.Module, leaf_values: list[Any]) -> list[Any]:
    """New values of the state leaves, matched by path; writes to parameters are refused by name."""
    paths = jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]
    after = {path_name(path): value for path, value in paths}
    out = []
    for leaf, before in zip(problem.leaves, leaf_values, strict=True):
        if leaf.name not in after:
            raise ModelError(f"the loss removed {leaf.name!r} from the model")
        value = after[leaf.name]
        if leaf.kind == STATE:
            if value.shape != before.shape:
                raise ModelError(f"the loss changed the shape of {leaf.name!r}: {before.shape} to {value.shape}")
            out.append(value if leaf.is_key or value.dtype == leaf.dtype else value.astype(leaf.dtype))
    return out


def _constants_as_inputs(jaxpr: Any) -> Any:
    """Move captured constants behind the inputs, so that a stage takes only those it uses."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
