"""1F1B: complete, in an order that can run, and within the memory it promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.compiler.inter_op.schedule import BACKWARD, FORWARD, Task, one_f_one_b


def needs(task: Task, num_stages: int) -> list[Task]:
    """What must have run before: the neighbour's activations or cotangents, and one's own forward pass.

    The last stage's forward task includes its backward pass.
    """
    stage, direction, microbatch = task
    if direction == FORWARD:
        return [Task(stage - 1, FORWARD, microbatch)] if stage else []
    after = Task(stage + 1, FORWARD if stage + 1 == num_stages - 1 else BACKWARD, microbatch)
    return [after, Task(stage, FORWARD, microbatch)]


@given(st.integers(1, 8), st.integers(1, 24))
def test_one_f_one_b(num_stages: int, num_microbatches: int) -> None:
    order = one_f_one_b(num_stages, num_microbatches)
    last = num_stages - 1
    expected = {
        Task(s, d, m) for s in range(num_stages) for d in (FORWARD, BACKWARD) for m in range(num_microbatches)
    } - {Task(last, BACKWARD, m) for m in range(num_microbatches)}
    assert len(order) == len(set(order))
    assert set(order) == expected
    done: set[Task] = set()
    for task in order:
        assert done.issuperset(needs(task, num_stages))
        done.add(task)
    for stage in range(last):
        flight = most = 0
        for task in order:
            if task.stage == stage:
                flight += 1 if task.direction == FORWARD else -1
                most = max(most, flight)
        assert flight == 0
        assert most == min(num_stages - stage, num_microbatches)
    for stage in range(num_stages):
        for direction in (FORWARD, BACKWARD):
            # Sums over microbatches are taken in the order of one device.
            mine = [t.microbatch for t in order if (t.stage, t.direction) == (stage, direction)]
            assert mine == sorted(mine)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 5), (4, 8), (4, 2)])
def test_every_stage_is_as_busy_as_it_can_be(num_stages: int, num_microbatches: int) -> None:
    """Run as issued, one unit a task (two for the last stage's pair), it takes 2 (M + S - 1) units in all."""
    order = one_f_one_b(num_stages, num_microbatches)
    finished: dict[Task, int] = {}
    free = [0] * num_stages
    for task in order:
        ready = max((finished[t] for t in needs(task, num_stages)), default=0)
        length = 2 if task.stage == num_stages - 1 else 1
        finished[task] = free[task.stage] = max(ready, free[task.stage]) + length
    assert max(free) == 2 * (num_microbatches + num_stages - 1)
