"""Jobs that span processes: who starts them, watches them and starts them anew. No jax before a worker runs."""
