"""Stages cut from a trace and run one after the other are the trace."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core as jex_core

from arena_jax.compiler import Analysis, Problem, _compat, analyse, make_problem
from arena_jax.compiler.emit import Emitter
from arena_jax.compiler.graph import BATCH, MODEL_STATE, PARAM, split_scans
from arena_jax.compiler.layers import Position
from arena_jax.compiler.stages import StageGraph, cut_stages
from arena_jax.compiler.state_spans import state_spans
from arena_jax.errors import InfeasibleError
from tests.doubles import WIDTH, Toy
from tests.problems import random_batch, recipe_analysis

# The models, and what INTERFACE promises to be ordinary input.
CASES = {
    "gpt": ("gpt", "model.tie_embeddings=false"),
    "tied embedding": ("gpt",),
    "scan": ("gpt", "model.scan_layers=true"),
    "rematerialised blocks": ("gpt", "model.remat=true"),
    "rematerialised scan": ("gpt", "model.scan_layers=true", "model.remat=true"),
    "scan with dropout": ("gpt", "model.scan_layers=true", "model.dropout=0.1"),
    "experts": ("moe",),
    "running statistics": ("wide_resnet",),
}


class Values:
    """Numbers for every input of a trace, and what the whole trace makes of them."""

    def __init__(self, analysis: Analysis) -> None:
        problem, trace = analysis.problem, analysis.trace
        rng = np.random.default_rng(0)
        leaves = problem.make_values(nnx.Rngs(0))
        self.leaves = [
            x
            if leaf.is_key or not jnp.issubdtype(leaf.dtype, jnp.floating)
            else x + 0.02 * rng.standard_normal(x.shape)
            for x, leaf in zip(leaves, trace.leaves, strict=True)
        ]
        self.leaves = [
            x if leaf.is_key else x.astype(leaf.dtype) for x, leaf in zip(self.leaves, trace.leaves, strict=True)
        ]
        self.batch = jax.tree.leaves(random_batch(problem))
        self.inputs = dict(zip(trace.jaxpr.invars, [*self.leaves, *self.batch, *trace.consts], strict=True))
        run = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(trace.jaxpr, [])))
        self.outputs = run(*self.inputs.values())


@cache
def values(name: str) -> tuple[Analysis, Values]:
    analysis = recipe_analysis(*CASES[name])
    return analysis, Values(analysis)


def cut(analysis: Analysis, starts: Sequence[Position]) -> StageGraph:
    splits: dict[int, list[int]] = {}
    for position in starts:
        if position.iteration:
            splits.setdefault(position.node, []).append(position.iteration)
    graph, where = split_scans(analysis.graph, splits)
    return cut_stages(graph, [where[p.node, p.iteration] for p in starts])


def run_stages(stage_graph: StageGraph, given: Values) -> dict[int, Any]:
    """Run the stages in order, each with only its own inputs; return the trace's outputs by position."""
    graph, trace = stage_graph.graph, stage_graph.graph.trace

    def value_of(var: Any) -> Any:
        if var in graph.units:
            unit = graph.units[var]
            whole = given.leaves[unit.leaf]
            return whole[unit.start : unit.stop] if unit.is_piece else whole
        return given.inputs[var]

    def everything() -> dict[int, Any]:
        sent: dict[Any, Any] = {}
        outputs: dict[int, Any] = {}
        for stage in stage_graph.stages:
            own = (*stage.params, *stage.frozen, *stage.state, *stage.batch, *stage.consts)
            env = {var: value_of(var) for var in own}
            env |= {var: sent[var] for var in stage.received}
            Emitter(None, {}).run([(node.key, node.eqn) for node in stage.nodes], env)
            sent |= {var: env[var] for var in stage.sent}
            for position in stage.outputs:
                atom = trace.jaxpr.outvars[position]
                outputs[position] = atom.val if isinstance(atom, _compat.Literal) else env[atom]
        return outputs

    return jax.jit(everything)()


def numbers(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if _compat.is_key(value) else value)


def check_stages(analysis: Analysis, given: Values, starts: Sequence[Position]) -> StageGraph:
    stage_graph = cut(analysis, starts)
    outputs = run_stages(stage_graph, given)
    first_state = len(given.outputs) - len(analysis.trace.state_atoms)
    ahead = {first_state + k for k in stage_graph.advanced}
    assert outputs.keys() | ahead == set(range(len(given.outputs)))
    for position, value in outputs.items():
        np.testing.assert_allclose(numbers(value), numbers(given.outputs[position]), rtol=2e-4, atol=1e-5)
    for boundary in stage_graph.boundaries:
        assert all(consumer > boundary.producer for consumer in boundary.consumers)
    return stage_graph


@pytest.mark.parametrize("name", CASES)
def test_cut_at_every_layer_the_stages_are_the_trace(name: str) -> None:
    analysis, given = values(name)
    stage_graph = check_stages(analysis, given, analysis.layers.starts)
    assert len(stage_graph.stages) == analysis.layers.num_layers


@pytest.mark.parametrize("name", ["scan", "scan with dropout", "rematerialised scan"])
def test_a_scan_may_be_cut_between_any_two_iterations(name: str) -> None:
    analysis, given = values(name)
    (node,) = [i for i, n in enumerate(analysis.graph.nodes) if n.eqn.primitive.name == "scan"]
    for iterations in ([1], [3], [1, 3]):
        starts = [Position(0), *(Position(node, i) for i in iterations)]
        stage_graph = check_stages(analysis, given, starts)
        bounds = [0, *iterations, 4]
        for stage, start, stop in zip(stage_graph.stages, bounds, bounds[1:], strict=False):
            units = [stage_graph.graph.units[v] for v in stage.params]
            pieces = {(u.start, u.stop) for u in units if u.is_piece}
            # A stage holds the rows of its own layers and no others.
            assert pieces == {(start, stop)}


def test_a_stack_that_is_cast_before_its_scan_is_held_in_pieces_alone() -> None:
    """The parameters are cast for the loss: what is left of the cast of a whole stack is nobody's."""
    analysis = recipe_analysis("gpt", "model.scan_layers=true", "precision.compute=bfloat16")
    (node,) = [i for i, n in enumerate(analysis.graph.nodes) if n.eqn.primitive.name == "scan"]
    stage_graph = cut(analysis, [Position(0), Position(node, 2)])
    units = [stage_graph.graph.units[v] for stage in stage_graph.stages for v in stage.params]
    stacked = {u.leaf for u in units if u.is_piece}
    assert stacked
    assert not {u.leaf for u in units if not u.is_piece} & stacked


def test_tied_embeddings_are_used_in_two_stages() -> None:
    analysis, _ = values("tied embedding")
    stage_graph = cut(analysis, [Position(0), analysis.layers.starts[5]])
    names = [
        {analysis.trace.leaves[stage_graph.graph.units[v].leaf].name for v in stage.params}
        for stage in stage_graph.stages
    ]
    assert names[0] & names[1] == {"embedding"}


def test_only_the_stream_is_sent() -> None:
    analysis, _ = values("gpt")
    stage_graph = cut(analysis, analysis.layers.starts)
    for stage in stage_graph.stages[1:]:
        assert len(stage.received) == 1
    assert all(b.consumers == (b.producer + 1,) for b in stage_graph.boundaries)


class Plain(nnx.Module):
    """Layers with what users write: their own jit, a custom derivative, state and a mask of the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.toys = nnx.List([Toy(rngs) for _ in range(3)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls[...] + 1)
        for toy in self.toys:
            x = x + jax.jit(lambda toy_x: nnx.relu(toy_x))(toy(x))
        return x


def plain_loss(model: Plain, batch: Any) -> jax.Array:
    mask = (batch["y"] > 0).astype("float32") * jnp.arange(WIDTH, dtype="float32")[None]
    return jax.jit(lambda x: jnp.mean((x - batch["y"]) ** 2 * mask))(model(batch["x"]))


@cache
def plain() -> tuple[Analysis, Values]:
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    analysis = analyse(make_problem(Plain, optax.sgd(0.1), plain_loss, {"x": x, "y": x}))
    return analysis, Values(analysis)


def test_jit_inside_the_loss_is_no_wall() -> None:
    analysis, given = plain()
    names = {node.eqn.primitive.name for node in analysis.graph.nodes}
    assert not names & _compat.INLINED
    for start in [i for i, n in enumerate(analysis.graph.nodes) if n.placed][1:]:
        check_stages(analysis, given, [Position(0), Position(start)])


def test_what_is_cheap_and_of_one_kind_belongs_to_no_stage() -> None:
    analysis, _ = plain()
    for node in analysis.graph.nodes:
        if not node.placed:
            assert node.flags in (0, PARAM, BATCH, MODEL_STATE)
    free = [n.eqn.primitive.name for n in analysis.graph.nodes if not n.placed]
    # The mask of the batch, the positions and the counter; no product, and nothing of the stream.
    assert {"gt", "iota", "add"} <= set(free)
    placed = [n.eqn.primitive.name for n in analysis.graph.nodes if n.placed]
    assert placed.count("dot_general") == 6
    assert "dot_general" not in free


def test_state_that_depends_on_no_data_is_advanced_ahead() -> None:
    analysis, _ = plain()
    stage_graph = cut(analysis, [Position(0), analysis.layers.starts[1]])
    assert [analysis.problem.of_kind("state")[k].name for k in stage_graph.advanced] == ["calls"]
    assert stage_graph.state_stage == {}
    # No stage reads the counter, and one keeps it all the same.
    assert [len(stage.state) for stage in stage_graph.stages] == [1, 0]


class Diary(Plain):
    """State read by nobody, from data and from other state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last = nnx.Variable(jnp.zeros((WIDTH,)))
        self.before_last = nnx.Variable(jnp.zeros((WIDTH,)))
        self.twice = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.twice.set_value(2 * self.calls[...])
        out = super().__call__(x * (1 + self.twice[...].astype("float32")))
        self.before_last.set_value(self.last[...])
        self.last.set_value(out.mean(0))
        return out


def test_state_that_is_only_written_stays_where_it_is_written() -> None:
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    analysis = analyse(make_problem(Diary, optax.sgd(0.1), plain_loss, {"x": x, "y": x}))
    stage_graph = check_stages(analysis, Values(analysis), [Position(0), analysis.layers.starts[-1]])
    names = [leaf.name for leaf in analysis.problem.of_kind("state")]
    assert [names[k] for k in stage_graph.advanced] == ["calls", "twice"]
    # What follows from data, at one remove too, is not known ahead; both are of the last stage.
    assert {names[k]: stage for k, stage in stage_graph.state_stage.items()} == {"last": 1, "before_last": 1}
    graph = stage_graph.graph
    held = [{graph.trace.leaves[graph.units[v].leaf].name for v in stage.state} for stage in stage_graph.stages]
    assert held == [{"calls", "twice"}, {"last", "before_last"}]


class Late(Plain):
    """Updates the statistics of the first layer after the last one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.mean = nnx.Variable(jnp.zeros((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.toys[0](x)
        out = super().__call__(x)
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * x.mean(0))
        return out


def test_state_is_written_in_the_stage_of_the_data_it_is_made_of() -> None:
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    analysis = analyse(make_problem(Late, optax.sgd(0.1), plain_loss, {"x": x, "y": x}))
    for start in analysis.layers.starts[2:]:
        stage_graph = check_stages(analysis, Values(analysis), [Position(0), start])
        assert set(stage_graph.state_stage.values()) == {0}


class Backward(Plain):
    """Reads early what it writes late."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.seen = nnx.Variable(jnp.zeros((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        out = super().__call__(x + self.seen[...][None])
        self.seen.set_value(out.mean(0))
        return out


class Midway(Backward):
    """Reads state after the first layers."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.toys[1](self.toys[0](x)))


def test_layers_are_not_cut_between_what_reads_and_what_writes_state() -> None:
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    analysis = analyse(make_problem(Midway, optax.sgd(0.1), plain_loss, {"x": x, "y": x}))
    (span,) = state_spans(analysis.graph)
    assert span[0] < span[1]
    assert analysis.layers.num_layers > 1
    assert not [p for p in analysis.layers.starts if span[0] < p.node <= span[1]]
    check_stages(analysis, Values(analysis), analysis.layers.starts)


def test_state_that_would_travel_backwards_is_refused_by_name() -> None:
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    problem: Problem = make_problem(Backward, optax.sgd(0.1), plain_loss, {"x": x, "y": x})
    analysis = analyse(problem)
    with pytest.raises(InfeasibleError, match=r"(?s)seen is read in stage 0 and written in stage 1.*fewer stages"):
        cut(analysis, [Position(0), Position(state_spans(analysis.graph)[0][1])])
