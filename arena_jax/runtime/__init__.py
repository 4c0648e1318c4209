"""Running plans: programs, the training loop, checkpoints."""

from arena_jax.runtime.lower import compile_program as compile_program
from arena_jax.runtime.program import Program as Program
