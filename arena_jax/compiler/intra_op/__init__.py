"""Intra-op: how the operations of a program are sharded over a logical mesh of dp and tp."""
