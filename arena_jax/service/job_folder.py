"""What a job has on disk, whoever runs it: recipe, output, and a folder for each launch.

Under the service's state, ``jobs/NUMBER/`` holds ``log``, ``recipe.yaml``, ``train/`` (run directories) and
``runs/N/`` (one per launch).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError, UsageError
from arena_jax.scheduler import Cluster
from arena_jax.service.executor import Orders
from arena_jax.service.job import Job


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job.

    Args:
        root: of all jobs' folders.
        job: whose it is.
    """

    root: Path
    job: Job

    @property
    def path(self) -> Path:
        return self.root / str(self.job.number)

    @property
    def run(self) -> Path:
        """Of the latest launch."""
        return self.path / "runs" / str(self.job.run)

    @property
    def train(self) -> Path:
        """Of its run directories."""
        return self.path / "train"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def token(self) -> str:
        """Marks the processes of the latest launch."""
        return f"{self.path}:{self.job.run}"

    def output(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """What the job has printed from byte ``offset`` on, and where to go on."""
        try:
            with open(self.log, "rb") as file:
                file.seek(offset)
                data = file.read(max_bytes)
        except FileNotFoundError:
            return b"", offset
        except OSError as error:
            raise ArenaError(f"cannot read the output of {self.job.id}: {error.strerror}") from error
        return data, offset + len(data)

    def recipe(self) -> str:
        """Where its recipe is, named so that what is made from it is called after it; of a closure, its file."""
        if self.job.spec.kind == "closure":
            return self.job.spec.recipe
        path = self.path / "recipe.yaml"
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(self.job.spec.recipe, encoding="utf-8")
            temporary.replace(path)
        return str(path)

    def training(self, orders: Orders, *, grid: str, most_devices: int) -> dict[str, Any]:
        """The task that :mod:`arena_jax.worker` is to do.

        Args:
            grid: grid or allocation that it begins on.
            most_devices: virtual devices that its process has at least.
        """
        return {
            "do": "train",
            "kind": self.job.spec.kind,
            "recipe": self.recipe(),
            "folder": str(self.train),
            "grid": grid,
            "most_devices": most_devices,
            "pace_s": {str(number): seconds for number, seconds in orders.pace_s.items()},
            "queue": self.job.spec.queue,
        }

    def head_line(self) -> bytes:
        """What the output of a launch begins with."""
        assert self.job.held is not None
        return f"--- run {self.job.run} on {self.job.held.allocation} ---\n".encode()


def environment_of(job: Job, *, node: int | None = None) -> dict[str, str]:
    """What a process of the job is told of where it is: all its nodes, or the one that it runs on."""
    assert job.held is not None
    kind = job.held.allocation.device_type
    return {
        "ARENA_JAX_JOB": job.id,
        "ARENA_JAX_ALLOCATION": str(job.held.allocation),
        "ARENA_JAX_DEVICES": " ".join(
            f"{kind}/{number}:{','.join(map(str, numbers))}"
            for number, numbers in job.held.devices
            if node in (None, number)
        ),
    }


def check_virtual(cluster: Cluster, executor: str) -> None:
    """Raise :class:`UsageError` where the cluster has device types that are not virtual CPU devices."""
    for name in cluster.types:
        if cluster.catalogue[name].platform != "cpu":
            raise UsageError(
                f"the {executor} executor runs virtual CPU devices, and the cluster has {name}",
                hint="give the type threads = 1 and a nominal peak_flops in a [types.NAME] table",
            )
