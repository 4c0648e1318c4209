"""Where the time and memory of one stage go, for a person to read.

Everything here is a difference of what :class:`~arena_jax.compiler.inter_op.stage_cost.MeshCost` says under
neighbouring options, so that the parts add up to the numbers that the search ranked plans by.
"""

from dataclasses import replace

from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option
from arena_jax.compiler.intra_op import work as w
from arena_jax.grid import StageEstimate


def stage_facts(
    mesh: MeshCost, layers: tuple[int, int], num_microbatches: int, in_flight: int, option: Option, *, transfer_s: float
) -> StageEstimate:
    """Break the cost of a stage down.

    Args:
        layers: first and last layer.
        in_flight: microbatches whose activations the stage holds at once.
        transfer_s: seconds to bring one microbatch in from the stage before.
    """

    def parts(chosen: Option) -> tuple[float, float, float]:
        compute, communication, once = mesh.step_parts(num_microbatches, chosen)
        return float(compute[layers]), float(communication[layers]), float(once[layers])

    compute_s, communication_s, update_s = parts(option)
    # The forward pass of a rematerialised stage is run again with its backward pass.
    forward = tuple(float(part[layers]) for part in mesh.forward_parts(num_microbatches))
    # ZeRO-2 reduces gradients as often, and gathers no parameters in a microbatch.
    gathers_s = communication_s - parts(replace(option, zero=2))[1] if option.zero == 3 else 0.0
    return StageEstimate(
        compute_s=compute_s,
        communication_s=communication_s,
        memory_bytes=int(mesh.memory(num_microbatches, in_flight, option)[layers]),
        forward_s=forward[0] + forward[1] + gathers_s / mesh.num_gathers(option),
        transfer_s=transfer_s,
        update_s=update_s,
        sync_s=float(mesh.sync_s(option)[layers]),
        communication={
            "forward": forward[1],
            "backward": max(0.0, communication_s - forward[1] - gathers_s),
            "parameters": gathers_s,
        },
        memory=_memory(mesh, layers, num_microbatches, in_flight, option),
        collective_bytes=_collective_bytes(mesh, layers, num_microbatches, option),
    )


def _collective_bytes(
    mesh: MeshCost, layers: tuple[int, int], num_microbatches: int, option: Option
) -> dict[str, float]:
    """Bytes of a step's collectives by kind; a work vector counts passes over the whole batch, and gradients once."""
    first, last = layers
    times = {w.FORWARD: 2 if option.remat else 1, w.BACKWARD: 1}
    found: dict[str, float] = {}
    for c in w.collectives(mesh.work.works[first : last + 1].sum(axis=0)):
        of_gradients = c.phase == w.GRADIENT and c.axis == w.AXES[0]
        if not (of_gradients and mesh.reduces_late(option)):
            of_zero = of_gradients and option.zero >= 2 and mesh.scatters(option)
            kind = "reduce_scatter" if of_zero else mesh.built_kind(c.kind, c.phase)
            found[kind] = found.get(kind, 0.0) + c.num_bytes * times.get(c.phase, num_microbatches)
    if mesh.dp > 1 and mesh.reduces_late(option):
        kind = "reduce_scatter" if mesh.scatters(option) else "all_reduce"
        found[kind] = found.get(kind, 0.0) + float(mesh.summed_bytes[layers])
    held, kept, whole = (
        float(x[first : last + 1].sum()) for x in (mesh.work.parameter_bytes, mesh.work.kept_bytes, mesh.gathered_bytes)
    )
    passes = mesh.num_gathers(option) * num_microbatches
    gathered = {1: held, 2: held, 3: passes * whole + kept}.get(option.zero, 0.0)
    if gathered:
        found["all_gather"] = found.get("all_gather", 0.0) + gathered
    return found


def _memory(
    mesh: MeshCost, layers: tuple[int, int], num_microbatches: int, in_flight: int, option: Option
) -> dict[str, int]:
    """Bytes by what they hold; the activations are what the rest leaves of the sum."""
    parts = {name: int(num_bytes[layers]) for name, num_bytes in mesh.static_bytes(option).items()}
    whole = int(mesh.memory(num_microbatches, in_flight, option)[layers])
    return parts | {"activations": whole - sum(parts.values())}
