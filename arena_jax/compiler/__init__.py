"""From a Flax model to plans: trace, layers, sharding, stages, estimates."""

from arena_jax.compiler.analysis import Analysis as Analysis
from arena_jax.compiler.analysis import Constraints as Constraints
from arena_jax.compiler.analysis import analyse as analyse
from arena_jax.compiler.problem import Problem as Problem
from arena_jax.compiler.problem import make_problem as make_problem
from arena_jax.compiler.search import plan_problem as plan_problem
