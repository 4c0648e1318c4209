"""From a plan to a program: cut the trace, lay out the state, compile every part."""

from collections.abc import Sequence
from typing import Any

import jax

from arena_jax.compiler.graph import build_graph, split_scans
from arena_jax.compiler.intra_op.layout import MeshShape, to_layout
from arena_jax.compiler.layers import Layers, Position, find_layers
from arena_jax.compiler.problem import FROZEN, PARAMS, STATE, Problem
from arena_jax.compiler.row_shards import has_row_shards
from arena_jax.compiler.stages import StageGraph, cut_stages
from arena_jax.compiler.trace import Trace, trace_loss
from arena_jax.errors import PlanError, counted
from arena_jax.grid import Plan
from arena_jax.runtime.engine import Compile, compile_here
from arena_jax.runtime.evaluate import Evaluator
from arena_jax.runtime.layout import Entry, Layout, StageLayout, leaf_names
from arena_jax.runtime.links import Links
from arena_jax.runtime.one_stage import OneStage
from arena_jax.runtime.optimizer import check_optimizer, optimizer_owners
from arena_jax.runtime.pipeline import Pipeline
from arena_jax.runtime.placement import StagePlacement, place_stages
from arena_jax.runtime.program import Program
from arena_jax.runtime.row_shards import RowShards, row_shards
from arena_jax.runtime.stage_function import StageFunction, make_stage_function
from arena_jax.runtime.stage_programs import state_roles
from arena_jax.runtime.update import Home, Slot, SplitUpdate, split_update


def compile_program(
    problem: Problem,
    plan: Plan,
    devices: Sequence[jax.Device] | None = None,
    *,
    nonfinite: str = "stop",
    whole: Trace | None = None,
    coupling: str | None = None,
    links: Links | None = None,
) -> Program:
    """Compile a plan ahead of time.

    Args:
        devices: the devices of the allocation, node-major; default the first ones jax has.
        nonfinite: ``"skip"`` leaves the state unchanged by a step whose loss is not finite.
        whole: the problem's trace at the global batch, where it is at hand.
        coupling: what :func:`~arena_jax.compiler.coupling.couples_samples` says of ``whole``, where it is at hand.
        links: between the stages, where some are in other processes. The devices of these are stand-ins of this
            process, on which nothing is made.

    Raises:
        PlanError: the plan is of another model, batch or number of layers, or against the model's annotations.
        UsageError: fewer devices than the plan needs.
    """
    check_batch(problem, plan)
    placements = place_stages(plan, devices)
    whole = whole or trace_loss(problem, 1)
    check_model(whole, plan)
    engine, layout = make_engine(problem, plan, placements, whole, nonfinite=nonfinite, coupling=coupling, links=links)
    evaluator = Evaluator(problem, placements, layout, links)
    return Program(problem, plan, layout, engine, evaluator, links)


def make_engine(
    problem: Problem,
    plan: Plan,
    placements: Sequence[StagePlacement],
    whole: Trace,
    *,
    nonfinite: str = "stop",
    coupling: str | None = None,
    compile: Compile = compile_here,
    links: Links | None = None,
) -> tuple[OneStage | Pipeline, Layout]:
    """Lower and compile every program of a plan's steps.

    Args:
        placements: the stages' meshes, whose devices need not be here where ``compile`` does not ask for them.
        whole: the problem's trace at the global batch.
        coupling: as :func:`compile_program` takes it.
    """
    skip = nonfinite == "skip"
    trace = whole if plan.num_microbatches == 1 else trace_loss(problem, plan.num_microbatches)
    update_jaxpr = check_optimizer(problem, trace.jaxpr.outvars[0].aval.dtype, skip_nonfinite=skip)
    stage_graph, layer_nodes = cut_by_plan(whole, trace, plan)
    check_annotations(problem, plan, stage_graph)
    functions = [
        make_stage_function(stage_graph.graph.trace, stage, placement, layer_nodes)
        for stage, placement in zip(stage_graph.stages, placements, strict=True)
    ]
    shards = _row_shards(problem, plan, whole, coupling, stage_graph, functions)
    homes = _parameter_homes(problem, stage_graph)
    split = None
    if len(placements) > 1:
        num_optimizer = len(problem.optimizer_names)
        split = split_update(
            update_jaxpr, homes, num_optimizer, loss_stage(stage_graph), len(placements), trace.weighted
        )
    owners = optimizer_owners(problem, update_jaxpr.jaxpr)
    layout = _layout(problem, stage_graph, placements, homes, owners, split)
    num = plan.num_microbatches
    if split is None:
        return OneStage(problem, functions[0], layout, num, shards[0], skip_nonfinite=skip, compile=compile), layout
    pipeline = Pipeline(problem, stage_graph, functions, layout, split, num, shards, compile=compile, links=links)
    return pipeline, layout


def _row_shards(
    problem: Problem,
    plan: Plan,
    whole: Trace,
    coupling: str | None,
    stage_graph: StageGraph,
    functions: Sequence[StageFunction],
) -> list[RowShards | None]:
    """For every stage how it is evaluated shard by shard, ``None`` where it reduces gradients in every microbatch."""
    found: list[RowShards | None] = [None] * len(functions)
    able = [
        s
        for s, stage in enumerate(plan.stages)
        if stage.dp > 1 and stage.zero < 2 and not state_roles(stage_graph, s).dependent
    ]
    if plan.num_microbatches == 1 or not able or not has_row_shards(whole, coupling):
        return found
    has_rows = [leaf.has_rows for leaf in problem.batch]
    for dp in {plan.stages[s].dp for s in able}:
        try:
            trace = trace_loss(problem, plan.num_microbatches * dp)
            parts, layer_nodes = cut_by_plan(whole, trace, plan)
        except PlanError:  # another program at so few rows
            continue
        for s in able:
            if plan.stages[s].dp == dp:
                part = make_stage_function(parts.graph.trace, parts.stages[s], functions[s].placement, layer_nodes)
                found[s] = row_shards(functions[s], part, has_rows)
    return found


def check_batch(problem: Problem, plan: Plan) -> None:
    """Raise :class:`PlanError` when a plan was made for another batch."""
    if plan.global_batch != problem.global_batch:
        raise PlanError(
            f"the plan is for a global batch of {plan.global_batch}, the problem has {problem.global_batch}"
        )


def check_model(whole: Trace, plan: Plan) -> None:
    """Raise :class:`PlanError` when a plan was made for another model, loss or jax version."""
    if plan.model_fingerprint != whole.fingerprint:
        raise PlanError(
            f"the plan was made for model {plan.model_fingerprint}, this one is {whole.fingerprint}",
            hint="a plan belongs to one model, loss, batch and jax version; make it again with `arena-jax plan`",
        )


def check_annotations(problem: Problem, plan: Plan, stage_graph: StageGraph) -> None:
    """Raise :class:`PlanError` when a plan stores a parameter otherwise than the model's annotation says."""
    for stage, stage_plan in zip(stage_graph.stages, plan.stages, strict=True):
        for var in (*stage.params, *stage.frozen):
            name = problem.leaves[stage_graph.graph.units[var].leaf].name
            required = problem.annotations.get(name)
            spec = stage_plan.parameters.get(name, ())
            if required is None:
                continue
            if not required.allows(to_layout(spec, len(required.shape)), MeshShape(stage_plan.dp, stage_plan.tp)):
                raise PlanError(
                    f"the plan stores {name} as {spec} in stage {stage.index}, against {required.what}",
                    hint="make the plan again, or change the annotation or axis_rules",
                )


def cut_by_plan(whole: Trace, trace: Trace, plan: Plan) -> tuple[StageGraph, dict[int, Any]]:
    """Cut a trace where the plan's stages begin.

    Layers are those of the ``whole`` batch, as in the search; at the size of one microbatch their work
    may differ, but the equations are the same.

    Returns:
        The stages, and the equations at which layers begin, by ``id``.
    """
    graph = build_graph(trace)
    whole_graph = graph if trace is whole else build_graph(whole)
    layers = find_layers(whole_graph)
    if [n.eqn.primitive for n in graph.nodes] != [n.eqn.primitive for n in whole_graph.nodes]:
        raise PlanError(
            f"the model computes something else at {trace.rows} rows than at {whole.rows}",
            hint="make its equations independent of the batch size, or use one microbatch",
        )
    if plan.stages[-1].layers[1] != layers.num_layers - 1:
        raise PlanError(
            f"the plan has {counted(plan.stages[-1].layers[1] + 1, 'layer')}, this model has {layers.num_layers}",
            hint="make the plan again for this model and jax version",
        )
    starts = [layers.starts[stage.layers[0]] for stage in plan.stages]
    splits: dict[int, list[int]] = {}
    for position in starts:
        if position.iteration:
            splits.setdefault(position.node, []).append(position.iteration)
    graph, where = split_scans(graph, splits)
    begins = _layer_nodes(layers, where)
    layer_nodes = {id(graph.nodes[i].eqn): i for i in begins}
    stage_graph = cut_stages(graph, [where[p.node, p.iteration] for p in starts])
    return stage_graph, layer_nodes


def loss_stage(stage_graph: StageGraph) -> int:
    """The stage that computes the loss sum."""
    return next(s.index for s in stage_graph.stages if 0 in s.outputs)


def _layer_nodes(layers: Layers, where: dict[tuple[int, int], int]) -> list[int]:
    positions: list[Position] = [p for p in layers.starts if (p.node, p.iteration) in where]
    return [where[p.node, p.iteration] for p in positions]


def _parameter_homes(problem: Problem, stage_graph: StageGraph) -> list[Home]:
    """Where each trainable parameter is updated: the first stage that uses it, or its pieces' stages."""
    units = stage_graph.graph.units
    found: dict[int, dict[tuple[int | None, int | None], int]] = {}
    for stage in stage_graph.stages:
        for var in stage.params:
            unit = units[var]
            found.setdefault(unit.leaf, {}).setdefault((unit.start, unit.stop), stage.index)
    homes: list[Home] = []
    for i in range(len(problem.of_kind(PARAMS))):
        slots = sorted(
            (Slot(stage, start, stop) for (start, stop), stage in found[i].items()), key=lambda s: s.start or 0
        )
        homes.append(tuple(slots))
    return homes


def _layout(
    problem: Problem,
    stage_graph: StageGraph,
    placements: Sequence[StagePlacement],
    homes: Sequence[Home],
    owners: Sequence[int | None],
    split: SplitUpdate | None,
) -> Layout:
    names = leaf_names(problem)
    seen: set[tuple[int, int | None]] = set()
    units = stage_graph.graph.units

    def entry(var: Any, stage: int, kind: str) -> Entry:
        unit = units[var]
        leaf = problem.leaves[unit.leaf]
        placement = placements[stage]
        shape = tuple(var.aval.shape)
        primary = (unit.leaf, unit.start) not in seen
        seen.add((unit.leaf, unit.start))
        return Entry(
            name=names[unit.leaf],
            slot=Slot(stage, unit.start, unit.stop),
            shape=shape,
            dtype=leaf.dtype,
            sharding=placement.replicated if kind == STATE else placement.parameter(leaf.name, shape),
            primary=primary,
            num_rows=leaf.shape[0] if unit.is_piece else None,
        )

    stages = tuple(
        StageLayout(
            params=tuple(entry(v, s.index, PARAMS) for v in s.params),
            frozen=tuple(entry(v, s.index, FROZEN) for v in s.frozen),
            state=tuple(entry(v, s.index, STATE) for v in s.state),
        )
        for s in stage_graph.stages
    )
    return Layout(stages=stages, optimizer=tuple(_optimizer_entries(problem, placements, owners, split)))


def _optimizer_entries(
    problem: Problem, placements: Sequence[StagePlacement], owners: Sequence[int | None], split: SplitUpdate | None
) -> list[Entry]:
    params = problem.of_kind(PARAMS)
    structs = jax.tree.leaves(problem.optimizer_struct)
    homes = split.optimizer_homes if split is not None else ((Slot(0),),) * len(structs)
    entries = []
    for name, struct, owner, home in zip(problem.optimizer_names, structs, owners, homes, strict=True):
        slots = [Slot(s) for s in range(len(placements))] if home[0].stage is None else list(home)
        for k, slot in enumerate(slots):
            assert slot.stage is not None
            rows = () if slot.start is None or slot.stop is None else (slot.stop - slot.start,)
            shape = (*rows, *struct.shape[len(rows) :])
            placement = placements[slot.stage]
            sharding = placement.replicated
            if owner is not None:
                parameter = params[owner]
                owner_shape = (*rows, *parameter.shape[len(rows) :])
                sharding = placement.optimizer(parameter.name, owner_shape, shape)
            entries.append(
                Entry(
                    name=f"opt/{name}",
                    slot=slot,
                    shape=shape,
                    dtype=struct.dtype,
                    sharding=sharding,
                    primary=home[0].stage is not None or k == 0,
                    num_rows=struct.shape[0] if rows else None,
                )
            )
    return entries
