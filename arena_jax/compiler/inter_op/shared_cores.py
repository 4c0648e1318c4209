"""How long a pipeline takes whose stages share one pool of cores: virtual CPU devices.

While a stage waits its cores are not idle, others run the faster. So 1F1B is played through: every
program runs as soon as its stage and its inputs are ready, and those that run share the pool evenly.

Cut into stages a step is also more work than in one program: what the forward pass leaves for the backward pass is
written out between programs, where one program fuses it, and every microbatch adds its gradients to sums in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from arena_jax.compiler.inter_op.schedule import FORWARD, Task, one_f_one_b

# Processor time of gpt_tiny in two stages and two microbatches over that in one program: 1.15 on cpu:2, 1.25 on cpu:4
# (2-core AMD EPYC, jax 0.10.2; wall times of all plans are in benchmarks/results/plan_quality.md).
WORK_IN_STAGES = 1.2


@dataclass(frozen=True, kw_only=True)
class SharedStage:
    """One stage of the pipeline.

    Attributes:
        num_devices: of the pool.
        forward_s, backward_s: of one microbatch, while every device of the pool is at work; of the last
            stage, which runs both at once, their sum counts.
        limit: how many times as fast it runs with the pool to itself.
    """

    num_devices: int
    forward_s: float
    backward_s: float
    limit: float


def pipeline_s(stages: Sequence[SharedStage], num_microbatches: int) -> float:
    """Seconds from the first program to the end of the last; the pool is as large as the stages together."""
    pool = sum(stage.num_devices for stage in stages)
    last = len(stages) - 1
    queues: list[list[Task]] = [[] for _ in stages]
    for task in one_f_one_b(len(stages), num_microbatches):
        queues[task.stage].append(task)
    done: set[Task] = set()
    left: dict[int, float] = {}
    now = 0.0
    while any(queues):
        for s, queue in enumerate(queues):
            if s not in left and queue and _is_ready(queue[0], last, done):
                stage = stages[s]
                forward = queue[0].direction == FORWARD
                both = stage.forward_s + stage.backward_s
                left[s] = both if s == last else stage.forward_s if forward else stage.backward_s
        rates = _rates({s: stages[s] for s in left}, pool)
        passed = min(left[s] / rates[s] for s in left)
        now += passed
        for s in list(left):
            left[s] -= passed * rates[s]
            if left[s] <= 1e-12:
                del left[s]
                done.add(queues[s].pop(0))
    return now


def _is_ready(task: Task, last: int, done: set[Task]) -> bool:
    if task.direction == FORWARD:
        return task.stage == 0 or Task(task.stage - 1, FORWARD, task.microbatch) in done
    if task.stage + 1 == last:
        return Task(last, FORWARD, task.microbatch) in done
    return task._replace(stage=task.stage + 1) in done


def _rates(running: dict[int, SharedStage], pool: int) -> dict[int, float]:
    """Devices at work share the pool evenly, up to what each can use."""
    rates: dict[int, float] = {}
    free, waiting = float(pool), dict(running)
    while waiting:
        even = free / sum(stage.num_devices for stage in waiting.values())
        slow = {s: stage for s, stage in waiting.items() if stage.limit <= even}
        if not slow:
            return rates | dict.fromkeys(waiting, even)
        for s, stage in slow.items():
            rates[s] = stage.limit
            free -= stage.limit * stage.num_devices
            del waiting[s]
    return rates
