"""The Arena artifact's traces: model, batch, device count and type drawn at random, arrivals from production."""

from pathlib import Path

from arena_jax.grid import CATALOGUE
from arena_jax.scheduler.jobs import JobSpec
from arena_jax.scheduler.traces.rows import Row, csv_rows, parse_rows, read_text

COLUMNS = ("job_id", "submission_time", "num_iteration", "model_name", "deadline", "batch_size", "num_gpu", "gpu_type")
_ITERATIONS_DIVISOR = 5  # the artifact divides every job's iterations by five


def load(path: str | Path) -> list[JobSpec]:
    """Jobs with whole numbers of iterations, divided by five as the artifact does."""
    return parse_rows(csv_rows(read_text(path)), _parse, str(path))


def _parse(row: Row) -> JobSpec:
    steps = row.count("num_iteration") // _ITERATIONS_DIVISOR
    return JobSpec(
        id=row.text("job_id"),
        arrival_s=row.number("submission_time"),
        num_steps=max(1, steps),
        model=row.text("model_name"),
        global_batch=row.count("batch_size"),
        device_type=CATALOGUE.canonical(row.text("gpu_type")),
        num_devices=row.count("num_gpu"),
    )
