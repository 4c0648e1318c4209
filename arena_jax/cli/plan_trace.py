"""The predicted timeline of plans as a Chrome trace, which Perfetto opens.

Format: JSON object with ``traceEvents`` of the "Trace Event Format" (complete events ``X`` and metadata
``M``; times in microseconds). One process a plan, one thread a stage and one a link between stages.
"""

import json
from collections.abc import Iterable
from typing import Any

from arena_jax.grid import IndexRow
from arena_jax.runtime.timeline import Span, timeline


def trace_text(rows: Iterable[IndexRow]) -> str:
    """The trace of these plans, each from time zero."""
    events = [event for number, row in enumerate(rows) for event in _events(number, row)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(process: int, row: IndexRow) -> list[dict[str, Any]]:
    if row.plan is None or row.estimate is None:
        return []
    stages = row.plan.stages
    threads = {(s, s): f"stage {s}: {p.dp}x{p.tp}, layers {p.layers[0]}-{p.layers[1]}" for s, p in enumerate(stages)}
    for s in range(len(stages) - 1):
        threads |= {(s, s + 1): f"stage {s} to {s + 1}", (s + 1, s): f"stage {s + 1} to {s}"}
    numbers = {key: number for number, key in enumerate(threads)}
    name = f"{row.grid}, plan {row.plan.plan_id} (predicted)"
    events = [_named("process_name", process, 0, name)]
    events += [_named("thread_name", process, numbers[key], text) for key, text in threads.items()]
    events += [
        {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": n, "args": {"sort_index": n}}
        for n in numbers.values()
    ]
    for span in timeline(row.estimate.stages, row.num_microbatches, step_time_s=row.estimate.step_time_s):
        thread = numbers[span.stage, span.stage if span.to is None else span.to]
        events.append(
            {
                "name": span_text(span),
                "cat": span.kind,
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {} if span.microbatch is None else {"microbatch": span.microbatch},
            }
        )
    return events


def span_text(span: Span) -> str:
    """What a span is called: its kind and microbatch."""
    return span.kind if span.microbatch is None else f"{span.kind} {span.microbatch}"


def _named(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
