"""Checkpoints: what is saved comes back, whatever happened in between, or is refused by name."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from arena_jax.errors import CheckpointError, UsageError
from arena_jax.runtime.checkpoint import CheckpointStore, leaf_types
from arena_jax.runtime.checkpoint_info import FORMAT_VERSION, CheckpointInfo


def sharding(num_devices: int, *spec: str | None, first: int = 0) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[first : first + num_devices]), ("dp",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_tree() -> dict[str, jax.Array | np.ndarray]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "params/blocks.0/kernel": jax.device_put(jax.random.normal(keys[0], (16, 8)), sharding(4, "dp")),
        "params/blocks.1/kernel": jax.device_put(jax.random.normal(keys[1], (16, 8)), sharding(2, None, "dp", first=4)),
        "params/bias": jax.random.normal(keys[2], (3,)).astype(jnp.bfloat16),
        "params/nothing": jnp.zeros((0, 3)),
        "state/key": np.asarray(jax.random.key_data(keys[3])),
        "state/flag": jnp.array(True),
        "opt/0/count": jnp.int32(7),
        "step": np.int64(7),
    }


def info_of(tree: dict[str, jax.Array | np.ndarray], step: int = 7, **changes: object) -> CheckpointInfo:
    values = {
        "step": step,
        "run_id": "run",
        "name": "toy",
        "seed": 0,
        "model_fingerprint": "model",
        "leaves": leaf_types(tree),
        "plan_id": "plan",
        "grid": "cpu:4/s1",
        "plan": {},
        "data_position": {"position": 3},
    }
    return CheckpointInfo(**{**values, **changes})  # type: ignore[arg-type]


def save(store: CheckpointStore, step: int, tree: dict[str, jax.Array | np.ndarray] | None = None) -> None:
    tree = make_tree() if tree is None else tree
    (saved,) = store.save(step, tree, info_of(tree, step)) + store.wait()
    assert saved.error is None
    assert saved.step == step


def wanted_of(tree: dict[str, jax.Array | np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding if isinstance(leaf, jax.Array) else None
        )
        for name, leaf in tree.items()
    }


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    store.prepare()
    return store


def test_what_is_saved_comes_back_under_other_shardings(store: CheckpointStore) -> None:
    tree = make_tree()
    save(store, 7, tree)
    wanted = wanted_of(tree)
    name = "params/blocks.0/kernel"
    wanted[name] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding(8, None, "dp"))
    back = store.restore(7, wanted)
    for key, leaf in tree.items():
        assert back[key].dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(back[key]), np.asarray(leaf))
    assert back[name].sharding == wanted[name].sharding
    assert back[name].addressable_shards[0].data.shape == (16, 1)
    assert store.read_info(7) == info_of(tree, saved_at=store.read_info(7).saved_at)


def test_restored_arrays_can_be_donated(store: CheckpointStore) -> None:
    tree = make_tree()
    save(store, 7, tree)
    back = store.restore(7, wanted_of(tree))
    leaf = back["params/blocks.0/kernel"]
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(leaf))
    assert leaf.is_deleted()


@pytest.mark.parametrize("spec", [("dp",), ()])
def test_arrays_donated_right_after_save_are_saved_as_they_were(store: CheckpointStore, spec: tuple[str, ...]) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jax.device_put(np.random.default_rng(0).normal(size=(1024, 1024)), sharding(2, *spec)))
    before = np.array(x)
    store.save(1, {"params/x": x}, info_of({"params/x": x}, 1))
    for _ in range(20):
        x = step(x)
    (saved,) = store.wait()
    assert saved.error is None
    np.testing.assert_array_equal(store.restore(1, wanted_of({"params/x": x}))["params/x"], before)


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 7):
        save(store, step)
        assert len(store.steps()) <= 4
    store.close()
    assert store.steps() == [4, 5, 6]


def test_a_step_that_is_saved_is_left_alone(store: CheckpointStore) -> None:
    save(store, 7)
    before = store.read_info(7).saved_at
    assert store.save(7, make_tree(), info_of(make_tree())) == []
    assert store.wait() == []
    assert store.read_info(7).saved_at == before


def test_unfinished_saves_are_no_checkpoints_and_are_swept(store: CheckpointStore) -> None:
    save(store, 7)
    unfinished = store.directory / "8.orbax-checkpoint-tmp"
    shutil.copytree(store.path(7), unfinished)
    (store.directory / "6.deleted").mkdir()
    assert store.steps() == [7]
    store.prepare()
    assert sorted(os.listdir(store.directory)) == ["7"]


FILES = [
    ("arrays/manifest.ocdbt", "flip"),
    ("arrays/manifest.ocdbt", "remove"),
    ("arrays/_METADATA", "truncate"),
    ("about/metadata", "truncate"),
    ("about/metadata", "remove"),
    ("digests.json", "remove"),
    ("digests.json", "truncate"),
    ("data", "flip"),
    ("data", "truncate"),
    ("data", "remove"),
]


@pytest.mark.parametrize(("name", "harm"), FILES)
def test_damage_is_one_clear_error(
    store: CheckpointStore, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = make_tree()
    save(store, 5, tree)
    save(store, 7, tree)
    if name == "data":
        file = max(store.path(7).rglob("ocdbt.process_0/d/*"), key=lambda f: f.stat().st_size)
    else:
        file = store.path(7) / name
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    elif harm == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    with caplog.at_level(logging.ERROR), pytest.raises(CheckpointError, match="damaged") as caught:
        store.restore(7, wanted_of(tree))
    assert "step 5" in caught.value.hint
    assert not caplog.records
    assert store.restore(5, wanted_of(tree))["opt/0/count"] == 7


def test_the_first_differing_parameter_is_named(store: CheckpointStore) -> None:
    tree = make_tree()
    save(store, 7, tree)
    wanted = wanted_of(tree)
    wanted["params/bias"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    wanted["opt/0/count"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(
        CheckpointError, match=r"another model.*'params/bias': bfloat16\[3\] in the .*bfloat16\[4\] now"
    ):
        store.restore(7, wanted)
    del wanted["params/bias"]
    with pytest.raises(CheckpointError, match=r"'params/bias': .*absent now"):
        store.restore(7, wanted)
    wanted = wanted_of(tree) | {"opt/0/count": jax.ShapeDtypeStruct((2,), jnp.int32)}
    with pytest.raises(CheckpointError, match=r"another optimizer.*'opt/0/count'"):
        store.restore(7, wanted)


def test_newer_and_foreign_formats_are_refused(store: CheckpointStore) -> None:
    save(store, 7)
    about = store.path(7) / "about" / "metadata"
    content = json.loads(about.read_text())
    about.write_text(json.dumps({**content, "format_version": FORMAT_VERSION + 1}))
    with pytest.raises(CheckpointError, match=f"format version {FORMAT_VERSION + 1}"):
        store.read_info(7)
    about.write_text(json.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="not a checkpoint of arena_jax"):
        store.read_info(7)
    (store.directory / "9").mkdir()
    with pytest.raises(CheckpointError, match="damaged or not made by arena_jax"):
        store.read_info(9)
    with pytest.raises(CheckpointError, match="no checkpoint of step 8") as caught:
        store.read_info(8)
    assert "7" in caught.value.hint


def test_a_directory_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write checkpoints"):
        CheckpointStore(tmp_path / "file" / "checkpoints").prepare()


def test_a_full_disk_fails_one_save_and_not_the_next(store: CheckpointStore) -> None:
    tree = {"params/x": jax.random.normal(jax.random.key(0), (256, 256))}
    save(store, 1, tree)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        done = store.save(2, tree, info_of(tree, 2))
        done += store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(done) == 1
    assert done[0].error is not None
    assert os.listdir(store.directory) == ["1"]
    save(store, 3, tree)
    assert store.steps() == [1, 3]


def test_later_checkpoints_step_aside_when_a_run_goes_back(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    aside = store.set_aside_after(1)
    assert aside is not None
    assert sorted(os.listdir(aside)) == ["2", "3"]
    assert store.steps() == [1]
    assert store.set_aside_after(1) is None


def test_a_process_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, jax, numpy as np
        from arena_jax.runtime.checkpoint import CheckpointStore, leaf_types
        from arena_jax.runtime.checkpoint_info import CheckpointInfo
        store = CheckpointStore(sys.argv[1], keep=2)
        store.prepare()
        for step in range(1, 1000):
            tree = {f"params/{i}": jax.numpy.full((512, 256), float(step)) + i for i in range(4)}
            info = CheckpointInfo(step=step, run_id="", name="", seed=0, model_fingerprint="", plan_id="",
                                  grid="", plan={}, leaves=leaf_types(tree))
            store.save(step, tree, info)
            print(step, flush=True)
        """
    )
    for number in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / str(number))], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 4 + number:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = CheckpointStore(tmp_path / str(number))
        steps = store.steps()
        assert steps
        for step in steps:
            info = store.read_info(step)
            wanted = {k: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for k, (dtype, shape) in info.leaves.items()}
            back = store.restore(step, wanted)
            assert all((back[f"params/{i}"] == float(step) + i).all() for i in range(4))
