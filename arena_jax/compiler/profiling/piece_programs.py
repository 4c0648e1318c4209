"""Pieces as compiled programs with their inputs at hand, ready to be run over and over."""

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from arena_jax.compiler._compat import is_key
from arena_jax.compiler.cost.pieces import FORWARD
from arena_jax.compiler.problem import Problem
from arena_jax.compiler.profiling.layer_programs import LayerProgram, update_inputs, updated

Run = Callable[[], None]
# Collectives in one program, so that issuing it is a small part of its time.
CHAIN = 8
# Arguments of the empty program whose issue is timed: about what a stage's program takes.
_ARGUMENTS = 16


def layer_run(program: LayerProgram, direction: str) -> Run:
    """A layer's forward pass, or that and its backward pass, adding to sums of gradients."""
    params, others, received = (_values(x) for x in (program.params, program.others, program.received))
    if direction == FORWARD:
        forward = jax.jit(program.forward).lower(params, others, received).compile()
        return lambda: _wait(forward(params, others, received))
    cotangents = _values(program.cotangents())
    held = [[jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)) for p in params]]
    both = jax.jit(program.both, donate_argnums=(4,)).lower(params, others, received, cotangents, held[0]).compile()

    def run() -> None:
        held[0], back, rest = both(params, others, received, cotangents, held[0])
        _wait((held[0], back, rest))

    return run


def update_run(problem: Problem, params: Sequence[jax.ShapeDtypeStruct]) -> Run:
    """The optimizer's update of some parameters, in place as in a step."""
    structs = update_inputs(problem, params)
    named, sums, state = (jax.tree.map(lambda s: _value(s), tree) for tree in structs)
    held = [named, jax.tree.map(jnp.abs, state)]  # second moments are not negative
    update = jax.jit(partial(updated, problem.optimizer), donate_argnums=(0, 2)).lower(held[0], sums, held[1]).compile()

    def run() -> None:
        held[0], held[1] = update(held[0], sums, held[1])
        _wait(held)

    return run


def collective_run(kind: str, size: int, num_bytes: int, devices: Sequence[jax.Device]) -> Run:
    """``CHAIN`` collectives one after another, by all groups of ``size`` devices at once.

    Args:
        num_bytes: as the cost model counts them: what one device holds before an all-reduce,
            reduce-scatter or all-to-all, and after an all-gather.
    """
    groups = len(devices) // size
    mesh = Mesh(np.array(devices[: groups * size]).reshape(groups, size), ("groups", "members"))
    length = max(size, num_bytes // 4 // size * size)
    spec = PartitionSpec(("groups", "members"))

    def chain(x: Any) -> Any:
        for _ in range(CHAIN):
            if kind == "all_reduce":
                x = lax.psum(x, "members") / size
            elif kind == "all_gather":
                # Each next one needs all of the last.
                x = lax.all_gather(x, "members", tiled=True).reshape(size, -1)[-1] + 1
            elif kind == "reduce_scatter":
                x = jnp.tile(lax.psum_scatter(x, "members", tiled=True), size) / size
            else:
                x = lax.all_to_all(x, "members", 0, 0, tiled=True) + 1
        return x

    local = length // size if kind == "all_gather" else length
    x = jax.device_put(jnp.ones(local * groups * size, jnp.float32), NamedSharding(mesh, spec))
    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)).lower(x).compile()
    return lambda: _wait(run(x))


def fresh_run(num_bytes: int) -> Run:
    """Memory is asked for, written once a page, and given back."""

    def run() -> None:
        with mmap.mmap(-1, num_bytes) as block:
            view = np.frombuffer(block, np.uint8)
            view[:: mmap.PAGESIZE] = 1
            del view

    return run


def transfer_run(num_bytes: int, devices: Sequence[jax.Device]) -> Run:
    """One value from a device to the next."""
    x = jax.device_put(jnp.ones(max(1, num_bytes // 4), jnp.float32), devices[0])
    return lambda: _wait(jax.device_put(x, devices[1]))


def dispatch_run(devices: Sequence[jax.Device]) -> Run:
    """A program that does next to nothing."""
    sharding = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    given = [jax.device_put(jnp.ones((8,)), sharding) for _ in range(_ARGUMENTS)]
    empty = jax.jit(lambda xs: [x + 1 for x in xs]).lower(given).compile()
    return lambda: _wait(empty(given))


def _wait(values: Any) -> None:
    jax.block_until_ready(values)


def _values(structs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    return [_value(struct) for struct in structs]


def _value(struct: jax.ShapeDtypeStruct) -> Any:
    """Something that computes as fast as what training computes with: no zeros, no denormal numbers."""
    if is_key(struct):
        return jax.random.split(jax.random.key(0), struct.shape) if struct.shape else jax.random.key(0)
    if not jnp.issubdtype(struct.dtype, jnp.floating):
        return jnp.zeros(struct.shape, struct.dtype)
    draw = np.random.default_rng(0).standard_normal(struct.shape, np.float32)
    return jnp.asarray(0.1 * draw, struct.dtype)
