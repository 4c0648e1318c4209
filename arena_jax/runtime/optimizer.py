"""The optimizer step as one flat function, the same for every plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from arena_jax.compiler import _compat
from arena_jax.compiler.problem import PARAMS, Problem
from arena_jax.errors import ModelError

Arrays = list[Any]


def flat_update(
    problem: Problem, *, skip_nonfinite: bool
) -> Callable[[Arrays, Any, Any, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Return ``update(gradient_sums, weight, loss_sum, optimizer_leaves, parameters)``.

    Gradients are sums over microbatches in the accumulation dtype; they are divided by ``weight``
    once and handed to optax in the parameters' dtypes. With ``skip_nonfinite`` a step whose loss or
    gradients are not finite leaves parameters and optimizer state as they were.
    """
    params_treedef: Any = problem.treedefs[PARAMS]
    optimizer_treedef: Any = jax.tree.structure(problem.optimizer_struct)

    def update(
        gradient_sums: Arrays, weight: Any, loss_sum: Any, optimizer: Arrays, params: Arrays
    ) -> tuple[Arrays, Arrays]:
        gradients = [(g / weight.astype(g.dtype)).astype(p.dtype) for g, p in zip(gradient_sums, params, strict=True)]
        old_params = params_treedef.unflatten(params)
        old_optimizer = optimizer_treedef.unflatten(optimizer)
        try:
            updates, new_optimizer = problem.optimizer.update(
                params_treedef.unflatten(gradients), old_optimizer, old_params
            )
        except TypeError as error:
            raise ModelError(
                f"the optimizer's update needs more than gradients, state and parameters: {error}",
                hint="transforms that need the loss value or a line search are not supported; "
                "drive them with your own loop over program.grad_step",
            ) from error
        new_params = jax.tree.leaves(optax.apply_updates(old_params, updates))
        leaves = jax.tree.leaves(new_optimizer)
        leaves = [
            new.astype(old.dtype) if new.dtype != old.dtype else new for new, old in zip(leaves, optimizer, strict=True)
        ]
        if skip_nonfinite:
            finite = jnp.isfinite(loss_sum)
            for g in gradients:
                finite &= jnp.isfinite(jnp.sum(g.astype("float32")))
            new_params = [jnp.where(finite, n, o) for n, o in zip(new_params, params, strict=True)]
            leaves = [jnp.where(finite, n, o) for n, o in zip(leaves, optimizer, strict=True)]
        return new_params, leaves

    return update


def check_optimizer(problem: Problem, loss_dtype: Any = "float32", *, skip_nonfinite: bool = False) -> Any:
    """Trace the update abstractly, so that what optax refuses is refused before anything compiles.

    Returns:
        The closed jaxpr of :func:`flat_update`.
    """
    params = [leaf.struct for leaf in problem.of_kind(PARAMS)]
    sums = [jax.ShapeDtypeStruct(p.shape, problem.accumulation_dtype(p.dtype)) for p in params]
    optimizer = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(problem.optimizer_struct)]
    scalar = jax.ShapeDtypeStruct((), loss_dtype)
    try:
        return jax.make_jaxpr(flat_update(problem, skip_nonfinite=skip_nonfinite))(
            sums, scalar, scalar, optimizer, params
        )
    except (ModelError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ModelError(f"the optimizer's update failed on these parameters: {error}") from error


def optimizer_owners(problem: Problem, jaxpr: Any) -> tuple[int | None, ...]:
    """For every optimizer leaf the parameter whose update it serves, or ``None`` for shared ones.

    Found by data flow through :func:`flat_update`'s jaxpr: a leaf belongs to the parameter whose
    gradient reaches its new value through the largest operand of every equation on the way.
    """
    count = len(problem.of_kind(PARAMS))
    num_leaves = len(jax.tree.leaves(problem.optimizer_struct))
    invars = jaxpr.invars
    gradients = invars[:count]
    optimizer = invars[count + 2 : count + 2 + num_leaves]
    params = invars[count + 2 + num_leaves :]
    owner: dict[Any, int] = {}
    for i in range(count):
        owner[gradients[i]] = owner[params[i]] = i
    outs = _flow(jaxpr, owner)
    return tuple(outs[count + k] if leaf.aval.shape else None for k, leaf in enumerate(optimizer))


def _flow(jaxpr: Any, owner: dict[Any, int]) -> list[int | None]:
    for eqn in jaxpr.eqns:
        owned = [(a.aval.size, owner[a]) for a in eqn.invars if not isinstance(a, _compat.Literal) and a in owner]
        if eqn.primitive.name in _compat.INLINED:
            body = _compat.inner_jaxpr(eqn)[0]
            inner = {
                v: owner[a]
                for v, a in zip(body.invars, eqn.invars, strict=True)
                if not isinstance(a, _compat.Literal) and a in owner
            }
            outs = _flow(body, inner)
        elif eqn.primitive.name == "cond":
            body = _compat.open_jaxpr(eqn.params["branches"][-1])[0]
            inner = {
                v: owner[a]
                for v, a in zip(body.invars, eqn.invars[1:], strict=True)
                if not isinstance(a, _compat.Literal) and a in owner
            }
            outs = _flow(body, inner)
        else:
            best = max(owned, key=lambda pair: pair[0])[1] if owned else None
            outs = [best] * len(eqn.outvars)
        for var, who in zip(eqn.outvars, outs, strict=True):
            if who is not None:
                owner[var] = who
    return [None if isinstance(a, _compat.Literal) else owner.get(a) for a in jaxpr.outvars]
