"""Sharding rules of primitives, one module per family; :mod:`arena_jax.compiler.dims` looks them up."""
