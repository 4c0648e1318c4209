"""Solvers of the plan search behind one interface: ``highs``, ``alpa``, or ``both`` compared."""

from arena_jax.compiler.engines.engine import ENGINES as ENGINES
from arena_jax.compiler.engines.engine import Comparison as Comparison
from arena_jax.compiler.engines.engine import Engine as Engine
from arena_jax.compiler.engines.engine import available_engine as available_engine
from arena_jax.compiler.engines.engine import check_engine as check_engine
from arena_jax.compiler.engines.engine import engine as engine
from arena_jax.compiler.engines.problem import StrategyProblem as StrategyProblem
from arena_jax.compiler.engines.problem import StrategySolution as StrategySolution
from arena_jax.compiler.engines.stages import StageProblem as StageProblem
from arena_jax.compiler.engines.stages import StageSolution as StageSolution
