"""Write a search's choices down as a plan: the specs of the parameters and values of every stage."""

import re
from collections.abc import Sequence
from typing import Any

from arena_jax.compiler.analysis import Analysis
from arena_jax.compiler.inter_op.cuts import StageChoice
from arena_jax.compiler.inter_op.stage_cost import MeshCost, Option
from arena_jax.compiler.intra_op.layout import Axes
from arena_jax.compiler.intra_op.sharding import Sharding
from arena_jax.compiler.layers import Layers
from arena_jax.compiler.problem import PARAMS
from arena_jax.grid import GridShape, Plan, Spec, StagePlan, Submesh, zero_spec


def make_plan(
    analysis: Analysis,
    grid: GridShape,
    num_microbatches: int,
    stages: Sequence[tuple[StageChoice, tuple[MeshCost, Option]]],
) -> Plan:
    problem = analysis.problem
    return Plan(
        model_fingerprint=analysis.trace.fingerprint,
        global_batch=problem.global_batch,
        grid=grid,
        num_microbatches=num_microbatches,
        precision=problem.precision,
        stages=tuple(
            stage_plan(
                analysis,
                layers=(choice.first, choice.last),
                submesh=choice.submesh,
                sharding=mesh.work.sharding,
                option=option,
            )
            for choice, (mesh, option) in stages
        ),
    )


def stage_plan(
    analysis: Analysis, *, layers: tuple[int, int], submesh: Submesh, sharding: Sharding, option: Option
) -> StagePlan:
    """A stage of a plan: the specs of the values and parameters its layers use."""
    trace = analysis.trace
    first, last = _node_range(analysis.layers, layers, len(analysis.graph.nodes))
    used, again = _used(analysis, first, last)
    activations = {}
    if sharding.dp * sharding.tp > 1:
        for key, axes in sharding.specs.items():
            if first <= _node_of(key) <= last or key.partition("<")[0].partition(":")[0] in again:
                activations[key] = _spec(axes)
    parameters: dict[str, Spec] = {}
    for leaf_number, axes in sharding.parameters.items():
        parameters[trace.leaves[leaf_number].name] = _spec(axes)
    if option.zero == 3:
        for number, leaf in enumerate(trace.leaves):
            if leaf.kind == PARAMS:
                required = trace.annotations.leaves.get(number)
                # What an annotation says of a dim stands.
                dims = (None,) * len(leaf.shape) if required is None else required.dims
                shape = [size if axes is None else 1 for size, axes in zip(leaf.shape, dims, strict=True)]
                parameters[leaf.name] = zero_spec(parameters.get(leaf.name, ()), shape, sharding.dp)
    return StagePlan(
        layers=layers,
        submesh=submesh,
        dp=sharding.dp,
        tp=sharding.tp,
        zero=option.zero,
        remat=option.remat,
        parameters={name: spec for name, spec in parameters.items() if name in used and any(spec)},
        activations=activations,
    )


def _node_range(layers: Layers, run: tuple[int, int], num_nodes: int) -> tuple[int, int]:
    """Nodes a run of layers touches; the value that enters it is made by the node before."""
    first = layers.starts[run[0]].node
    if run[1] + 1 == layers.num_layers:
        return max(first - 1, 0), num_nodes - 1
    end = layers.starts[run[1] + 1]
    return max(first - 1, 0), end.node if end.iteration else end.node - 1


def _used(analysis: Analysis, first: int, last: int) -> tuple[set[str], set[str]]:
    """Names of the leaves that a run of nodes uses, and keys of the earlier nodes it computes again."""
    graph = analysis.graph
    producers = {v: node for node in graph.nodes for v in node.eqn.outvars}
    pending: list[Any] = [a for node in graph.nodes[first : last + 1] for a in node.eqn.invars]
    found: set[str] = set()
    again: set[str] = set()
    seen: set[int] = set()
    while pending:
        atom = pending.pop()
        if hasattr(atom, "val") or id(atom) in seen:
            continue
        seen.add(id(atom))
        if atom in graph.units:
            found.add(analysis.trace.leaves[graph.units[atom].leaf].name)
        elif atom in producers and not producers[atom].placed:
            again.add(producers[atom].key)
            pending.extend(producers[atom].eqn.invars)
    return found, again


def _node_of(key: str) -> int:
    """The equation of the trace that a key is in."""
    match = re.match(r"\d+", key)
    assert match is not None
    return int(match[0])


def _spec(axes: Axes) -> Spec:
    spec = list(axes)
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)
