"""When each program of a pipeline step runs, as the cost model predicts it.

The order is the one the runtime issues (:mod:`arena_jax.compiler.inter_op.schedule`); a program starts when its
stage is free and its values have arrived. A link carries one microbatch at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from arena_jax.compiler.inter_op.schedule import FORWARD, one_f_one_b
from arena_jax.grid import StageEstimate

Kind = Literal["forward", "backward", "send", "update"]


@dataclass(frozen=True)
class Span:
    """One thing that a stage does, or (``send``) that goes from it to stage ``to``."""

    stage: int
    kind: Kind
    start_s: float
    end_s: float
    microbatch: int | None = None
    to: int | None = None


def timeline(stages: Sequence[StageEstimate], num_microbatches: int, *, step_time_s: float) -> list[Span]:
    """Spans of one step, in order of their start.

    Where virtual CPU devices share cores, stages run the faster while others wait, so that the step
    ends sooner than its spans would add up to; all are then shortened alike.

    Gradients are reduced and parameters updated when the last backward pass of all stages is over, for
    the update may need the gradients of all.
    """
    last = len(stages) - 1
    free = [0.0] * len(stages)
    links: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int, int], float] = {}  # (from, to, microbatch) -> when
    spans: list[Span] = []

    def run(stage: int, kind: Kind, microbatch: int, seconds: float, not_before: float = 0.0) -> float:
        start = max(free[stage], not_before)
        free[stage] = start + seconds
        spans.append(Span(stage, kind, start, free[stage], microbatch))
        return free[stage]

    def send(stage: int, to: int, microbatch: int, ready: float) -> None:
        seconds = stages[max(stage, to)].transfer_s
        start = max(ready, links.get((stage, to), 0.0))
        links[stage, to] = arrived[stage, to, microbatch] = start + seconds
        if seconds:
            spans.append(Span(stage, "send", start, start + seconds, microbatch, to))

    for stage, direction, m in one_f_one_b(len(stages), num_microbatches):
        facts = stages[stage]
        if direction == FORWARD:
            ready = arrived[stage - 1, stage, m] if stage else 0.0
            done = run(stage, "forward", m, facts.forward_s, ready)
            if stage < last:
                send(stage, stage + 1, m, done)
                continue
        else:
            free[stage] = max(free[stage], arrived[stage + 1, stage, m])
        done = run(stage, "backward", m, facts.time_s - facts.forward_s)
        if stage:
            send(stage, stage - 1, m, done)
    end = max(free)
    spans.extend(Span(s, "update", end, end + facts.update_s) for s, facts in enumerate(stages) if facts.update_s)
    latest = max(span.end_s for span in spans)
    if latest > step_time_s:
        shorter = step_time_s / latest
        spans = [replace(s, start_s=s.start_s * shorter, end_s=s.end_s * shorter) for s in spans]
    return sorted(spans, key=lambda span: (span.start_s, span.stage, span.kind == "send"))


def idle_share(spans: Sequence[Span], num_stages: int) -> float:
    """Share of the stages' time until the last span ends in which they compute nothing; sending is no work."""
    end = max(span.end_s for span in spans)
    busy = sum(span.end_s - span.start_s for span in spans if span.kind != "send")
    return 1 - busy / (end * num_stages) if end else 0.0
