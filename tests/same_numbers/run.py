"""Run one case and compare it with one device."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from arena_jax.compiler import Analysis, analyse, make_problem
from arena_jax.compiler.inter_op.stage_cost import Option
from arena_jax.compiler.inter_op.stage_plan import stage_plan
from arena_jax.grid import GridShape, Plan, Precision
from arena_jax.job import Job, build
from arena_jax.recipe import load_recipe
from arena_jax.runtime import Program, compile_program
from arena_jax.runtime.layout import leaf_names
from arena_jax.values import Weighted
from tests.same_numbers.cases import GLOBAL_BATCH, SMALL, Case
from tests.same_numbers.oracle import Run, name_of, perturbation, train

NUM_STEPS = 10


@dataclass(frozen=True)
class Setup:
    """A variation of a recipe, ready to be planned and to be trained by the oracle."""

    job: Job
    optimizer: Any
    loss_fn: Any
    trainable: Any
    precision: Precision
    batches: list[Any]
    problem: Any
    analysis: Analysis


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from one device."""

    losses: float
    first_loss: float
    first_gradient: float
    parameters: float
    worst_parameter: str


def precision_of(name: str) -> Precision:
    if name == "float64":
        return Precision(parameter="float64", compute="float64", accumulation="float64", output="float64")
    return Precision(compute=name) if name == "bfloat16" else Precision()


@cache
def setup(model: str, variation: str, precision_name: str, num_blocks: int | None = None) -> Setup:
    overrides = [*SMALL[model], f"global_batch={GLOBAL_BATCH}"]
    if num_blocks is not None:
        overrides.append(f"model.num_layers={num_blocks}")
    model_overrides = {
        "dropout": ["model.dropout=0.1"],
        "scan": ["model.scan_layers=true"],
        "model-remat": ["model.remat=true"],
        "untied": ["model.tie_embeddings=false"],
    }
    overrides += model_overrides.get(variation, [])
    precision = precision_of(precision_name)
    if precision_name == "float64":
        overrides += [f"precision.{key}=float64" for key in ("parameter", "compute", "accumulation", "output")]
        # optax's schedules compute in float32, where one fused multiply-add is worth 1e-8 of the rate.
        overrides += ["optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    job = build(load_recipe(f"{model}_tiny", overrides))
    optimizer, loss_fn, trainable = job.optimizer, job.loss_fn, None
    if precision_name != "float64" and model != "wide_resnet":
        # Adam turns a gradient that is zero but for rounding into noise of its own size.
        optimizer = optax.sgd(0.1, momentum=0.9)
    if variation == "clip":
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
    elif variation == "multisteps":
        optimizer = optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)), 2
        ).gradient_transformation()
    elif variation == "apply_if_finite":
        optimizer = optax.apply_if_finite(optax.adamw(1e-3), 3)
    elif variation == "masked":
        optimizer = optax.multi_transform(
            {"matrix": optax.adamw(1e-3), "other": optax.sgd(1e-2, momentum=0.9)},
            lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params),
        )
    elif variation == "adafactor":
        # With its default eps of 1e-30 the zero gradient of attention key biases becomes noise of full size.
        optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16, eps=1e-12)
    elif variation == "frozen":

        def trainable(path: Any, value: Any) -> bool:
            return "embedding" not in path

    elif variation == "weighted":
        loss_fn = weighted_loss
    source = job.make_data()
    batches = [next(source) for _ in range(NUM_STEPS)]
    problem = make_problem(
        job.make_model, optimizer, loss_fn, batches[0], precision=precision, trainable=trainable, seed=job.seed
    )
    return Setup(job, optimizer, loss_fn, trainable, precision, batches, problem, analyse(problem))


def weighted_loss(model: nnx.Module, batch: Any) -> Weighted:
    """Cross entropy of the tokens whose id is odd: another number of them in every microbatch."""
    logits = model(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    mask = (batch["targets"] % 2).astype(loss.dtype)
    return Weighted(jnp.sum(loss * mask), jnp.sum(mask))


@cache
def oracle(
    model: str, variation: str, precision_name: str, num_microbatches: int, num_blocks: int | None = None
) -> Run:
    s = setup(model, variation, precision_name, num_blocks)
    return train(
        s.job.make_model,
        s.optimizer,
        s.loss_fn,
        s.batches,
        num_microbatches=num_microbatches,
        seed=s.job.seed,
        parameter_dtype=s.precision.parameter,
        compute_dtype=s.precision.compute,
        accumulation_dtype=s.precision.accumulation,
        trainable=s.trainable,
    )


def make_plan(case: Case) -> Plan:
    """The case's stages with even cuts, sharded as the search would."""
    analysis = setup(case.model, case.variation, case.precision, case.num_blocks).analysis
    count = analysis.layers.num_layers
    num_stages = len(case.stages)
    cuts = [round(i * count / num_stages) for i in range(num_stages + 1)]
    return Plan(
        model_fingerprint=analysis.trace.fingerprint,
        global_batch=GLOBAL_BATCH,
        grid=GridShape.parse(f"{case.grid}/s{num_stages}"),
        num_microbatches=case.num_microbatches,
        precision=analysis.problem.precision,
        stages=tuple(
            stage_plan(
                analysis,
                layers=(cuts[i], cuts[i + 1] - 1),
                submesh=submesh,
                sharding=analysis.shardings.find(dp, tp),
                option=Option(zero=case.zero, remat=case.remat),
            )
            for i, (submesh, dp, tp) in enumerate(case.stages)
        ),
    )


def compiled(case: Case) -> Program:
    return compile_program(setup(case.model, case.variation, case.precision, case.num_blocks).problem, make_plan(case))


@cache
def perturbed_tree(
    model: str, variation: str, precision_name: str, num_blocks: int | None = None
) -> dict[str, np.ndarray]:
    """The initial state with the oracle's noise on every trainable parameter, made once for all plans."""
    problem = setup(model, variation, precision_name, num_blocks).problem
    values = jax.jit(lambda: problem.make_values(nnx.Rngs(problem.seed)))()
    tree: dict[str, np.ndarray] = {"step": np.asarray(0, np.int32)}
    params = []
    for leaf, name, value in zip(problem.leaves, leaf_names(problem), values, strict=True):
        array = np.asarray(jax.random.key_data(value) if leaf.is_key else value)
        if leaf.kind == "params":
            array = array + perturbation(leaf.name, array.shape).astype(array.dtype)
            params.append(jnp.asarray(array))
        tree[name] = array
    state = jax.jit(problem.optimizer.init)(problem.treedefs["params"].unflatten(params))
    for name, value in zip(problem.optimizer_names, jax.tree.leaves(state), strict=True):
        tree[f"opt/{name}"] = np.asarray(value)
    return tree


def perturbed_state(program: Program, case: Case) -> Any:
    """The perturbed initial state under a program's plan."""
    return program.load_tree(perturbed_tree(case.model, case.variation, case.precision, case.num_blocks))


def run(case: Case) -> Difference:
    """Train under the case's plan and compare with the oracle."""
    s = setup(case.model, case.variation, case.precision, case.num_blocks)
    reference = oracle(case.model, case.variation, case.precision, case.num_microbatches, case.num_blocks)
    program = compiled(case)
    state = perturbed_state(program, case)
    gradient: dict[str, Any] = {}
    if case.precision != "float64":
        gradient, _ = program.grad_step(state, s.batches[0])
    losses = []
    for batch in s.batches:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    tree = program.save_tree(state)
    params = {n.partition("/")[2]: np.asarray(v) for n, v in tree.items() if n.startswith("params/")}
    assert params.keys() == reference.parameters.keys()
    loss_errors = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, reference.losses, strict=True)]
    errors = {name: relative(params[name], reference.parameters[name]) for name in params}
    worst = max(errors, key=lambda name: errors[name])
    gradients = [relative(np.asarray(g), reference.first_gradient[n.partition("/")[2]]) for n, g in gradient.items()]
    return Difference(
        losses=max(loss_errors),
        first_loss=loss_errors[0],
        first_gradient=max(gradients, default=0.0),
        parameters=errors[worst],
        worst_parameter=worst,
    )


def relative(value: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference over the leaf's norm, with a floor of one on that norm."""
    a, b = value.astype(np.float64), reference.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1.0))


__all__ = ["Difference", "compiled", "make_plan", "name_of", "oracle", "perturbed_state", "run", "setup"]
