"""Solvers of the plan search behind one interface."""

from arena_jax.compiler.engines.problem import StrategyProblem, StrategySolution

__all__ = ["StrategyProblem", "StrategySolution"]
