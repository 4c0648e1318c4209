"""What a training run measured, kept beside the profiles so that the next estimates err less."""

import os
import statistics
import time
from collections.abc import Sequence

import jax

from arena_jax import home
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.profiling.profiler import environment_of
from arena_jax.errors import ArenaError
from arena_jax.grid import Estimate, Plan, Profile, ProfileStore

# Steps that a run must have for its median to say something of its plan.
LEAST_STEPS = 50


def keep_run(plan: Plan, estimate: Estimate | None, step_times_s: Sequence[float]) -> bool:
    """Keep the median step of a run beside what was estimated; whether there was enough to keep.

    One record is kept for a plan and environment. Nothing is kept of short runs, of plans without an estimate, or
    where the store cannot be written, for training goes on without it.
    """
    if estimate is None or len(step_times_s) < LEAST_STEPS:
        return False
    hardware = hardware_of(plan.grid.allocation)
    measured = estimate.measured_share >= 0.5
    device = jax.devices()[0]
    cores = os.cpu_count() if device.platform == "cpu" else None
    run = Profile(
        device_type=hardware.device.name,
        kind="run",
        piece={"plan": plan.plan_id, "grid": str(plan.grid)},
        environment=environment_of(device, cores) | {"estimate": "measured" if measured else "computed"},
        seconds=statistics.median(step_times_s),
        computed_s=estimate.step_time_s,
        num_repeats=len(step_times_s),
        measured_at=time.time(),
        # As it would have been had nothing been learnt before.
        parts={
            cause: seconds / hardware.learnt(cause, measured=measured) for cause, seconds in estimate.breakdown.items()
        },
    )
    try:
        ProfileStore(home.profiles()).put([run])
    except ArenaError:
        return False
    return True
