"""What a forward program hands to its backward program, and what need not be handed over.

A forward program returns what its backward needs as plain arrays, one set for each microbatch in flight. What is
an input is looked up again, and what a few views of fixed inputs or of nothing make (parameters as they are cast,
laid out and spread; masks, zeros) is made again, so that no microbatch holds a copy of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import partial_eval

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import ELEMENTWISE
from arena_jax.compiler.trace import inline

# Made again from what they look at for less than keeping the result costs.
_VIEWS = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev"}
    | {"sharding_constraint", "copy"}
)
# Of constants.
_OF_NOTHING = _VIEWS | ELEMENTWISE | {"iota"}


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """A forward pass with its linearisation, split into what runs forward and what the backward pass gets.

    Attributes:
        forward: flat inputs -> ``(results, kept arrays)``.
        from_inputs: positions of the inputs that the backward pass takes.
        linearisation: ``(kept arrays, those inputs)`` -> what ``run`` returned as such.
    """

    forward: Callable[..., tuple[Any, list[Any]]]
    from_inputs: tuple[int, ...]
    linearisation: Callable[[Sequence[Any], Sequence[Any]], Any]


def hand_over(run: Callable[..., tuple[Any, Any]], structs: Sequence[Any], *, lasting: int, fixed: int) -> HandOver:
    """Split ``run``, a function of flat inputs that returns ``(results, linearisation)``, both pytrees.

    Args:
        structs: of the inputs.
        lasting: the first so many inputs are there when the backward pass runs.
        fixed: the first so many of these are the same for all microbatches of a step.
    """
    closed, (result_structs, leaf_structs) = jax.make_jaxpr(run, return_shape=True)(*structs)
    flat = jax.make_jaxpr(lambda *args: inline(closed.jaxpr, list(closed.consts), list(args)))(*structs)
    jaxpr, consts = flat.jaxpr, list(flat.consts)
    results: Any = jax.tree.structure(result_structs)
    leaves: Any = jax.tree.structure(leaf_structs)
    outs, needed = jaxpr.outvars[: results.num_leaves], jaxpr.outvars[results.num_leaves :]
    again = _made_again(jaxpr, jaxpr.invars[:fixed])
    inputs = {var: i for i, var in enumerate(jaxpr.invars[:lasting])}
    kept = list(dict.fromkeys(a for a in needed if _is_var(a) and a not in again and a not in inputs))
    remade = list(dict.fromkeys(a for a in needed if _is_var(a) and a in again))
    small, used = partial_eval.dce_jaxpr(_with_outputs(jaxpr, remade), [True] * len(remade))
    looked_up = {inputs[a] for a in needed if _is_var(a) and a in inputs}
    from_inputs = tuple(i for i, is_used in enumerate(used) if is_used or i in looked_up)
    whole = _with_outputs(jaxpr, [*outs, *kept])

    def forward(*args: Any) -> tuple[Any, list[Any]]:
        values = jax.core.eval_jaxpr(whole, consts, *args)
        return results.unflatten(values[: len(outs)]), values[len(outs) :]

    def linearisation(arrays: Sequence[Any], taken: Sequence[Any]) -> Any:
        given = dict(zip(from_inputs, taken, strict=True))
        made = jax.core.eval_jaxpr(small, consts, *(given[i] for i, is_used in enumerate(used) if is_used))
        known = dict(zip(kept, arrays, strict=True)) | dict(zip(remade, made, strict=True))
        known |= {jaxpr.invars[i]: value for i, value in given.items()}
        return leaves.unflatten([known[a] if _is_var(a) else a.val for a in needed])

    return HandOver(forward=forward, from_inputs=from_inputs, linearisation=linearisation)


def _made_again(jaxpr: Any, fixed: Sequence[Any]) -> set[Any]:
    """Values that views of fixed inputs make, or few operations of nothing."""
    of_nothing: set[Any] = set(jaxpr.constvars)
    views: set[Any] = set(fixed)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = {a for a in eqn.invars if _is_var(a)}
        if name in _OF_NOTHING and operands <= of_nothing:
            of_nothing.update(eqn.outvars)
        elif name in _VIEWS and operands <= views:
            views.update(eqn.outvars)
    return of_nothing | (views - set(fixed))


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, _compat.Literal)


def _with_outputs(jaxpr: Any, atoms: Sequence[Any]) -> Any:
    """The jaxpr with other outputs."""
    return jaxpr.replace(outvars=list(atoms), debug_info=jaxpr.debug_info.with_unknown_names())
