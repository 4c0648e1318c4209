"""The plan index: what a scheduler asks of it, and a store that many write and nobody can poison."""

import json
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation, GridShape, IndexRow, JobKey, PlanIndex, PlanStore
from arena_jax.grid.index import row_from_json, row_to_json
from tests.plans import NAMES, row, rows

KEY = JobKey({"model": "toy", "global_batch": 64, "constraints": {"zero": "search", "dp": None}, "versions": ["1"]})


def alloc(text: str) -> Allocation:
    return Allocation.parse(text)


@pytest.fixture
def index() -> PlanIndex:
    return PlanIndex(
        [
            row("a100:4/s1", 4.0),
            row("a100:4/s2", 3.0),
            row("a100:4/s4", None),
            row("a100:8/s1", 2.0, measured=2.5),
            row("a100:8/s2", 2.2),
            row("v100:4/s1", None),
            row("v100:4/s2", None),
        ]
    )


def test_best_is_the_fastest_number_of_stages(index: PlanIndex) -> None:
    best = index.best(alloc("a100:4"))
    assert best is not None
    assert (str(best.grid), best.step_time_s) == ("a100-40:4/s2", 3.0)


def test_what_was_measured_outranks_the_estimate(index: PlanIndex) -> None:
    best = index.best(alloc("a100:8"))
    assert best is not None
    assert str(best.grid) == "a100-40:8/s2"
    faster = index.with_measured(GridShape.parse("a100:8/s1"), 1, 1.0)
    best = faster.best(alloc("a100:8"))
    assert best is not None
    assert (str(best.grid), best.step_time_s) == ("a100-40:8/s1", 1.0)
    assert best.estimate is not None
    assert best.estimate.step_time_s == 2.0
    assert index.best(alloc("a100:8")) != best  # the first index is as it was


def test_allocations_without_a_plan(index: PlanIndex) -> None:
    assert index.best(alloc("v100:4")) is None
    assert index.best(alloc("h100:4")) is None
    assert index.speedup(alloc("a100:4"), alloc("v100:4")) is None
    assert index.speedup(alloc("h100:4"), alloc("a100:4")) is None


def test_speedup_is_a_ratio_of_step_times(index: PlanIndex) -> None:
    assert index.speedup(alloc("a100:4"), alloc("a100:8")) == pytest.approx(3.0 / 2.2)
    assert index.speedup(alloc("a100:8"), alloc("a100:4")) == pytest.approx(2.2 / 3.0)
    assert index.speedup(alloc("a100:4"), alloc("a100:4")) == 1.0


def test_missing_is_what_was_never_planned(index: PlanIndex) -> None:
    wanted = [alloc("a100:4"), alloc("h100:8"), alloc("v100:4"), alloc("a100:2x4")]
    assert [str(a) for a in index.missing(wanted)] == ["h100-sxm:8", "a100-40:2x4"]


def test_a_row_is_the_fastest_that_fits_or_says_why_none_does(index: PlanIndex) -> None:
    both = PlanIndex([*index, row("a100:4/s4", 9.0, num_microbatches=2), row("a100:4/s4", 7.0, num_microbatches=4)])
    found = both.row(GridShape.parse("a100:4/s4"))
    assert found is not None
    assert (found.num_microbatches, found.step_time_s) == (4, 7.0)
    found = index.row(GridShape.parse("v100:4/s2"))
    assert found is not None
    assert (found.feasible, found.reason, found.step_time_s) == (False, "too large", None)
    assert index.row(GridShape.parse("v100:4/s3")) is None


@given(rows())
def test_rows_read_back(original: IndexRow) -> None:
    assert row_from_json(json.loads(json.dumps(row_to_json(original)))) == original


@settings(max_examples=15)
@given(st.lists(rows(Allocation("cpu", 1, 4)), max_size=6), st.dictionaries(NAMES, NAMES | st.integers(), max_size=3))
def test_a_store_gives_back_what_it_was_given(given_rows: list[IndexRow], fields: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        key = JobKey(fields)
        store = PlanStore(Path(folder) / "deep" / "plans.sqlite")
        store.put(key, given_rows)
        expected = {(r.grid, r.num_microbatches): r for r in given_rows}
        for reader in (store, PlanStore(store.path)):
            found = reader.index(key)
            assert {(r.grid, r.num_microbatches): r for r in found} == expected
            assert [k.fields for k in reader.jobs()] == [fields]


def test_an_index_saves_itself_under_its_key(tmp_path: Path, index: PlanIndex) -> None:
    with pytest.raises(ArenaError, match="no job key"):
        index.save(tmp_path / "plans")
    PlanIndex(index, key=KEY).save(tmp_path / "plans")
    assert list(PlanStore(tmp_path / "plans").index(KEY)) == list(index)


def test_a_newer_row_replaces_the_older(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans")
    store.put(KEY, [row("cpu:4/s1", 4.0), row("cpu:4/s2", 5.0)])
    store.put(KEY, [row("cpu:4/s1", 2.0)])
    seconds = {str(r.grid): r.step_time_s for r in store.index(KEY)}
    assert seconds == {"cpu:4/s1": 2.0, "cpu:4/s2": 5.0}


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": 32},
        {"model": "Toy"},
        {"constraints": {"zero": 0, "dp": None}},
        {"constraints": {"zero": "search"}},
        {"versions": ["1", "2"]},
        {"precision": None},
        {"global_batch": "64"},
    ],
)
def test_any_other_key_is_served_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    store = PlanStore(tmp_path / "plans")
    store.put(KEY, [row("cpu:4", 4.0)])
    other = JobKey({**KEY.fields, **change})
    assert other.digest != KEY.digest
    assert len(store.index(other)) == 0
    assert len(store.index(JobKey(dict(reversed(KEY.fields.items()))))) == 1


def test_rows_are_stored_all_or_none(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans")

    def failing() -> Any:
        yield row("cpu:4", 4.0)
        raise RuntimeError("search failed half way")

    with pytest.raises(RuntimeError):
        store.put(KEY, failing())
    assert len(store.index(KEY)) == 0
    assert store.jobs() == ()


def _write(path: str, writer: int, num_rounds: int, barrier: Any) -> None:
    barrier.wait()
    for number in range(num_rounds):
        store = PlanStore(path)
        assert store.set_aside is None
        store.put(JobKey({"writer": writer}), [row(f"cpu:{number + 1}", float(number + 1))])
        store.put(JobKey({"shared": True}), [row("cpu:4", float(writer + 1), num_microbatches=number + 1)])
        assert len(store.index(JobKey({"writer": writer}))) == number + 1


def _check_written(path: Path, num_writers: int, num_rounds: int) -> None:
    store = PlanStore(path)
    assert store.set_aside is None
    assert [p.name for p in path.parent.iterdir() if "set-aside" in p.name] == []
    for writer in range(num_writers):
        found = {str(r.grid): r.step_time_s for r in store.index(JobKey({"writer": writer}))}
        assert found == {f"cpu:{n + 1}/s1": float(n + 1) for n in range(num_rounds)}
    shared = store.index(JobKey({"shared": True}))
    assert sorted(r.num_microbatches for r in shared) == list(range(1, num_rounds + 1))
    assert {r.step_time_s for r in shared} <= {float(w + 1) for w in range(num_writers)}


def test_many_processes_write_one_file(tmp_path: Path) -> None:
    """The file does not exist when they all start."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    path = tmp_path / "plans"
    writers = [context.Process(target=_write, args=(str(path), n, 6, barrier)) for n in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0] * 3
    _check_written(path, 3, 6)


def test_many_threads_write_one_file(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)
    path = tmp_path / "plans"
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            _write(str(path), writer, 5, barrier)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    _check_written(path, 6, 5)


GRIDS = [f"cpu:{n}/s{s}" for n in range(1, 5) for s in range(1, n + 1)]


def _rewrite(path: str, num_rounds: int, barrier: Any) -> None:
    store = PlanStore(path)
    barrier.wait()
    for number in range(1, num_rounds + 1):
        store.put(KEY, [row(grid, float(number)) for grid in GRIDS])


def test_readers_see_every_write_whole_or_not_at_all(tmp_path: Path) -> None:
    """Two processes write the same rows again and again; what this one reads is of one write."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    path = tmp_path / "plans"
    store = PlanStore(path)
    store.put(KEY, [row(grid, 0.5) for grid in GRIDS])
    writers = [context.Process(target=_rewrite, args=(str(path), 12, barrier)) for _ in range(2)]
    for process in writers:
        process.start()
    barrier.wait()
    seen: list[float] = []
    while any(process.is_alive() for process in writers):
        rows_now = list(store.index(KEY))
        assert len(rows_now) == len(GRIDS)
        (seconds,) = {r.step_time_s for r in rows_now}
        assert seconds is not None
        seen.append(seconds)
        # A key that nothing was stored under stays empty, whatever others write.
        assert len(store.index(JobKey({**KEY.fields, "global_batch": 65}))) == 0
    assert [process.exitcode for process in writers] == [0, 0]
    assert {r.step_time_s for r in store.index(KEY)} == {12.0}
    assert len(set(seen)) > 2  # it did read in between


def _stored(path: Path) -> PlanStore:
    store = PlanStore(path)
    store.put(KEY, [row(f"cpu:{n}", float(n)) for n in range(1, 40)])
    return store


def _garbage(path: Path) -> None:
    path.write_bytes(b"neither a database nor anything else" * 40)


def _truncated(path: Path) -> None:
    _stored(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def _overwritten(path: Path) -> None:
    _stored(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    whole = bytearray(path.read_bytes())
    whole[100:4096] = b"\x5a" * (4096 - 100)
    path.write_bytes(bytes(whole))


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE notes (text TEXT)")


def _newer(path: Path) -> None:
    _stored(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("spoil", [_garbage, _truncated, _overwritten, _foreign, _newer])
def test_a_file_that_cannot_be_trusted_is_set_aside(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "plans"
    spoil(path)
    before = path.read_bytes()
    store = PlanStore(path)
    assert len(store.index(KEY)) == 0
    assert store.set_aside is not None
    assert store.set_aside.read_bytes() == before
    store.put(KEY, [row("cpu:4", 4.0)])
    again = PlanStore(path)
    assert again.set_aside is None
    assert len(again.index(KEY)) == 1


def test_a_place_that_cannot_hold_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArenaError, match="cannot create"):
        PlanStore(tmp_path / "file" / "plans")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArenaError, match="cannot open plan index"):
        PlanStore(tmp_path / "folder")


def test_a_row_of_another_format_is_not_served(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans")
    store.put(KEY, [row("cpu:4", 4.0), row("cpu:2", 8.0)])
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE rows SET data = '{\"grid\": \"cpu:4/s1\"}' WHERE grid = 'cpu:4/s1'")
    assert [str(r.grid) for r in store.index(KEY)] == ["cpu:2/s1"]
