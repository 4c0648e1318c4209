"""The predicted timeline: by hand where it is short, by what must hold where it is not."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.grid import StageEstimate
from arena_jax.runtime.timeline import Span, idle_share, timeline

SECONDS = st.floats(0.01, 10)


def stage(forward: float, backward: float, *, transfer: float = 0.0, update: float = 0.0) -> StageEstimate:
    return StageEstimate(
        compute_s=forward + backward,
        communication_s=0.0,
        memory_bytes=1,
        forward_s=forward,
        transfer_s=transfer,
        update_s=update,
    )


def test_two_stages_and_two_microbatches_by_hand() -> None:
    """Forward 1 s, backward 2 s, half a second on the way, 1 s of update on the first stage."""
    spans = timeline([stage(1, 2, update=1), stage(1, 2, transfer=0.5)], 2, step_time_s=math.inf)
    assert spans == [
        Span(0, "forward", 0, 1, 0),
        Span(0, "forward", 1, 2, 1),
        Span(0, "send", 1, 1.5, 0, 1),
        Span(1, "forward", 1.5, 2.5, 0),
        Span(0, "send", 2, 2.5, 1, 1),
        Span(1, "backward", 2.5, 4.5, 0),
        Span(1, "forward", 4.5, 5.5, 1),
        Span(1, "send", 4.5, 5, 0, 0),
        Span(0, "backward", 5, 7, 0),
        Span(1, "backward", 5.5, 7.5, 1),
        Span(1, "send", 7.5, 8, 1, 0),
        Span(0, "backward", 8, 10, 1),
        Span(0, "update", 10, 11),
    ]
    assert idle_share(spans, 2) == pytest.approx(1 - 13 / 22)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 3), (4, 4), (4, 12), (8, 2)])
def test_equal_stages_take_what_the_formula_says(num_stages: int, num_microbatches: int) -> None:
    """(stages + microbatches - 1) times a pass (Narayanan et al. 2021, section 2.2)."""
    spans = timeline([stage(1, 2)] * num_stages, num_microbatches, step_time_s=math.inf)
    assert max(span.end_s for span in spans) == pytest.approx(3 * (num_stages + num_microbatches - 1))


@given(
    st.lists(st.builds(stage, SECONDS, SECONDS, transfer=SECONDS, update=SECONDS), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_what_holds_for_any_pipeline(stages: list[StageEstimate], num_microbatches: int) -> None:
    spans = timeline(stages, num_microbatches, step_time_s=math.inf)
    at = {(s.kind, s.stage, s.microbatch): s for s in spans if s.kind in ("forward", "backward")}
    assert len(at) == 2 * len(stages) * num_microbatches
    for (kind, where, m), span in at.items():  # everything comes after what it needs
        if kind == "backward":
            assert span.start_s >= at["forward", where, m].end_s
            if where + 1 < len(stages):
                assert span.start_s >= at["backward", where + 1, m].end_s + stages[where + 1].transfer_s - 1e-9
        elif where:
            assert span.start_s >= at["forward", where - 1, m].end_s + stages[where].transfer_s - 1e-9
    lines: dict[tuple[int, int | None], list[Span]] = {}
    for span in spans:
        lines.setdefault((span.stage, span.to), []).append(span)
    for line in lines.values():  # nothing does two things at once
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(line))
    for where, facts in enumerate(stages):  # no stage keeps more microbatches than memory was counted for
        events = sorted(
            [(at["forward", where, m].start_s, 1) for m in range(num_microbatches)]
            + [(at["backward", where, m].end_s, -1) for m in range(num_microbatches)]
        )
        held = max(itertools.accumulate(change for _, change in events))
        assert held <= min(len(stages) - where, num_microbatches)
        assert max(s.end_s for s in spans) >= num_microbatches * facts.time_s - 1e-9
    assert 0 <= idle_share(spans, len(stages)) < 1
