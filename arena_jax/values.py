"""What a loss function may return besides a plain number, and how microbatches combine it.

A plain scalar is averaged over the microbatches. The types below say otherwise. They are pytrees,
so they pass through ``jit``, ``grad(has_aux=True)`` and ``scan`` like any array. This module imports
jax because registering them needs it; ``arena_jax`` itself loads it only when one is asked for.
"""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A mean with a normaliser of its own, as for masked tokens or padding.

    Sums and weights are added up over all microbatches and divided once at the end, so the value
    does not depend on how many microbatches there are.

    Attributes:
        sum: scalar, the sum of the weighted values.
        weight: scalar, the sum of the weights. It carries no gradient.
    """

    sum: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A metric that is added up over the microbatches, such as a count of tokens."""

    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Last:
    """A metric of which the last microbatch's value is reported, such as a running statistic."""

    value: Any
