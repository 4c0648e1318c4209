"""Plan indexes made on this machine, by one process at a time."""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from arena_jax import __version__
from arena_jax.errors import UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.estimates import index_from_json
from arena_jax.service.indexing import Indexing
from arena_jax.service.job import Job
from arena_jax.service.job_folder import JobFolder
from arena_jax.service.own_processes import worker_argv

# Keys of a recipe that change no plan.
_IDLE_KEYS = ("name", "summary", "steps", "seed", "checkpoint", "tracking", "eval", "hook", "cpu_devices")
_MOST_SAID = 300


class LocalIndexer:
    """Plans in a process of ``arena_jax.worker``; :class:`~arena_jax.service.indexing.Indexer`.

    Args:
        state: the service's state folder.
        tables: of the cluster file, for the process.
    """

    def __init__(self, state: Path, cluster: Cluster, tables: Mapping[str, Any]) -> None:
        self._folder = state / "jobs"
        self._tables = {key: value for key, value in tables.items() if key != "queues"}
        types = "".join(repr(cluster.catalogue[name]) for name in cluster.types)
        self._cluster = hashlib.blake2b(types.encode(), digest_size=8).hexdigest()
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def key(self, job: Job) -> str:
        spec = job.spec
        try:
            if spec.kind == "closure":
                content: Any = hashlib.blake2b(Path(spec.recipe).read_bytes(), digest_size=16).hexdigest()
            else:
                content = {k: v for k, v in yaml.safe_load(spec.recipe).items() if k not in _IDLE_KEYS}
        except OSError as error:
            raise UsageError(f"cannot read {spec.recipe!r}: {error.strerror}") from error
        except (yaml.YAMLError, AttributeError, ValueError) as error:
            raise UsageError("its recipe is no mapping in YAML") from error
        parts = [content, self._cluster, __version__, spec.min_devices, spec.max_devices, sorted(spec.types)]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def look(self, job: Job, allocations: Sequence[Allocation]) -> Indexing:
        folder = self._folder / str(job.number)
        if self._process is None:
            self._begin(job, allocations, folder)
            return Indexing(said="being planned")
        if self._number != job.number:
            return Indexing(said="waits to be planned")
        code = self._process.poll()
        if code is None:
            return Indexing(said=self._said(folder))
        self._process = None
        if code == 0:
            with suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads((folder / "index.json").read_text(encoding="utf-8"))
                if not found["index"]:
                    return Indexing(error=f"no plan fits: {'; '.join(found['reasons'][:3])}")
                return Indexing(index=index_from_json(found["index"]))
        lines = _lines(folder / "plan.log")
        return Indexing(error=f"planning failed: {lines[-1] if lines else f'exit code {code}'}")

    def drop(self, job: Job) -> None:
        if self._process is not None and self._number == job.number:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process, if there is one; what it has found is in the store of plans."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _begin(self, job: Job, allocations: Sequence[Allocation], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "do": "plan",
            "kind": job.spec.kind,
            "recipe": JobFolder(self._folder, job).recipe(),
            "cluster": self._tables,
            "allocations": [str(allocation) for allocation in allocations],
            "out": str(folder / "index.json"),
            "parent": os.getpid(),
        }
        (folder / "plan.json").write_text(json.dumps(task), encoding="utf-8")
        with open(folder / "plan.log", "wb") as log:
            self._process = subprocess.Popen(
                [*worker_argv(), str(folder / "plan.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._number = job.number

    def _said(self, folder: Path) -> str:
        lines = [line for line in _lines(folder / "plan.log") if line.startswith("planning")]
        return lines[-1] if lines else "being planned"


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return [line[:_MOST_SAID] for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return []
