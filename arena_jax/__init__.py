"""Plans for every grid of devices, compiled from a Flax model's training step.

This module only re-exports. Names are imported on first use, so ``import arena_jax`` is cheap and
imports no jax; ``from arena_jax import fit`` does.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arena_jax.closure import submit as submit
    from arena_jax.compiler.rules.kernels import sharding_rule as sharding_rule
    from arena_jax.errors import ArenaError as ArenaError
    from arena_jax.errors import CheckpointError as CheckpointError
    from arena_jax.errors import DataError as DataError
    from arena_jax.errors import InfeasibleError as InfeasibleError
    from arena_jax.errors import ModelError as ModelError
    from arena_jax.errors import NonFiniteLossError as NonFiniteLossError
    from arena_jax.errors import PlanError as PlanError
    from arena_jax.errors import RecipeError as RecipeError
    from arena_jax.errors import UsageError as UsageError
    from arena_jax.fit import CheckpointOptions as CheckpointOptions
    from arena_jax.fit import FitResult as FitResult
    from arena_jax.fit import compile as compile
    from arena_jax.fit import fit as fit
    from arena_jax.fit import plan as plan
    from arena_jax.grid import Allocation as Allocation
    from arena_jax.grid import GridShape as GridShape
    from arena_jax.grid import Plan as Plan
    from arena_jax.grid import PlanIndex as PlanIndex
    from arena_jax.grid import Precision as Precision
    from arena_jax.recipe import Recipe as Recipe
    from arena_jax.recipe import load_recipe as load_recipe
    from arena_jax.values import Last as Last
    from arena_jax.values import Sum as Sum
    from arena_jax.values import Weighted as Weighted

__version__ = "0.1.0"

_HOME_OF = {
    name: module
    for module, names in {
        "arena_jax.compiler.rules.kernels": ("sharding_rule",),
        "arena_jax.closure": ("submit",),
        "arena_jax.errors": (
            "ArenaError",
            "CheckpointError",
            "DataError",
            "InfeasibleError",
            "ModelError",
            "NonFiniteLossError",
            "PlanError",
            "RecipeError",
            "UsageError",
        ),
        "arena_jax.fit": ("CheckpointOptions", "FitResult", "compile", "fit", "plan"),
        "arena_jax.grid": ("Allocation", "GridShape", "Plan", "PlanIndex", "Precision"),
        "arena_jax.recipe": ("Recipe", "load_recipe"),
        "arena_jax.values": ("Last", "Sum", "Weighted"),
    }.items()
    for name in names
}

__all__ = [*_HOME_OF]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'arena_jax' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``arena_jax.fit`` the function: importing the submodule would put the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _HOME_OF:
            return  # `__getattr__` fetches the public name from it when asked
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
