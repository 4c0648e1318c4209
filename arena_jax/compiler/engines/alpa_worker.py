"""The process in which the real ``alpa`` runs: its ILP solve and its dynamic program, unmodified.

Run by path, so that nothing of this package is imported here: Alpa wants a jax and a jaxlib that no
longer exist and finds stubs in their place. Requests come on stdin and answers go to stdout, each a
line of JSON and the arrays it announces in npy format; nothing is unpickled. The process ends when
stdin does, also in the middle of a solve.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

# What Alpa's two modules use of the packages they import; anything else they only mention.
_REAL = {"numba", "numpy", "pulp", "tqdm", "llvmlite"}
# Alpa's packages whose own ``__init__`` would import all of Alpa, and the modules that are run.
_PACKAGES = {"alpa", "alpa.shard_parallel", "alpa.pipeline_parallel"}
_MODULES = {
    "alpa.global_env",
    "alpa.timer",
    "alpa.util",
    "alpa.shard_parallel.auto_sharding",
    "alpa.pipeline_parallel.stage_construction",
}
# Alpa gives CBC this long and then takes what there is, without saying that it is unproved.
ALPA_TIME_LIMIT_S = 600
# Alpa runs CBC twice as long as it can be sure of, at most: a solve this long may have been cut short.
_PROVED_WITHIN_S = 0.95 * ALPA_TIME_LIMIT_S


def write_message(stream: BinaryIO, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """One line of JSON (``fields`` and the arrays' names and sizes), then the arrays as npy."""
    blobs = {}
    for name, array in (arrays or {}).items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        blobs[name] = buffer.getvalue()
    line = json.dumps({"fields": dict(fields), "arrays": {name: len(blob) for name, blob in blobs.items()}})
    stream.write(line.encode() + b"\n" + b"".join(blobs.values()))
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next message, or ``None`` at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    arrays = {}
    for name, size in header["arrays"].items():
        blob = stream.read(size)
        if len(blob) < size:
            return None
        arrays[name] = np.load(io.BytesIO(blob), allow_pickle=False)
    return header["fields"], arrays


class _Anything(type):
    """A class any of whose attributes, calls and subscripts is again such a class: a stub of whatever is asked."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything("stub", (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _StubModule(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Alpa's own modules in its folder, and a stub for what is neither real nor of the standard library."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if name in _MODULES:
            return importlib.machinery.PathFinder.find_spec(name, path)
        if top != "alpa" and (top in _REAL or top in sys.stdlib_module_names or not _asked_by_alpa()):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in _PACKAGES:
            spec.submodule_search_locations = [os.path.join(self._folder, *name.split("."))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in _PACKAGES else _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_alpa() -> bool:
    """Whether the import under way was written in Alpa: what numba or pulp look for is theirs to find or miss."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib") and name != __name__:
            return bool(name.partition(".")[0] == "alpa")
        frame = frame.f_back
    return False


class _Alpa:
    """Alpa's modules, each imported when it is first needed."""

    def __init__(self, folder: str) -> None:
        sys.meta_path.insert(0, _Stubs(folder))
        self._tables: dict[str, np.ndarray] = {}

    @functools.cached_property
    def _auto_sharding(self) -> Any:
        return importlib.import_module("alpa.shard_parallel.auto_sharding")

    @functools.cached_property
    def _stage_construction(self) -> Any:
        numba: Any = importlib.import_module("numba")
        # Alpa compiles anew in every process; kept on disk under NUMBA_CACHE_DIR it takes a tenth.
        numba.jit = functools.partial(numba.jit, cache=True)
        return importlib.import_module("alpa.pipeline_parallel.stage_construction")

    def ilp(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Alpa's ILP solve. No choices in the answer means infeasible."""
        started = time.monotonic()
        try:
            found = self._auto_sharding._call_solver_serialized_args(
                fields["num_nodes"],
                fields["memory_cap"],
                *(arrays[name] for name in ("s_len", "s_follow", "E", "A", "L", "c", "d", "m", "r", "v")),
            )
        except RuntimeError as error:
            # The one way in which Alpa says that nothing fits.
            if "memory budget" in str(error):
                return {"feasible": False}, {}
            raise
        elapsed_s = time.monotonic() - started
        choices, _, objective, _ = found
        return (
            {"feasible": True, "objective": objective, "proved": elapsed_s < _PROVED_WITHIN_S, "solve_s": elapsed_s},
            {"choices": choices},
        )

    def stages(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take the tables of a problem, for calls of :meth:`cut`."""
        self._tables = arrays
        return {}, {}

    def cut(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Alpa's dynamic program with no stage above ``bound``, read at exactly ``num_stages`` stages."""
        alpa, tables = self._stage_construction, self._tables
        num_layers, num_devices, num_stages = fields["num_layers"], fields["num_devices"], fields["num_stages"]
        allowed = tables["times"] <= fields["bound"]
        candidates = np.ascontiguousarray(tables["candidates"][allowed])
        if not len(candidates):
            return {"feasible": False}, {}
        sums, _, steps = alpa.training_dp_impl_2(
            num_layers, num_devices, tables["submesh_sizes"], candidates, tables["max_n_succ_stages"]
        )
        if not np.isfinite(sums[num_stages, 0, num_devices]):
            return {"feasible": False}, {}
        found = alpa.get_optimal_submeshes(num_stages, steps, num_devices, num_layers, tables["submesh_sizes"])
        stages = [[int(first), int(end), int(submesh)] for (first, end), submesh, _ in found]
        return {"feasible": True, "stages": stages, "sum": float(sums[num_stages, 0, num_devices])}, {}

    def hello(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Import both modules, so that a broken installation says so at once."""
        return {"modules": [self._auto_sharding.__name__, self._stage_construction.__name__]}, {}


def _requests(stream: BinaryIO, into: "queue.SimpleQueue[Any]", busy: threading.Event) -> None:
    while (message := read_message(stream)) is not None:
        busy.set()
        into.put(message)
    into.put(None)
    # Whoever asked is gone: end in the middle of a solve, and CBC too, which is in this process's group.
    if busy.is_set() and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # Alpa and CBC print; stdout is for answers alone.
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_requests, args=(sys.stdin.buffer, requests, busy), daemon=True).start()
    alpa = _Alpa(sys.argv[1])
    calls = {"hello": alpa.hello, "ilp": alpa.ilp, "stages": alpa.stages, "cut": alpa.cut}
    while (request := requests.get()) is not None:
        fields, arrays = request
        try:
            answer, found = calls[fields.pop("call")](fields, arrays)
        except Exception as error:  # whatever Alpa raises is told to whoever asked, who decides
            answer, found = {"error": f"{type(error).__name__}: {error}"}, {}
        busy.clear()
        write_message(answers, answer, found)


if __name__ == "__main__":
    main()
