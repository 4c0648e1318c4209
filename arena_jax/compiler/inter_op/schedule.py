"""The order in which a pipeline's programs are issued."""

from typing import Literal, NamedTuple

FORWARD: Literal["forward"] = "forward"
BACKWARD: Literal["backward"] = "backward"


class Task(NamedTuple):
    """One program of one stage on one microbatch."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[Task]:
    """Issue order of 1F1B (PipeDream-Flush; Narayanan et al. 2021, figure 4).

    Stage s runs ``min(num_stages - s, num_microbatches)`` forwards ahead, then one backward for each
    forward. The last stage's backward follows its forward at once, so the pair is one task:
    its ``BACKWARD`` tasks are left out. Every task comes after those it needs.
    """
    queues = [_stage_order(s, num_stages, num_microbatches) for s in range(num_stages)]
    done: set[Task] = set()
    order: list[Task] = []
    heads = [0] * num_stages
    last = num_stages - 1
    while any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
        for stage, queue in enumerate(queues):
            if heads[stage] == len(queue):
                continue
            task = queue[heads[stage]]
            if task.direction == FORWARD:
                needs = Task(stage - 1, FORWARD, task.microbatch) if stage else None
            elif stage + 1 == last:
                needs = Task(last, FORWARD, task.microbatch)
            else:
                needs = Task(stage + 1, BACKWARD, task.microbatch)
            if needs is None or needs in done:
                heads[stage] += 1
                done.add(task)
                order.append(task)
    return order


def _stage_order(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    if stage == num_stages - 1:
        return [Task(stage, FORWARD, m) for m in range(num_microbatches)]
    ahead = min(num_stages - stage, num_microbatches)
    tasks = [Task(stage, FORWARD, m) for m in range(ahead)]
    for m in range(num_microbatches):
        tasks.append(Task(stage, BACKWARD, m))
        if m + ahead < num_microbatches:
            tasks.append(Task(stage, FORWARD, m + ahead))
    return tasks
