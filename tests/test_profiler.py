"""Profiling: resumable, honest about what is left, and no fault of disk, device or clock serves a wrong number."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from arena_jax import node_rates
from arena_jax.compiler.analysis import Constraints
from arena_jax.compiler.cost import hardware_of
from arena_jax.compiler.cost.cores import share_of_cores
from arena_jax.compiler.cost.pieces import BOTH
from arena_jax.compiler.cost.pieces import Pieces as KnownPieces
from arena_jax.compiler.inter_op.grid_search import estimate_plan, plan_grid
from arena_jax.compiler.profiling import profiler
from arena_jax.compiler.profiling.cores import on_cores
from arena_jax.compiler.profiling.pieces import Pieces, pieces_of
from arena_jax.compiler.profiling.profiler import Outcome, profile
from arena_jax.errors import ArenaError
from arena_jax.grid import Allocation, GridShape, Profile, ProfileStore
from tests.problems import recipe_analysis, recipe_problem

TWO = Allocation("cpu", 1, 2)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path))
    rates = {"format": node_rates._FORMAT, "cores": float(os.cpu_count() or 1), "float32": 1e11, "float64": 5e10}
    rates |= {"convolution": 1e11, "pass_bytes_per_s": 5e9, "bytes_per_s": 1e10}
    (tmp_path / "cpu.json").write_text(json.dumps(rates))
    return tmp_path


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    """The pieces of one-stage plans of a small GPT on two devices, without all but the most telling layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARENA_JAX_HOME", str(tmp_path_factory.mktemp("home")))
        found = pieces_of(recipe_analysis("gpt"), [TWO], hardware_of, constraints=Constraints(stages=1, tp=1))
    return replace(
        found,
        layers=found.layers[:3],
        chains=found.chains[:1],
        updates=found.updates[:1],
        collectives=found.collectives[:1],
    )


def run(pieces: Pieces, store: ProfileStore, **options: object) -> Outcome:
    return profile(pieces, recipe_problem("gpt"), "cpu", store, num_devices=2, **options)  # type: ignore[arg-type]


def test_pieces_are_timed_once_and_estimates_are_made_of_them(few: Pieces, own_home: Path) -> None:
    store = ProfileStore(own_home / "profiles.sqlite")
    analysis = recipe_analysis("gpt")
    before = plan_grid(analysis, GridShape(TWO, 1), hardware_of(TWO), Constraints(tp=1, zero=0, remat="off"), 1)
    assert before.estimate is not None
    assert before.plan is not None
    assert before.estimate.measured_share == 0.0
    told: list[tuple[int, int]] = []
    nothing = run(few, store, budget_s=0.0)
    assert (nothing.timed, nothing.left > 0) == (0, True)
    first = run(few, store, progress=lambda done, total, left_s: told.append((done, total)))
    assert (first.timed, first.known, first.left) == (nothing.left, 0, 0)
    assert told[-1] == (nothing.left, nothing.left)
    assert first.device_s > 0
    again = run(few, store)
    assert (again.timed, again.known, again.left) == (0, nothing.left, 0)
    # Every layer of a kind counts as what was measured of it, on one device of the two.
    after = estimate_plan(analysis, before.plan, hardware_of(TWO))
    assert 0 < after.measured_share <= 1
    share, _ = share_of_cores(2)
    both = [p for p in store.profiles("cpu", "layer") if p.piece["pass"] == BOTH]
    known = {p.piece["layer"]: p for p in both if p.environment["cores"] == share}
    assert known
    assert all(p.noise >= 0 and p.computed_s > 0 and p.seconds > 0 for p in known.values())
    mesh = analysis.meshes(hardware_of(TWO), before.plan.stages[0].submesh, 2, 1)[0]
    for i, program in enumerate(mesh.layer_programs(1)):
        if program is not None and program.key in known:
            forward, backward = (float(x[i]) for x in mesh._compute(1))
            assert forward + backward == pytest.approx(known[program.key].seconds)


def test_a_device_that_disappears_loses_nothing_that_was_stored(
    few: Pieces, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProfileStore(own_home / "profiles.sqlite")
    timed, calls = profiler._timed, [0]

    def failing(runs, devices):
        calls[0] += 1
        if calls[0] > 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: device lost\nstack")
        return timed(runs, devices)

    monkeypatch.setattr(profiler, "_timed", failing)
    with pytest.raises(ArenaError, match="the device failed while pieces were timed: INTERNAL: device lost") as caught:
        run(few, store)
    assert "are kept in" in str(caught.value.hint)
    kept = len(store.profiles())
    assert kept > 0
    monkeypatch.setattr(profiler, "_timed", timed)
    assert run(few, store).known == kept


ONE = Profile(
    device_type="l20", kind="layer", piece={"layer": "a", "pass": BOTH, "like": "b"}, seconds=2.0, computed_s=1.0
)
WRITE = """
import sys, itertools, resource
from dataclasses import replace
from arena_jax.errors import ArenaError
from arena_jax.grid import Profile, ProfileStore
one = Profile(device_type="l20", kind="layer", piece={}, seconds=2.0, computed_s=1.0)
store = ProfileStore(sys.argv[1])
limit = int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for n in itertools.count():
    try:
        store.put([replace(one, piece={"writer": sys.argv[2], "n": n, "pad": "x" * 2000})])
    except ArenaError as error:
        sys.exit(f"{error}; {error.hint}")
    print(n, flush=True)
"""


def writer(path: Path, name: str, *, limit_bytes: int = 0) -> subprocess.Popen[str]:
    """A process that stores profiles until it is ended, or no file may grow further."""
    command = [sys.executable, "-c", WRITE, str(path), name, str(limit_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_among_others_nothing_committed_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    both = [writer(path, name) for name in ("a", "b")]
    for process in both:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "20":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    said = {}
    for process, name in zip(both, ("a", "b"), strict=True):
        out, _ = process.communicate()
        said[name] = max([20, *map(int, out.split())])
    store = ProfileStore(path)
    assert store.set_aside is None
    found = {(p.piece["writer"], p.piece["n"]) for p in store.profiles()}
    assert {(name, n) for name, last in said.items() for n in range(last + 1)} <= found


def test_a_full_disk_is_named_and_keeps_what_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProfileStore(path).put([ONE])
    process = writer(path, "a", limit_bytes=300_000)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "profile store" in err
    assert "what was stored before is kept" in err
    stored = ProfileStore(path).profiles()
    assert ONE in stored
    assert {p.piece["n"] for p in stored if "n" in p.piece} >= {int(n) for n in out.split()}


def test_a_clock_that_jumps_back_makes_no_old_number_new(own_home: Path) -> None:
    store = ProfileStore(own_home / "profiles.sqlite")
    future, now = time.time() + 1e9, time.time()
    store.put([replace(ONE, measured_at=future, environment={"driver": "1"})])
    store.put([replace(ONE, seconds=3.0, measured_at=now, environment={"driver": "2"})])
    hardware = hardware_of(Allocation("l20", 1, 1))
    assert hardware.pieces.layers["a", BOTH] == 3.0
    # What is stamped with a time to come is not old.
    assert store.prune(older_than_s=10) == 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core beside")
def test_other_cores_are_at_work_while_a_piece_is_timed() -> None:
    me, mine = os.getpid(), os.sched_getaffinity(0)
    children = Path(f"/proc/{me}/task/{me}/children")
    before = set(children.read_text().split())
    with on_cores(1):
        assert os.sched_getaffinity(0) == {min(mine)}
        added = set(children.read_text().split()) - before
        assert {frozenset(os.sched_getaffinity(int(p))) for p in added} == {frozenset({c}) for c in mine - {min(mine)}}
    assert os.sched_getaffinity(0) == mine
    assert set(children.read_text().split()) <= before


def test_profiles_of_other_cores_or_versions_are_not_of_this_cpu(own_home: Path) -> None:
    store = ProfileStore(own_home / "profiles.sqlite")
    here = profiler.environment_of(jax.devices()[0], max(1, (os.cpu_count() or 1) // 2))
    mine = replace(ONE, device_type="cpu", environment=here)
    for change in ({"cores": 999}, {"jax": "0.0.1"}, {"xla_flags": "--other"}, {"others": "idle"}):
        store.put([replace(mine, environment=here | change)])
    assert hardware_of(TWO).pieces.layers == {}
    store.put([mine])
    assert hardware_of(TWO).pieces.layers == {("a", BOTH): 2.0}
    # Where devices outnumber cores each has its part of one.
    eight = hardware_of(Allocation("cpu", 1, 8)).pieces.layers
    assert eight == ({("a", BOTH): 2.0 * 8 / (os.cpu_count() or 1)} if (os.cpu_count() or 1) in (2, 3) else eight)


def test_layers_in_one_program_cost_more_by_what_it_keeps() -> None:
    known = hardware_pieces({10e6: 0.0, 100e6: 0.09})
    assert list(known.crossing_s(np.array([0.0, 10e6, 55e6, 200e6]))) == pytest.approx([0.0, 0.0, 0.045, 0.18])
    # A block of 32 MiB and more is found anew at every step, but once however often the program loops.
    assert known.fresh_memory_s(20e6) == 0.0
    assert known.fresh_memory_s(100e6) == pytest.approx(0.05)
    assert known.fresh_memory_s(40e6) == pytest.approx(min(0.02, 0.03))


def hardware_pieces(crossing: dict[float, float]) -> KnownPieces:
    return KnownPieces(crossing=(tuple(crossing), tuple(crossing.values())), fresh_s=0.5e-9)


def test_a_chain_that_measured_something_else_is_left_out(own_home: Path) -> None:
    store = ProfileStore(own_home / "profiles.sqlite")
    chain = {"chain": "c", "layers": ["a", "a"], "saved_bytes": 1000}
    store.put([ONE, replace(ONE, kind="chain", piece=chain, seconds=5.0)])
    pieces = hardware_of(Allocation("l20", 1, 1)).pieces
    assert pieces.crossing == ((1000.0,), (1.0,))  # 5 s against two layers of 2 s
    store.put([replace(ONE, kind="chain", piece=chain, seconds=50.0)])
    assert hardware_of(Allocation("l20", 1, 1)).pieces.crossing is None
    store.put([replace(ONE, kind="chain", piece=chain | {"layers": ["a", "b"]}, seconds=5.0)])
    assert hardware_of(Allocation("l20", 1, 1)).pieces.crossing is None  # one of its layers is not known
