"""The profile store: what is put is what is read, and nothing that is damaged is ever served."""

import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import ArenaError, UsageError
from arena_jax.grid import Profile, ProfileStore
from arena_jax.grid.profiles import KINDS, from_json, to_json

ONE = Profile(
    device_type="l20",
    kind="dot",
    piece={"dtype": "float16", "shape": [1, 128, 64, 256]},
    environment={"jax": "0.10.2"},
    seconds=2e-3,
    computed_s=1e-3,
    measured_at=1.0,
)

PROFILES = st.builds(
    Profile,
    device_type=st.sampled_from(["l20", "cpu"]),
    kind=st.sampled_from(KINDS),
    piece=st.dictionaries(st.text(max_size=4), st.integers(-5, 5), max_size=3),
    environment=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
    seconds=st.floats(1e-9, 1e3),
    computed_s=st.floats(1e-9, 1e3),
    noise=st.floats(0, 1),
    num_repeats=st.integers(1, 9),
    measured_at=st.floats(0, 1e9),
)


@settings(max_examples=20)
@given(profiles=st.lists(PROFILES, max_size=5))
def test_what_is_put_is_read_and_survives_an_export(tmp_path_factory: pytest.TempPathFactory, profiles) -> None:
    store = ProfileStore(tmp_path_factory.mktemp("store") / "p.sqlite")
    store.put(profiles)
    last = {profile.digest: profile for profile in profiles}
    read = store.profiles()
    assert {profile.digest: profile for profile in read} == last
    assert from_json(to_json(read), source="x") == list(read)


def test_measurements_of_one_type_correct_their_kind(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    assert store.corrections("l20") == {}
    others = [replace(ONE, piece={"n": n}, seconds=s) for n, s in enumerate((1e-3, 3e-3))]
    store.put([ONE, *others, replace(ONE, kind="stream", seconds=1e-3), replace(ONE, kind="conv", seconds=1.0)])
    # The median of 2, 1 and 3; a thousandfold is no measurement of the piece it claims.
    assert store.corrections("l20") == {"dot": 2.0, "stream": 1.0}
    assert store.corrections("a10") == {}


def test_the_generation_follows_every_change_of_a_type(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    seen = [store.generation("l20")]
    for profile in (ONE, replace(ONE, seconds=3e-3), replace(ONE, kind="conv")):
        store.put([profile])
        seen.append(store.generation("l20"))
    assert len(set(seen)) == 4
    store.put([replace(ONE, device_type="a10")])
    assert store.generation("l20") == seen[-1]


@pytest.mark.parametrize("content", [b"", b"garbage " * 600, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(content)
    store = ProfileStore(path)
    store.put([ONE])
    assert store.profiles() == (ONE,)
    if content:
        assert store.set_aside is not None
        assert store.set_aside.read_bytes() == content


def test_a_newer_store_is_set_aside_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProfileStore(path).put([ONE])
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    store = ProfileStore(path)
    assert store.profiles() == ()
    assert store.set_aside is not None


def test_a_truncated_store_serves_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProfileStore(path).put([replace(ONE, piece={"n": n, "pad": "x" * 500}) for n in range(200)])
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found: tuple[Profile, ...] = ()
    with suppress(ArenaError):  # "profile store ...: database disk image is malformed"
        found = ProfileStore(path).profiles()
    assert all(profile.seconds == ONE.seconds for profile in found)


def test_a_changed_number_is_not_served_and_is_pruned(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    other = replace(ONE, piece={"n": 2})
    store.put([ONE, other])
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE profiles SET data = replace(data, '0.002', '0.009') WHERE digest = ?", (ONE.digest,))
    db.close()
    assert store.profiles() == (other,)
    assert store.prune() == 1
    assert store.profiles() == (other,)


def test_pruning_by_type_and_age(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    now = time.time()
    new, old, foreign = ONE, replace(ONE, piece={"n": 1}), replace(ONE, device_type="a10")
    store.put([replace(new, measured_at=now), replace(old, measured_at=now - 100), replace(foreign, measured_at=now)])
    assert store.prune(older_than_s=50) == 1
    assert store.prune(device_type="a10") == 1
    assert [profile.piece for profile in store.profiles()] == [new.piece]
    assert store.prune(device_type="l20", older_than_s=1000) == 0


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"

    def write(writer: int) -> None:
        store = ProfileStore(path)
        for n in range(5):
            store.put([replace(ONE, piece={"writer": writer, "n": n})])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert len(ProfileStore(path).profiles()) == 30


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": 0}, "seconds must be a number above 0"),
        ({"seconds": True}, "seconds must be a number above 0"),
        ({"computed_s": float("nan")}, "computed_s must be a number above 0"),
        ({"kind": "dott"}, "did you mean 'dot'"),
        ({"piece": 3}, "must be tables"),
        ({"speed": 3}, "unknown keys"),
    ],
)
def test_faults_of_an_import_are_named(change: dict, says: str) -> None:
    data = json.loads(to_json([ONE]))
    data["profiles"][0] |= change
    with pytest.raises(UsageError) as caught:
        from_json(json.dumps(data), source="mine.json")
    assert says in str(caught.value)
    assert "mine.json: profiles[0]" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "arena_jax profiles", "version": 2}'])
def test_what_is_no_export_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        from_json(text, source="mine.json")
