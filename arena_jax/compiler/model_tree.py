"""Models that are pure functions of a tree of arrays, as Linen's ``apply`` and many libraries have them.

Such a tree is trained as an nnx module whose every array is an ``nnx.Param``; the loss sees the tree.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class ParameterTree(nnx.Module):
    """A tree of arrays as a module: a leaf at ``["params"]["kernel"]`` is the parameter ``params/kernel``."""

    def __init__(self, tree: Any) -> None:
        self.tree = nnx.data(jax.tree.map(nnx.Param, tree))

    @property
    def arrays(self) -> Any:
        """The tree as it was given, with the module's present values."""
        return jax.tree.map(lambda variable: variable[...], self.tree, is_leaf=_is_variable)


def is_array_tree(value: Any) -> bool:
    """Whether a value is a tree of arrays, at least one of them (concrete, traced or abstract)."""
    if isinstance(value, nnx.Module | nnx.Variable):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def loss_of_tree(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss of a tree as a loss of its module."""

    def loss(module: Any, batch: Any) -> Any:
        return loss_fn(module.arrays, batch)

    return loss


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)
