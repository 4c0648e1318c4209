"""Waiting for what an executor does."""

import time
from collections.abc import Callable

from arena_jax.service.executor import Executor, Heartbeat
from arena_jax.service.job import Job


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def ended(executor: Executor, job: Job) -> Heartbeat:
    """Its heartbeat when it has ended."""
    until(lambda: not executor.heartbeat(job).alive)
    return executor.heartbeat(job)
