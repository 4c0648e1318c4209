"""Pipelines on a pool of cores: against 1F1B's closed form, and between the bounds of work and of waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.inter_op.shared_cores import SharedStage, pipeline_s


def stages(times: list[tuple[float, float]], *, limit: float, devices: int = 1) -> list[SharedStage]:
    return [SharedStage(num_devices=devices, forward_s=f, backward_s=b, limit=limit) for f, b in times]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_that_gain_nothing_alone_take_what_1f1b_takes(num_stages: int) -> None:
    # (M + S - 1) slots of a forward and a backward pass, equal stages.
    assert pipeline_s(stages([(1.0, 2.0)] * num_stages, limit=1.0), 8) == pytest.approx((8 + num_stages - 1) * 3.0)


def test_two_stages_one_microbatch_by_hand() -> None:
    # Alone all the time, at twice the speed: (1 + 3 + 2) / 2.
    assert pipeline_s(stages([(1.0, 2.0), (1.0, 2.0)], limit=2.0), 1) == pytest.approx(3.0)
    # Two microbatches: F0 alone 0.5; then F1 beside the last stage's pass, 1 each; its pass 2 left, alone at 2: 1;
    # backward 0 (2) beside the last pass (3): 2; 1 left, alone: 0.5; last backward pass alone: 1.
    assert pipeline_s(stages([(1.0, 2.0), (1.0, 2.0)], limit=2.0), 2) == pytest.approx(0.5 + 1 + 1 + 2 + 0.5 + 1)


@given(
    times=st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=1, max_size=4),
    microbatches=st.integers(1, 6),
    limit=st.floats(1.0, 4.0),
)
def test_it_lies_between_all_work_shared_out_and_none(times: list, microbatches: int, limit: float) -> None:
    found = pipeline_s(stages(times, limit=limit), microbatches)
    work = microbatches * sum(f + b for f, b in times) / len(times)
    waiting = pipeline_s(stages(times, limit=1.0), microbatches)
    assert work * (1 - 1e-6) <= found <= waiting * (1 + 1e-6)
    slowest = microbatches * max(f + b for f, b in times)
    assert found >= slowest / limit * (1 - 1e-6)


@pytest.mark.parametrize(
    ("devices", "cores", "share", "slower"),
    [(1, 2, 2, 1.0), (2, 2, 1, 1.0), (8, 2, 1, 4.0), (3, 8, 2, 1.0), (2, 16, 8, 1.0)],
)
def test_what_a_device_has_of_the_cores(devices: int, cores: int, share: int, slower: float) -> None:
    assert share_of_cores(devices, cores) == (share, slower)
