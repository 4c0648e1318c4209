"""Cut a graph into stage programs' equations, inputs and outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from arena_jax.compiler import _compat
from arena_jax.compiler.graph import MODEL_STATE, Graph, Node, Unit
from arena_jax.compiler.problem import PARAMS, STATE
from arena_jax.compiler.trace import Trace
from arena_jax.errors import InfeasibleError


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A value that one stage makes and later ones use."""

    var: Any
    producer: int
    consumers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage computes.

    Attributes:
        nodes: its equations in program order, replicable ones included.
        params, frozen: input variables of parameters, each a leaf or a piece.
        state: input variables of state leaves.
        batch, consts: input variables of batch leaves and captured constants.
        batch_index: positions of ``batch`` among the batch leaves.
        received, sent: boundary values that come in and go out.
        outputs: positions, in the trace's output list, of what this stage computes.
    """

    index: int
    nodes: tuple[Node, ...] = field(repr=False)
    params: tuple[Any, ...]
    frozen: tuple[Any, ...]
    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    batch_index: tuple[int, ...]
    consts: tuple[Any, ...]
    received: tuple[Any, ...]
    sent: tuple[Any, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """All stages of a cut, the values that cross it, and the state that can be advanced ahead.

    Attributes:
        advanced: positions among the state leaves whose update depends on no data.
        state_stage: for the other state leaves, the stage that reads and writes them.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    advanced: tuple[int, ...]
    state_stage: dict[int, int]


def is_differentiable(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.floating))


def cut_stages(graph: Graph, starts: Sequence[int], *, with_state: bool = True) -> StageGraph:
    """Cut the graph before the nodes ``starts[1:]``; ``starts[0]`` is 0.

    Args:
        with_state: whether the stages also compute the new state (evaluation does not).

    Raises:
        InfeasibleError: state written in a later stage than it is read in, named.
    """
    num_stages = len(starts)
    stage_of_node = []
    stage = 0
    for index in range(len(graph.nodes)):
        while stage + 1 < num_stages and index >= starts[stage + 1]:
            stage += 1
        stage_of_node.append(stage)
    return _assemble(graph, stage_of_node, num_stages, with_state=with_state)


def assign_stages(graph: Graph, homes: Mapping[Unit, frozenset[int]], num_stages: int) -> StageGraph:
    """Stages for another trace of the same model (evaluation), following where its leaves live.

    A node runs in the first stage that is no earlier than any of its inputs and holds its leaves.
    """
    stage_of_var: dict[Any, int] = {}
    producers = {var: i for i, node in enumerate(graph.nodes) for var in node.eqn.outvars}
    stage_of_node = [0] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        atoms = [a for a in node.eqn.invars if not isinstance(a, _compat.Literal)]
        earliest = max((stage_of_var.get(a, 0) for a in atoms), default=0)
        for unit in _units_behind(atoms, graph, producers):
            later = [s for s in homes.get(unit, ()) if s >= earliest]
            earliest = min(later, default=earliest)
        stage_of_node[index] = earliest
        if node.placed:
            stage_of_var.update(dict.fromkeys(node.eqn.outvars, earliest))
    return _assemble(graph, stage_of_node, num_stages, with_state=False)


def _units_behind(atoms: Sequence[Any], graph: Graph, producers: dict[Any, int]) -> set[Unit]:
    """Model leaves that reach ``atoms`` directly or through replicable equations."""
    found: set[Unit] = set()
    pending = list(atoms)
    while pending:
        atom = pending.pop()
        if atom in graph.units:
            found.add(graph.units[atom])
        elif atom in producers and not graph.nodes[producers[atom]].placed:
            pending.extend(a for a in graph.nodes[producers[atom]].eqn.invars if not isinstance(a, _compat.Literal))
    return found


def _assemble(graph: Graph, stage_of_node: Sequence[int], num_stages: int, *, with_state: bool) -> StageGraph:
    trace = graph.trace
    producers = {var: i for i, node in enumerate(graph.nodes) for var in node.eqn.outvars}
    # For state whose update depends on no data: the state it reads.
    ahead = advanced_ahead(trace, graph) if with_state and num_stages > 1 else {}
    homes = _output_homes(graph, stage_of_node, producers, num_stages, ahead, with_state=with_state)
    needed: list[set[int]] = [set() for _ in range(num_stages)]
    received: list[dict[Any, None]] = [{} for _ in range(num_stages)]
    inputs: list[dict[Any, None]] = [{} for _ in range(num_stages)]
    pending: list[tuple[Any, int]] = []
    for index, node in enumerate(graph.nodes):
        if node.placed:
            needed[stage_of_node[index]].add(index)
            pending.extend((a, stage_of_node[index]) for a in node.eqn.invars)
    for position, home in homes.items():
        pending.append((trace.jaxpr.outvars[position], home))
    seen: set[tuple[Any, int]] = set()
    while pending:
        atom, stage = pending.pop()
        if isinstance(atom, _compat.Literal) or (atom, stage) in seen:
            continue
        seen.add((atom, stage))
        if atom not in producers:
            inputs[stage][atom] = None
            continue
        index = producers[atom]
        if graph.nodes[index].placed:
            if stage_of_node[index] != stage:
                received[stage][atom] = None
        elif index not in needed[stage]:
            needed[stage].add(index)
            pending.extend((a, stage) for a in graph.nodes[index].eqn.invars)
    if with_state:
        # A leaf that no stage reads, such as a counter, still has to be kept and updated somewhere.
        held = {var for used in inputs for var in used}
        written = _stages_that_write(trace, homes)
        for var in graph.units:
            if var not in held:
                inputs[written.get(var, 0)][var] = None
        _add_what_state_reads(trace, ahead, inputs)
    boundaries = _boundaries(received, producers, stage_of_node)
    advanced, state_stage = _state_homes(graph, homes, inputs) if with_state else ((), {})
    stages = tuple(
        _stage(graph, s, needed[s], inputs[s], tuple(received[s]), boundaries, homes) for s in range(num_stages)
    )
    return StageGraph(graph=graph, stages=stages, boundaries=boundaries, advanced=advanced, state_stage=state_stage)


def _output_homes(
    graph: Graph,
    stage_of_node: Sequence[int],
    producers: dict[Any, int],
    num_stages: int,
    ahead: Mapping[int, set[int]],
    *,
    with_state: bool,
) -> dict[int, int]:
    """Position in the trace's outputs -> stage that computes it; state advanced ahead has none."""
    trace = graph.trace
    first_state = len(trace.jaxpr.outvars) - len(trace.state_atoms)
    homes = {}
    for position, atom in enumerate(trace.jaxpr.outvars):
        if position >= first_state and not with_state:
            break
        if position - first_state in ahead:
            continue
        placed = not isinstance(atom, _compat.Literal) and atom in producers and graph.nodes[producers[atom]].placed
        homes[position] = stage_of_node[producers[atom]] if placed else num_stages - 1
    return homes


def _stages_that_write(trace: Trace, homes: Mapping[int, int]) -> dict[Any, int]:
    """Variable of a state leaf -> the stage that computes its new value from data."""
    first_state = len(trace.jaxpr.outvars) - len(trace.state_atoms)
    leaves = trace.state_vars
    return {var: homes[first_state + k] for k, var in enumerate(leaves) if first_state + k in homes}


def advanced_ahead(trace: Trace, graph: Graph) -> dict[int, set[int]]:
    """Positions among the state leaves of those whose update depends on no data, not even through other state.

    Returns:
        For each, the positions of the state leaves that its update reads.
    """
    leaves = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]
    reads: dict[int, set[int]] = {}
    for k, atom in enumerate(trace.state_atoms):
        if graph.flag(atom) in (0, MODEL_STATE):
            used = _compat.inputs_behind(trace.jaxpr, atom)
            reads[k] = {j for j, i in enumerate(leaves) if used[i]}
    while any(not read <= reads.keys() for read in reads.values()):
        reads = {k: read for k, read in reads.items() if read <= reads.keys()}
    return reads


def _add_what_state_reads(trace: Trace, ahead: Mapping[int, set[int]], inputs: Sequence[dict[Any, None]]) -> None:
    """State is advanced ahead on every stage that holds it: each needs what the update reads."""
    leaves = trace.state_vars
    position = {var: k for k, var in enumerate(leaves)}
    for used in inputs:
        pending = [var for var in used if var in position]
        while pending:
            missing = [leaves[j] for j in ahead.get(position[pending.pop()], ()) if leaves[j] not in used]
            used.update(dict.fromkeys(missing))
            pending.extend(missing)


def _boundaries(
    received: Sequence[dict[Any, None]], producers: dict[Any, int], stage_of_node: Sequence[int]
) -> tuple[Boundary, ...]:
    consumers: dict[Any, list[int]] = {}
    for stage, atoms in enumerate(received):
        for atom in atoms:
            consumers.setdefault(atom, []).append(stage)
    return tuple(
        Boundary(var=var, producer=stage_of_node[producers[var]], consumers=tuple(stages))
        for var, stages in sorted(consumers.items(), key=lambda item: producers[item[0]])
    )


def _state_homes(
    graph: Graph, homes: dict[int, int], inputs: Sequence[dict[Any, None]]
) -> tuple[tuple[int, ...], dict[int, int]]:
    trace = graph.trace
    first_state = len(trace.jaxpr.outvars) - len(trace.state_atoms)
    state_leaves = [i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE]
    advanced, state_stage = [], {}
    for k, leaf in enumerate(state_leaves):
        position = first_state + k
        if position not in homes:
            advanced.append(k)
            continue
        var, home = trace.leaf_vars[leaf], homes[position]
        readers = [s for s, used in enumerate(inputs) if var in used]
        if any(s != home for s in readers):
            raise InfeasibleError(
                f"{trace.leaves[leaf].name} is read in stage {min(readers)} and written in stage {home} from data; "
                "state cannot travel backwards through a pipeline",
                hint="use fewer stages, or cut so that its layer lies in one stage",
            )
        state_stage[k] = home
    return tuple(advanced), state_stage


def _stage(
    graph: Graph,
    index: int,
    needed: set[int],
    inputs: dict[Any, None],
    received: tuple[Any, ...],
    boundaries: Sequence[Boundary],
    homes: dict[int, int],
) -> Stage:
    trace = graph.trace

    def ordered(kind: str) -> tuple[Any, ...]:
        chosen = [v for v in inputs if v in graph.units and trace.leaves[graph.units[v].leaf].kind == kind]
        return tuple(sorted(chosen, key=lambda v: _unit_order(graph.units[v])))

    batch_index = tuple(i for i, v in enumerate(trace.batch_vars) if v in inputs)
    return Stage(
        index=index,
        nodes=tuple(graph.nodes[i] for i in sorted(needed)),
        params=ordered(PARAMS),
        frozen=ordered("frozen"),
        state=ordered(STATE),
        batch=tuple(trace.batch_vars[i] for i in batch_index),
        batch_index=batch_index,
        consts=tuple(v for v in trace.const_vars if v in inputs),
        received=received,
        sent=tuple(b.var for b in boundaries if b.producer == index),
        outputs=tuple(position for position, home in homes.items() if home == index),
    )


def _unit_order(unit: Unit) -> tuple[int, int]:
    return unit.leaf, -1 if unit.start is None else unit.start
