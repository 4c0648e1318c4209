"""Put what a compiler found into a plan's estimate: memory, and the collectives that the programs really run.

A collective that is started and awaited apart hides behind what runs between: of its seconds only those are
charged that the work between does not fill. Seconds of compute stay those of the cost model, as no compiler
knows them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arena_jax.compiler.cost import Hardware
from arena_jax.compiler.cost.links import group_link
from arena_jax.compiler.hlo import Collective
from arena_jax.deviceless.account import StageAccount
from arena_jax.deviceless.client import CompiledPlan
from arena_jax.grid import Estimate, IndexRow, StageEstimate, Submesh


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A row after its plan was compiled.

    Attributes:
        row: the row with the corrected estimate; without a plan where it does not fit.
        missing_bytes: by how much the fullest device's memory is too small; 0 where the plan fits.
        memory_bytes: peak bytes of the fullest device.
        hidden_s, communication_s: of one step of the slowest stage, seconds of collectives that run beside
            other work, and of all.
    """

    row: IndexRow
    missing_bytes: int
    memory_bytes: int
    hidden_s: float = 0.0
    communication_s: float = 0.0


def correct(row: IndexRow, compiled: CompiledPlan, hardware: Hardware) -> Corrected:
    """The row as its compiled plan has it."""
    plan, estimate = row.plan, row.estimate
    assert plan is not None
    assert estimate is not None
    usable = hardware.usable_bytes
    memory = [_memory(stage, usable) for stage in compiled.stages]
    fullest = max(memory)
    dtype = plan.precision.compute or "float32"
    stages, hidden, whole = [], [], []
    for stage, before, account, num_bytes in zip(plan.stages, estimate.stages, compiled.stages, memory, strict=True):
        shown, behind = _seconds(account.microbatch, hardware, stage.submesh, dtype)
        end_shown, _ = _seconds(account.once, hardware, stage.submesh, dtype)
        moved = moved_bytes(account, plan.num_microbatches)
        stages.append(_stage(before, shown, end_shown, num_bytes, moved))
        hidden.append(behind * plan.num_microbatches)
        whole.append((shown + behind) * plan.num_microbatches + end_shown)
    corrected = replace(row, estimate=_estimate(estimate, stages, plan.num_microbatches, fullest))
    missing = fullest - usable
    slowest = max(range(len(stages)), key=lambda s: stages[s].time_s)
    if missing > 0:
        corrected = replace(
            corrected,
            plan=None,
            estimate=None,
            reason=f"as compiled it needs {fullest:,} bytes a device, {usable:,} are usable: {missing:,} too many",
            least_memory_bytes=fullest,
        )
    return Corrected(
        row=corrected,
        missing_bytes=max(0, missing),
        memory_bytes=fullest,
        hidden_s=hidden[slowest],
        communication_s=whole[slowest],
    )


def collective_s(collective: Collective, hardware: Hardware, submesh: Submesh) -> float:
    """Seconds of one collective on its own."""
    link = group_link(hardware, submesh, collective.size, collective.stride)
    if collective.kind == "permute":  # one neighbour sends all: twice what a device of a pair gathers
        return float(link.all_gather_s(2 * collective.num_bytes))
    return float(getattr(link, f"{collective.kind}_s")(collective.num_bytes))


def _seconds(found: Iterable[Collective], hardware: Hardware, submesh: Submesh, dtype: str) -> tuple[float, float]:
    """Seconds that collectives are waited for, and seconds of them that pass beside other work."""
    shown = hidden = 0.0
    for collective in found:
        alone_s = collective_s(collective, hardware, submesh)
        beside_s = float(
            hardware.compute_s(collective.beside_flops, dtype) + hardware.memory_s(collective.beside_bytes)
        )
        behind = min(alone_s, beside_s)
        shown += (alone_s - behind) * collective.count
        hidden += behind * collective.count
    return shown, hidden


def _memory(stage: StageAccount, usable_bytes: int) -> int:
    """Bytes of a stage; of one that the compiler refused, as many too many as it says."""
    return max(stage.memory_bytes, usable_bytes + stage.missing_bytes if stage.missing_bytes else 0)


def moved_bytes(account: StageAccount, num_microbatches: int) -> dict[str, float]:
    """Bytes that one device holds of a step's collectives, by kind."""
    found: dict[str, float] = {}
    for collectives, times in ((account.microbatch, num_microbatches), (account.once, 1)):
        for c in collectives:
            found[c.kind] = found.get(c.kind, 0.0) + c.num_bytes * c.count * times
    return found


def _stage(
    before: StageEstimate, shown: float, end_shown: float, memory_bytes: int, moved: dict[str, float]
) -> StageEstimate:
    scale = shown / before.communication_s if before.communication_s else 0.0
    return replace(
        before,
        communication_s=shown,
        forward_s=max(0.0, before.forward_s + (shown - before.communication_s) / 3),
        communication={name: seconds * scale for name, seconds in before.communication.items()},
        update_s=before.update_s - before.sync_s + end_shown,
        sync_s=end_shown,
        memory_bytes=memory_bytes,
        collective_bytes=moved,
        memory=dict(before.memory) | {"activations": memory_bytes - sum(_but_activations(before))},
    )


def _but_activations(before: StageEstimate) -> list[int]:
    return [num_bytes for name, num_bytes in before.memory.items() if name != "activations"]


def _estimate(before: Estimate, stages: Sequence[StageEstimate], num_microbatches: int, memory_bytes: int) -> Estimate:
    """The step of corrected stages: each runs one microbatch in turn, the slowest all the others."""
    times = [stage.time_s for stage in stages]
    slowest = times.index(max(times))
    weights = [num_microbatches if s == slowest else 1 for s in range(len(stages))]
    breakdown = {
        "compute_s": sum(w * s.compute_s for w, s in zip(weights, stages, strict=True)),
        "communication_s": sum(w * s.communication_s for w, s in zip(weights, stages, strict=True)),
        "boundary_s": before.breakdown.get("boundary_s", 0.0),
        "gradients_and_update_s": max(stage.update_s for stage in stages),
    }
    return replace(
        before,
        step_time_s=sum(breakdown.values()),
        memory_bytes=memory_bytes,
        stages=tuple(stages),
        imbalance=max(times) / (sum(times) / len(times)),
        breakdown=breakdown,
    )
