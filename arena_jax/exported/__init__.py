"""Source that ``Plan.export`` writes out. It imports jax and nothing of this package."""
