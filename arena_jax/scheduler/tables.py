"""Profile tables measured by others: the artifact's CSV, ElasticFlow's, and saved plan indexes."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from arena_jax.errors import UsageError
from arena_jax.grid import CATALOGUE, Catalogue, PlanStore
from arena_jax.scheduler.cluster import Cluster
from arena_jax.scheduler.profiles import IndexProfile, LayeredProfile, Profile, ProfileSet, TableProfile
from arena_jax.scheduler.traces.rows import Faults, Row, csv_rows, read_text

# Reading rules of the artifact: a missing size is read from the next larger size of its family,
# 1.8 times as fast per step up, and a step of over five minutes counts as infeasible.
_SIZE_STEP = 1.8
_LONGEST_STEP_S = 300.0
_COUNTS = (1, 2, 4, 8, 16)
_COLUMNS = ("family", "params", "global_batch", "gpu", "nodes", "gpus_per_node", "seconds")


def load_profiles(path: str | Path, cluster: Cluster) -> ProfileSet:
    """Read a profile file by its form: a plan index (SQLite), or a CSV in the artifact's columns."""
    path = Path(path)
    if path.is_dir():
        return load_elasticflow(path, cluster)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UsageError(f"cannot read profiles {str(path)!r}: {error.strerror}") from error
    return load_store(path) if head.startswith(b"SQLite format 3") else load_artifact(path, cluster)


def load_artifact(path: str | Path, cluster: Cluster) -> ProfileSet:
    """Read ``measured_iteration_seconds.csv`` under the artifact's reading rules.

    Models are named ``family__params``. Allocations are 1 to 16 devices of one type, packed on as
    few nodes of the cluster as possible; rows of other shapes are kept out of reach, as there.
    """
    catalogue = cluster.catalogue
    measured: dict[tuple[str, str, int, str, int, int], float] = {}

    def parse(row: Row) -> None:
        if "__extra__" in row.values:
            raise ValueError(f"{len(row.values['__extra__'])} cells too many")
        _size(row.text("params"))
        key = (
            row.text("family"),
            row.text("params"),
            row.count("global_batch"),
            catalogue.canonical(row.text("gpu")),
            row.count("nodes"),
            row.count("gpus_per_node"),
        )
        seconds = row.number("seconds") if row.optional("seconds") is not None else math.inf
        if seconds <= 0:
            raise ValueError(f"seconds must be above 0, got {seconds:g}")
        measured[key] = seconds

    _read_table(path, _COLUMNS, parse)
    sizes: dict[str, list[str]] = defaultdict(list)
    for family, params in sorted({key[:2] for key in measured}, key=lambda pair: _size(pair[1])):
        sizes[family].append(params)
    profiles: dict[tuple[str, int | None], Profile] = {}
    batches = {(key[0], key[2]) for key in measured}
    for family, batch in sorted(batches):
        for i, params in enumerate(sizes[family]):
            times = {}
            for name in cluster.types:
                for count in _COUNTS:
                    allocation = cluster.packed(name, count)
                    if allocation is None:
                        continue
                    shape = (name, allocation.num_nodes, allocation.devices_per_node)
                    for steps_up, larger in enumerate(sizes[family][i:]):
                        found = measured.get((family, larger, batch, *shape))
                        if found is not None:
                            if (seconds := found / _SIZE_STEP**steps_up) <= _LONGEST_STEP_S:
                                times[allocation] = seconds
                            break
            if times:
                profiles[f"{family}__{params}", batch] = TableProfile(times)
    return ProfileSet(profiles)


def load_elasticflow(folder: str | Path, cluster: Cluster, device_type: str = "a100") -> ProfileSet:
    """Read ElasticFlow's tables: one CSV per model, iterations/s by global batch and device count.

    The file name is the model. An empty or zero cell is infeasible.
    """
    name = cluster.catalogue.canonical(device_type)
    profiles: dict[tuple[str, int | None], Profile] = {}
    for path in sorted(Path(folder).glob("*.csv")):

        def parse(row: Row, model: str = path.stem) -> None:
            counts = [key for key in row.values if key != "global_batch_size"]
            for key in counts:
                if not key.isdecimal():
                    raise ValueError(f"{key!r} is no number of devices")
            rates = {int(key): row.number(key) for key in counts if row.optional(key) is not None}
            shapes = {cluster.packed(name, count): rate for count, rate in rates.items() if rate > 0}
            times = {a: 1.0 / rate for a, rate in shapes.items() if a is not None}
            profiles[model, row.count("global_batch_size")] = TableProfile(times)

        _read_table(path, ("global_batch_size",), parse)
    if not profiles:
        raise UsageError(f"no profile tables (*.csv) in {str(folder)!r}")
    return ProfileSet(profiles)


def _read_table(path: str | Path, needed: Sequence[str], parse: Callable[[Row], None]) -> None:
    """Parse every row of a CSV; raise :class:`UsageError` with the lines of all that are malformed."""
    text = read_text(path, "profiles")
    first = next(iter(text.lstrip().splitlines()), "")
    missing = [name for name in needed if name not in [cell.strip() for cell in first.split(",")]]
    if missing:
        raise UsageError(f"{str(path)!r} lacks the columns {', '.join(missing)}", hint=f"expected {','.join(needed)}")
    faults = Faults(str(path))
    for row in csv_rows(text):
        try:
            parse(row)
        except ValueError as error:
            faults.add(row.line, error.message if isinstance(error, UsageError) else error)
    faults.raise_any()


def load_store(path: str | Path) -> ProfileSet:
    """Read every job of a plan index that ``arena-jax plan`` wrote, by model name and global batch."""
    store = PlanStore(path)
    if store.set_aside is not None:
        raise UsageError(f"{str(path)!r} is no plan index of this version; it is now {store.set_aside.name!r}")
    layers: dict[tuple[str, int | None], list[Profile]] = defaultdict(list)
    for key in store.jobs():
        name = key.fields.get("model") or key.fields.get("model_fingerprint") or key.digest
        profile = IndexProfile(store.index(key))
        if any(True for _ in profile.allocations()):
            batch = key.fields.get("global_batch")
            # The newest key of a model comes first.
            layers[str(name), None if batch is None else int(batch)].insert(0, profile)
    if not layers:
        raise UsageError(f"the plan index {str(path)!r} holds no feasible plan", hint="run arena-jax plan first")
    return ProfileSet({key: LayeredProfile(tuple(found)) for key, found in layers.items()})


def data_parallel_only(
    profiles: ProfileSet, memory_gb: dict[str, list[float]], cluster: Cluster, usable: float = 0.8
) -> ProfileSet:
    """Keep the allocations on which pure data parallelism fits: what the artifact lets its baselines see.

    Args:
        memory_gb: GB per device of ``family_params_batch`` at 1, 2, 4, 8, 16 devices, -1 for over-memory.
        usable: share of device memory that may be used.
    """
    kept: dict[tuple[str, int | None], Profile] = {}
    for model, batch in list(profiles.pairs()):
        profile = profiles.profile(model, batch)
        needs = dict(zip(_COUNTS, memory_gb.get(f"{model.replace('__', '_')}_{batch}", ()), strict=False))
        times = {}
        for allocation in profile.allocations():
            need = needs.get(allocation.num_devices, -1.0)
            budget = cluster.catalogue[allocation.device_type].memory_bytes / 2**30 * usable
            if 0 <= need <= budget:
                times[allocation] = profile.step_time_s(allocation)
        if times:
            kept[model, batch] = TableProfile({a: t for a, t in times.items() if t is not None})
    return ProfileSet(kept)


def _size(params: str) -> float:
    match = re.fullmatch(r"([\d.]+)([KMBT])", params)
    if match is None:
        raise UsageError(f"cannot read the model size {params!r}", hint="write it as 760M or 2.6B")
    return float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def artifact_cluster(catalogue: Catalogue = CATALOGUE, scale: float = 1.0) -> Cluster:
    """The artifact's 1,280 devices: 320 each of A100 (4 a node), V100 (16), A40 (2) and A10 (2)."""
    rows = (("a100", 4), ("v100", 16), ("a40", 2), ("a10", 2))
    nodes = [{"type": t, "count": max(1, round(320 * scale / d)), "devices": d} for t, d in rows]
    return Cluster.from_tables({"nodes": nodes})


def models_of(profiles: ProfileSet) -> Iterable[str]:
    """Model names, sorted."""
    return sorted({model for model, _ in profiles.pairs()})
