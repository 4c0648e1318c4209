"""Train a stranger under a plan and on one device, and say how far the losses are apart."""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from arena_jax.compiler import Constraints, _compat, make_problem
from arena_jax.compiler.dims import unknown_primitives
from arena_jax.compiler.model_tree import ParameterTree, is_array_tree, loss_of_tree
from arena_jax.compiler.trace import trace_loss
from arena_jax.grid import GridShape, Plan, Precision
from arena_jax.planner import Planner, choose
from arena_jax.runtime.layout import leaf_names
from tests.same_numbers.oracle import Run, perturbation, train
from tests.strangers.models import Stranger

NUM_STEPS = 3
# name -> grid and pins.
LAYOUTS: dict[str, tuple[str, Constraints]] = {
    "tp=2": ("cpu:2/s1", Constraints(dp=1, tp=2)),
    "dp=2": ("cpu:2/s1", Constraints(dp=2, tp=1)),
    "2 stages": ("cpu:2/s2", Constraints()),
}
FLOAT64 = Precision(parameter="float64", compute="float64", accumulation="float64", output="float64")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A stranger under one layout.

    Attributes:
        losses, reference: per step, under the plan and on one device.
        difference: largest relative difference of a loss.
        parameters: largest relative difference of a parameter after the last step.
        moved: largest relative change of the loss on one device over the steps.
        sharded: parameters that some device holds only a part of, as a share of all elements.
        whole: the other parameters of two dims or more, largest first.
    """

    plan: Plan
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    difference: float
    parameters: float
    worst_parameter: str
    moved: float
    sharded: float
    whole: tuple[str, ...]


def optimizer() -> optax.GradientTransformation:
    # A wide epsilon, so that a gradient that is zero but for rounding is not scaled up to a full step.
    return optax.adamw(3e-3, eps=1e-4)


@cache
def problem(s: Stranger) -> Any:
    return make_problem(s.model, optimizer(), s.loss_fn, s.batches(1)[0], precision=FLOAT64)


@cache
def oracle(s: Stranger) -> Run:
    """One device, without the compiler or the runtime."""
    tree = is_array_tree(jax.eval_shape(lambda: _value(s.model(nnx.Rngs(0)))))

    def module(rngs: nnx.Rngs) -> nnx.Module:
        made = s.model(rngs)
        return ParameterTree(made) if is_array_tree(made) else made

    return train(
        module,
        optimizer(),
        loss_of_tree(s.loss_fn) if tree else s.loss_fn,
        s.batches(NUM_STEPS),
        num_microbatches=s.num_microbatches,
        parameter_dtype="float64",
        compute_dtype="float64",
        accumulation_dtype="float64",
    )


def _value(made: Any) -> Any:
    return jnp.zeros(()) if is_array_tree(made) else ()


@cache
def perturbed(s: Stranger) -> dict[str, np.ndarray]:
    """Initial state with the oracle's noise on every parameter, so that no zero head hides an error."""
    p = problem(s)
    values = jax.jit(lambda: p.make_values(nnx.Rngs(p.seed)))()
    tree: dict[str, np.ndarray] = {"step": np.asarray(0, np.int32)}
    params = []
    for leaf, key, value in zip(p.leaves, leaf_names(p), values, strict=True):
        array = np.asarray(jax.random.key_data(value) if leaf.is_key else value)
        if leaf.kind == "params":
            array = array + perturbation(leaf.name, array.shape).astype(array.dtype)
            params.append(jnp.asarray(array))
        tree[key] = array
    state = jax.jit(p.optimizer.init)(p.treedefs["params"].unflatten(params))
    for key, value in zip(p.optimizer_names, jax.tree.leaves(state), strict=True):
        tree[f"opt/{key}"] = np.asarray(value)
    return tree


def compare(s: Stranger, layout: str) -> Comparison:
    """Plan, compile and train a stranger under a layout, and compare with one device.

    Raises:
        ArenaError: what cannot be planned, in the planner's own words.
    """
    grid, constraints = LAYOUTS[layout]
    planner = Planner(problem(s), constraints=constraints, num_microbatches=s.num_microbatches)
    target = GridShape.parse(grid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = planner.compile(choose(planner.search(target), target)).program
    state = program.load_tree(perturbed(s))
    losses = []
    for batch in s.batches(NUM_STEPS):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    reference = oracle(s)
    tree = program.save_tree(state)
    errors = {}
    for key, value in reference.parameters.items():
        scale = max(float(np.linalg.norm(value)), 1.0)
        errors[key] = float(np.linalg.norm(np.asarray(tree[f"params/{key}"]) - value)) / scale
    worst = max(errors, key=lambda key: errors[key])
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True)]
    return Comparison(
        plan=program.plan,
        losses=tuple(losses),
        reference=tuple(reference.losses),
        difference=max(differences),
        parameters=errors[worst],
        worst_parameter=worst,
        moved=max(abs(x / reference.losses[0] - 1) for x in reference.losses),
        **_sharded(program.plan, s),
    )


def _sharded(plan: Plan, s: Stranger) -> dict[str, Any]:
    """Share of the parameters that some stage holds in parts, and the names of the large others."""
    sizes = {leaf.name: int(np.prod(leaf.shape)) for leaf in problem(s).leaves if leaf.kind == "params"}
    matrices = {leaf.name for leaf in problem(s).leaves if leaf.kind == "params" and len(leaf.shape) > 1}
    parts = {
        key.partition("[")[0]
        for stage in plan.stages
        for key, spec in stage.parameters.items()
        if any(axis is not None for axis in spec)
    }
    whole = sorted(matrices - parts, key=lambda key: -sizes[key])
    return {"sharded": sum(sizes[key] for key in parts) / sum(sizes.values()), "whole": tuple(whole)}


def describe(s: Stranger) -> dict[str, Any]:
    """What the table says of a model besides how it trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jaxpr = trace_loss(problem(s), 1).jaxpr
    return {
        "name": s.name,
        "kind": s.kind,
        "version": version(s.package),
        "equations": _num_equations(jaxpr),
        "unknown": unknown_primitives(jaxpr),
    }


def _num_equations(jaxpr: Any) -> int:
    """Equations, those inside scans and calls included."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        with suppress(KeyError):
            total += _num_equations(_compat.inner_jaxpr(eqn)[0])
    return total
