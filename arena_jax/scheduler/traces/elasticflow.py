"""ElasticFlow's and Tiresias' job files: model, iterations and device count by job."""

from arena_jax.scheduler.jobs import JobSpec
from arena_jax.scheduler.traces.rows import Row, csv_rows, parse_rows


def load(text: str, source: str) -> list[JobSpec]:
    """The columns of either, in any order; what is not needed is passed over.

    ElasticFlow: ``job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration``, the deadline
    ``ddl`` absolute. Tiresias: ``job_id,num_gpu,submit_time,iterations,model_name,duration,interval``.
    """
    return parse_rows(csv_rows(text), _parse, source)


def _parse(row: Row) -> JobSpec:
    arrival = row.number("submit_time")
    steps = "iterations" if row.optional("iterations") is not None else "iteration"
    deadline = None
    for name in ("deadline", "ddl"):
        if row.optional(name) is not None:
            deadline = row.number(name)
    return JobSpec(
        id=row.text("job_id"),
        arrival_s=arrival,
        num_steps=row.number(steps, least=1),
        model=row.text("model_name"),
        global_batch=row.count("batch_size") if row.optional("batch_size") is not None else None,
        num_devices=row.count("num_gpu"),
        deadline_s=deadline,
    )
