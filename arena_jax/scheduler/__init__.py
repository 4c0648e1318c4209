"""Cluster scheduling: policies and a simulator. Needs no jax."""
