"""What a plan's compiled programs need of a device, stage by stage.

A one-stage plan is one program. Of a pipeline's stage, parameters, optimizer state, sums of gradients and the
batch stay for the whole step; every microbatch in flight keeps what its backward pass needs; and whatever
program runs takes its own memory besides. The most that ever lies there together is the stage's memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arena_jax.compiler.hlo import Collective
from arena_jax.deviceless.store import Compiled


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes of one device that no program's own numbers tell.

    Attributes:
        always: from the beginning of a step to its end.
        kept: of one microbatch, from its forward to its backward pass.
        received: what arrives from the stage before, and as much of cotangents from the one behind.
    """

    always: int = 0
    kept: int = 0
    received: int = 0


@dataclass(frozen=True, kw_only=True)
class StageAccount:
    """A stage as compiled.

    Attributes:
        memory_bytes: peak bytes of a device.
        missing_bytes: by how much the compiler itself found the memory too small.
        message: what it said.
        microbatch: collectives of one microbatch; a ``count`` is of one.
        once: collectives of the end of a step.
    """

    memory_bytes: int
    missing_bytes: int = 0
    message: str = ""
    microbatch: tuple[Collective, ...] = ()
    once: tuple[Collective, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StageAccount":
        lists = {name: tuple(Collective(**c) for c in data[name]) for name in ("microbatch", "once")}
        return cls(**{**data, **lists})


def account_of_step(step: Compiled, num_microbatches: int) -> StageAccount:
    """A one-stage plan's account."""
    microbatch, once = [], []
    for collective in step.collectives:
        # Microbatches run in a loop, so what belongs to them runs at least so often.
        if collective.count >= num_microbatches:
            microbatch.append(_times(collective, 1 / num_microbatches))
        else:
            once.append(collective)
    return StageAccount(
        memory_bytes=step.argument_bytes + step.fresh_bytes,
        missing_bytes=step.missing_bytes,
        message=step.message,
        microbatch=tuple(microbatch),
        once=tuple(once),
    )


def account_of_stage(programs: Mapping[str, Sequence[Compiled]], resident: Resident, in_flight: int) -> StageAccount:
    """The account of a pipeline's stage.

    Args:
        programs: by role: ``forward`` and ``backward``, or ``both``; ``reduced``, ``update`` and what else there is.
        in_flight: microbatches whose activations the stage holds at once.
    """
    peaks = [resident.always]
    for program in programs.get("forward", ()):
        peaks.append(resident.always + resident.received + (in_flight - 1) * resident.kept + program.fresh_bytes)
    for program in programs.get("backward", ()):
        peaks.append(resident.always + resident.received + in_flight * resident.kept + program.fresh_bytes)
    for program in programs.get("both", ()):
        peaks.append(resident.always + resident.received + program.fresh_bytes)
    for program in programs.get("reduced", ()):
        peaks.append(resident.always + program.fresh_bytes)
    for role in ("start", "advance", "finish"):
        # What these make is resident.
        peaks += [resident.always + program.temp_bytes for program in programs.get(role, ())]
    # What one update program makes, the next may read.
    peaks.append(resident.always + sum(program.fresh_bytes for program in programs.get("update", ())))
    every = [program for role in programs.values() for program in role]
    refused = max(every, key=lambda program: program.missing_bytes, default=Compiled())
    loop = [program for role in ("forward", "backward", "both") for program in programs.get(role, ())]
    return StageAccount(
        memory_bytes=max(peaks),
        missing_bytes=refused.missing_bytes,
        message=refused.message,
        microbatch=tuple(c for program in loop for c in program.collectives),
        once=tuple(c for role in ("reduced", "update") for p in programs.get(role, ()) for c in p.collectives),
    )


def _times(collective: Collective, factor: float) -> Collective:
    return Collective(**{**asdict(collective), "count": collective.count * factor})
