"""arena_jax."""
