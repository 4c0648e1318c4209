"""Running plans: programs, the training loop, checkpoints."""

from arena_jax.runtime.program import Program as Program
from arena_jax.runtime.program import compile_program as compile_program
