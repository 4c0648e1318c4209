"""What a process sets before jax looks for devices, and how many of them a run will need. Imports jax when asked to."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from arena_jax.grid import Allocation, GridShape, Plan, parse_target

if TYPE_CHECKING:
    from arena_jax.recipe import Recipe


def take_type(recipe: "Recipe", plan: Plan | None) -> None:
    """Let this process stand for the virtual CPU type that the run begins on, unless the environment says one."""
    from arena_jax.device_type import ENV_TYPE
    from arena_jax.grid import CATALOGUE

    target = plan.grid if plan is not None else recipe.plan.grid and parse_target(recipe.plan.grid)
    if not target or os.environ.get(ENV_TYPE):
        return
    row = CATALOGUE[target.allocation.device_type]
    if row.platform == "cpu" and row.name != "cpu":
        os.environ[ENV_TYPE] = row.name


def cpu_devices_needed(recipe: "Recipe", devices: int | None, plan: Plan | None) -> int:
    """How many virtual devices a CPU must be split into: as many as anything in the run will ask for.

    A type whose devices have cores of their own gets no more than it starts with: growing takes another process.
    """
    from arena_jax.device_type import cpu_type

    if cpu_type().threads is not None:
        if plan is not None:
            return plan.grid.num_devices
        return devices or (1 if recipe.plan.grid is None else parse_target(recipe.plan.grid).num_devices)
    wanted = [devices or recipe.cpu_devices]
    if recipe.hook.file or recipe.hook.socket not in ("auto", "off"):  # so that the run can grow
        wanted.append(recipe.cpu_devices)
    if plan is not None:
        wanted.append(plan.grid.num_devices)
    if recipe.plan.grid is not None:
        wanted.append(parse_target(recipe.plan.grid).num_devices)
    if recipe.hook.script:
        from arena_jax.runtime.hooks import read_script

        targets = [request.target for _, request in read_script(recipe.hook.script)]
        grids = [target for target in targets if isinstance(target, GridShape | Allocation)]
        wanted += [grid.num_devices for grid in grids if grid.allocation.device_type == "cpu"]
    return max(wanted)


def start_jax(num_cpu_devices: int) -> None:
    """Set what has to be set before jax first looks for devices.

    A device count that the environment gives stays. Harmless where there is an accelerator.
    """
    import jax

    from arena_jax import home
    from arena_jax.cpu_memory import keep_freed_memory
    from arena_jax.device_type import cpu_type, take_cores

    keep_freed_memory()
    take_cores(num_cpu_devices)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Refused where jax is running already, as in a notebook; then there are as many as there are.
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        device_type = cpu_type()
        own = "" if device_type.threads is None else device_type.name
        jax.config.update("jax_compilation_cache_dir", str(home.compile_cache(own)))
        # By default jax stores only what took long to compile; a pipeline is many small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start_jax_to_plan() -> None:
    """Plan on the CPU whatever there is: planning needs no accelerator and should not take its memory."""
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        with suppress(RuntimeError):  # jax is running already
            jax.config.update("jax_platforms", "cpu")
