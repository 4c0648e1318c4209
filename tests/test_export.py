"""A plan as plain Python: run where this package is not, it trains as the package does."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import arena_jax
from arena_jax.compiler import Constraints
from arena_jax.errors import UsageError
from arena_jax.grid import Plan
from tests.plans import row

# A model and batches that both processes make for themselves.
NET = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx

WIDTH, VOCABULARY = 16, 32

class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.qkv = nnx.Param(0.2 * jax.random.normal(rngs.params(), (WIDTH, 3, 4, WIDTH // 4)))
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dkhe->bskhe", x, self.qkv[...]), 2, 0)
        attention = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
        x = x + jnp.einsum("bhqk,bkhe->bqhe", attention, v).reshape(x.shape)
        return x + self.drop(self.down(jax.nn.gelu(self.up(x))))

class Net(nnx.Module):
    def __init__(self, rngs, scan=False, rate=0.1):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.scan = scan
        if scan:
            self.blocks = nnx.vmap(lambda r: Block(r, rate), in_axes=0, out_axes=0)(rngs.split(2))
        else:
            self.blocks = nnx.List([Block(rngs, rate) for _ in range(1)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.scan:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(run(x, self.blocks))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

def batches():
    rng = np.random.default_rng(0)
    for _ in range(3):
        tokens = rng.integers(0, VOCABULARY, (8, 13))
        yield {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}

def optimizer():
    return optax.adamw(1e-2)
"""
SCRIPT = """
import json, sys
sys.modules["arena_jax"] = None  # any import of it fails
import jax
from flax import nnx
import net, plan

def loss_fn(params, state, batch):
    model = nnx.merge(graphdef, params, state)
    value = net.loss(model, batch)
    return value, nnx.state(model, nnx.Not(nnx.Param))

graphdef, params, state = nnx.split(net.Net(nnx.Rngs(0), **MODEL), nnx.Param, ...)
mesh, optimizer = plan.make_mesh(), net.optimizer()
params = plan.place(params, mesh)
opt_state = plan.init_optimizer(optimizer, params, mesh)
state = jax.device_put(state, plan.replicated(mesh))
step = plan.make_train_step(loss_fn, optimizer, mesh, independent_rows=INDEPENDENT)
losses, program = [], None
for batch in net.batches():
    batch = plan.place_batch(batch, mesh)
    if program is None:
        program = step = step.lower(params, opt_state, state, batch).compile()
    params, opt_state, state, loss = step(params, opt_state, state, batch)
    losses.append(float(loss))

def held(tree):
    return {"/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path):
            x.addressable_shards[0].data.shape for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}

print(json.dumps({"losses": losses, "program": program.as_text(), "params": held(params), "opt": held(opt_state),
                  "modules": [m for m in sys.modules if m.startswith("arena_jax.")]}))
"""


def elsewhere(folder: Path, plan: Plan, model: dict[str, Any], *, independent: bool) -> dict[str, Any]:
    """Train with the exported plan in a process that cannot import this package."""
    (folder / "net.py").write_text(NET)
    (folder / "plan.py").write_text(plan.export("jax"))
    (folder / "run.py").write_text(f"MODEL, INDEPENDENT = {model}, {independent}\n{SCRIPT}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def collectives(program: str) -> dict[str, int]:
    """How many collectives of each kind and shape a compiled program has."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\S+|\([^)]*\)) ({kinds})\(", program)
    return dict(sorted(Counter(f"{kind} {shape}" for shape, kind in found).items()))


@pytest.mark.parametrize(
    ("grid", "pins", "num_microbatches", "model"),
    [
        ("cpu:4", {"dp": 2, "tp": 2, "zero": 3, "remat": "on"}, 2, {}),
        ("cpu:2", {"dp": 1, "tp": 2, "remat": "on"}, 1, {"scan": True}),
        ("cpu:2", {"dp": 2, "tp": 1, "zero": 1}, 4, {"rate": 0.0}),
    ],
    ids=["dp, tp, ZeRO-3, remat, microbatches", "scanned, tp, remat", "gradients reduced once"],
)
def test_trains_alike_without_this_package(
    tmp_path: Path, grid: str, pins: dict[str, Any], num_microbatches: int, model: dict[str, Any]
) -> None:
    scope: dict[str, Any] = {}
    exec(NET, scope)
    example = next(scope["batches"]())

    def make(rngs: Any) -> Any:
        return scope["Net"](rngs, **model)

    arguments = make, scope["optimizer"](), scope["loss"], example
    index = arena_jax.plan(
        *arguments, on=[grid], num_microbatches=num_microbatches, constraints=Constraints(stages=1, **pins)
    )
    (found,) = index
    assert found.plan is not None, found.reason
    program = arena_jax.compile(*arguments, plan=found.plan)
    state, losses = program.init(), []
    for batch in scope["batches"]():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    there = elsewhere(tmp_path, found.plan, model, independent="rate" in model)
    assert there["modules"] == []
    their, ours_here = collectives(there["program"]), collectives(program._engine._step.as_text())
    if "rate" in model:  # every sum over dp is behind the microbatches, the loss' too
        assert their == collectives(there["program"].partition("ENTRY")[2]) != {}
    else:  # recomputed layers are cut anew, which may gather a value once more or less
        assert their.keys() == ours_here.keys()
        assert all(abs(their[kind] - ours_here[kind]) <= 1 for kind in their)
    np.testing.assert_allclose(there["losses"], losses, rtol=2e-5)
    assert losses[-1] != losses[0]
    # Every parameter and moment lies as it does here.
    ours = {e.name: e.sharding.shard_shape(e.shape) for e in program.layout.entries}
    names = {name.removesuffix("/value"): tuple(shape) for name, shape in there["params"].items()}
    assert names == {k.removeprefix("params/"): v for k, v in ours.items() if k.startswith("params/")}
    moments = {f"opt/{name.removesuffix('/value')}": tuple(shape) for name, shape in there["opt"].items()}
    assert moments == {k: v for k, v in ours.items() if k.startswith("opt/")}
    assert any(shape != tuple(e.shape) for e in program.layout.entries for shape in [ours[e.name]])


def small_plan(**stage: Any) -> dict[str, Any]:
    """An exported plan of four microbatches of two rows over dp 2, with changes to its stage."""
    plan = row("cpu:2", 1.0).plan
    assert plan is not None
    data = plan.to_json() | {"global_batch": 8, "num_microbatches": 4}
    data["stages"][0] |= {"dp": 2, "tp": 1, "parameters": {}, "activations": {}, **stage}
    scope: dict[str, Any] = {}
    exec(Plan.from_json(data).export("jax"), scope)
    return scope


def one_step(scope: dict[str, Any], loss: Any, *, independent_rows: bool) -> tuple[Any, float, str]:
    """New parameters, the loss, and the compiled step."""
    mesh, optimizer = scope["make_mesh"](), optax.sgd(1.0)
    params = scope["place"]({"w": np.arange(3.0, dtype=np.float32)}, mesh)
    state = jax.device_put({"seen": np.float32(1)}, scope["replicated"](mesh))
    batch = scope["place_batch"](np.arange(24, dtype=np.float32).reshape(8, 3) / 24, mesh)
    step = scope["make_train_step"](loss, optimizer, mesh, independent_rows=independent_rows)
    arguments = params, scope["init_optimizer"](optimizer, params, mesh), state, batch
    compiled = step.lower(*arguments).compile()
    after, _, _, value = compiled(*arguments)
    return np.asarray(after["w"]), float(value), compiled.as_text()


def gradient_reductions_in_loops(program: str) -> int:
    """All-reduces of the parameter's shape in the microbatches' loop."""
    body = re.search(r"body=%?([\w.\-]+)", program)
    assert body is not None
    start = program.index(f"%{body[1]} (")
    return len(re.findall(r" = \S*f32\[3\][^=]* all-reduce\(", program[start : program.index("\n}", start)]))


@pytest.mark.parametrize("weighted", [False, True])
def test_independent_rows_give_the_same_step_and_one_reduction(weighted: bool) -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        rows = ((params["w"][None] * batch) ** 2).sum(1)
        weights = batch[:, 0]
        return (((rows * weights).sum(), weights.sum()) if weighted else rows.mean()), state

    each, once = (one_step(small_plan(), loss, independent_rows=i) for i in (False, True))
    np.testing.assert_allclose(once[0], each[0], rtol=1e-5)
    assert once[1] == pytest.approx(each[1], rel=1e-6)
    assert gradient_reductions_in_loops(each[2]) == 1
    assert gradient_reductions_in_loops(once[2]) == 0
    for pins in ({"zero": 2}, {"parameters": {"w": ["dp"]}}):  # sums per shard would hold what these spare
        same = one_step(small_plan(**pins), loss, independent_rows=True)
        np.testing.assert_allclose(same[0], each[0], rtol=1e-5)


def test_state_that_rows_affect_is_refused_as_independent() -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        return (params["w"][None] * batch).mean(), {"seen": state["seen"] + batch.sum()}

    one_step(small_plan(), loss, independent_rows=False)
    with pytest.raises(ValueError, match="out_axes"):
        one_step(small_plan(), loss, independent_rows=True)


def test_another_loss_is_refused(tmp_path: Path) -> None:
    plan = row("cpu:2", 1.0).plan
    assert plan is not None
    data = plan.to_json()
    data["stages"][0]["activations"] = {"7:0": ["dp"]}
    scope: dict[str, Any] = {}
    exec(Plan.from_json(data).export("jax"), scope)
    step = scope["make_train_step"](
        lambda p, s, b: ((p["w"][None] * b).mean(), s), optax.sgd(1.0), scope["make_mesh"]()
    )
    with pytest.raises(ValueError, match="not the one that was planned: it has no value 7:0"):
        step({"w": jax.numpy.ones(3)}, optax.sgd(1.0).init({"w": jax.numpy.ones(3)}), {}, np.ones((60, 3), np.float32))


def test_several_stages_have_meshes_and_no_step() -> None:
    plan = row("cpu:4/s2", 1.0).plan
    assert plan is not None
    scope: dict[str, Any] = {}
    exec(plan.export("jax"), scope)
    meshes = [scope["make_mesh"](stage) for stage in range(2)]
    assert [[d.id for d in mesh.devices.flat] for mesh in meshes] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="a plan of 2 stages has no step of one program"):
        scope["make_train_step"](lambda p, s, b: (0.0, s), optax.sgd(1.0), meshes[0])


def test_other_forms_are_refused() -> None:
    plan = row("cpu:2", 1.0).plan
    assert plan is not None
    with pytest.raises(UsageError, match="did you mean 'jax'"):
        plan.export("jxa")


def test_independent_rows_are_refused_for_convolutions() -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        kernel = params["w"].reshape(3, 1, 1)
        return jax.lax.conv_general_dilated(
            batch[:, None], kernel, (1,), "SAME", dimension_numbers=("NCH", "HIO", "NCH")
        ).mean(), state

    with pytest.raises(ValueError, match="convolutions"):
        one_step(small_plan(), loss, independent_rows=True)
