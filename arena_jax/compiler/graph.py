"""The traced loss as a list of nodes that can be cut into stages.

Some equations are *replicable*: cheap functions of one parameter, of the batch alone or of the state
alone (casts, masks, rope tables, dropout masks). They belong to no stage; every stage that needs one
computes it again, so that only real activations cross a cut. All other equations are *placed* and
keep program order.

A ``lax.scan`` over layers is one placed node, and may be cut between any two iterations
(:func:`split_scans`): the stacked inputs are sliced, so that a stage holds only its own layers.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import CUMULATIVE, ELEMENTWISE, REDUCTIONS
from arena_jax.compiler.problem import STATE
from arena_jax.compiler.trace import Trace

# What a value depends on.
PARAM, BATCH, MODEL_STATE, PLACED = 1, 2, 4, 8

_CHEAP = (
    ELEMENTWISE
    | CUMULATIVE
    | frozenset(REDUCTIONS)
    | frozenset(
        [
            "broadcast_in_dim",
            "reshape",
            "transpose",
            "squeeze",
            "expand_dims",
            "slice",
            "iota",
            "concatenate",
            "pad",
            "rev",
            "split",
            "tile",
            "random_bits",
            "random_fold_in",
            "random_unwrap",
            "random_split",
            "random_clone",
            "random_seed",
            "select_and_gather_add",
            "gather",
            "dynamic_slice",
            "stack",
            "unstack",
            "empty",
        ]
    )
)


@dataclass(frozen=True, eq=False)
class Node:
    """One equation of the graph.

    Attributes:
        key: path of the equation in the trace; pieces of one scan share it.
        placed: whether it belongs to one stage.
        flags: what its results depend on.
    """

    eqn: Any
    key: str
    placed: bool
    flags: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A model leaf, or a slice ``[start, stop)`` of its leading dim, as one stage holds it."""

    leaf: int
    start: int | None = None
    stop: int | None = None

    @property
    def is_piece(self) -> bool:
        return self.start is not None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in program order, and how variables relate to the trace's leaves.

    Attributes:
        units: input variable -> the leaf, or piece of one, that it stands for.
        alias: outputs of the trace that a split scan now computes under another variable.
    """

    trace: Trace
    nodes: tuple[Node, ...] = field(repr=False)
    units: Mapping[Any, Unit] = field(repr=False)
    flags: Mapping[Any, int] = field(repr=False)

    def flag(self, atom: Any) -> int:
        return 0 if isinstance(atom, _compat.Literal) else self.flags[atom]


def build_graph(trace: Trace) -> Graph:
    """Classify the equations of a trace, and order them so that state is written where its data is made."""
    keyed = [(str(i), eqn) for i, eqn in enumerate(trace.jaxpr.eqns)]
    units = {var: Unit(leaf=i) for i, var in enumerate(trace.leaf_vars)}
    graph = _classify(trace, keyed, units)
    return replace(graph, nodes=_state_at_once(graph))


def _state_at_once(graph: Graph) -> tuple[Node, ...]:
    """Move what only new state needs to right behind the last value it is made of.

    A trace may end with it, as with the cast of all running statistics: it would lie in another stage than
    the layer that reads them.
    """
    trace = graph.trace
    num_others = len(trace.jaxpr.outvars) - len(trace.state_atoms)
    needed = {a for a in trace.jaxpr.outvars[:num_others] if not isinstance(a, _compat.Literal)}
    others = set()
    for index in reversed(range(len(graph.nodes))):
        eqn = graph.nodes[index].eqn
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            others.add(index)
            needed.update(a for a in eqn.invars if not isinstance(a, _compat.Literal))
    place: dict[Any, int] = {}  # of every value: the node it follows in the new order
    order = []
    for index, node in enumerate(graph.nodes):
        before = max((place.get(a, -1) for a in node.eqn.invars if not isinstance(a, _compat.Literal)), default=-1)
        behind = index if index in others or (node.placed and before < 0) else before
        place.update(dict.fromkeys(node.eqn.outvars, behind))
        order.append((behind, index))
    return tuple(graph.nodes[index] for _, index in sorted(order))


def split_scans(graph: Graph, splits: Mapping[int, Sequence[int]]) -> tuple[Graph, dict[tuple[int, int], int]]:
    """Cut scans between iterations.

    Args:
        splits: node index -> iterations before which to cut, ascending.

    Returns:
        The new graph, and for each ``(old node index, iteration)`` the index of the new node that
        starts there; ``(index, 0)`` is present for every old node.
    """
    trace = graph.trace
    producers = {var: node.eqn for node in graph.nodes for var in node.eqn.outvars}
    # State is small and may be advanced ahead as a whole, so only parameters are held in pieces.
    whole = {i for i, leaf in enumerate(trace.leaves) if leaf.kind == STATE}
    keyed: list[tuple[str, Any]] = []
    units = dict(graph.units)
    pieces: dict[tuple[Any, int, int], Any] = {}
    where: dict[tuple[int, int], int] = {}
    for index, node in enumerate(graph.nodes):
        where[index, 0] = len(keyed)
        if index not in splits:
            keyed.append((node.key, node.eqn))
            continue
        bounds = [0, *splits[index], node.eqn.params["length"]]
        for piece_eqns, start in _split_scan(node.eqn, bounds, producers, units, pieces, whole):
            if start is not None:
                where[index, start] = len(keyed) + len(piece_eqns) - 1
            keyed.extend((node.key, eqn) for eqn in piece_eqns)
    # A leaf that is now used only in pieces is no input any more, and the cast of it as a whole no use.
    used = {a for a in trace.jaxpr.outvars if not isinstance(a, _compat.Literal)}
    for _, eqn in reversed(keyed):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(a for a in eqn.invars if not isinstance(a, _compat.Literal))
    sliced = {unit.leaf for unit in units.values() if unit.is_piece}
    units = {v: u for v, u in units.items() if u.is_piece or u.leaf not in sliced or v in used}
    return _classify(trace, keyed, units), where


def output_flags(eqn: Any, inputs: Sequence[int]) -> list[int]:
    """What each result of an equation depends on, looking into scans and rematerialised blocks."""
    name = eqn.primitive.name
    if name in _compat.REMAT or name in _compat.INLINED:
        return _jaxpr_flags(_compat.inner_jaxpr(eqn)[0], inputs)
    if name == "scan":
        body = _compat.inner_jaxpr(eqn)[0]
        num_consts, num_carry = _compat.scan_sizes(eqn)
        current = list(inputs)
        while True:
            outs = _jaxpr_flags(body, current)
            carry = [a | b for a, b in zip(current[num_consts:][:num_carry], outs[:num_carry], strict=True)]
            if carry == current[num_consts : num_consts + num_carry]:
                return outs
            current[num_consts : num_consts + num_carry] = carry
    union = 0
    for flag in inputs:
        union |= flag
    return [union] * len(eqn.outvars)


def _jaxpr_flags(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    flags: dict[Any, int] = dict.fromkeys(jaxpr.constvars, 0)
    flags.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, _compat.Literal) else flags[atom]

    for eqn in jaxpr.eqns:
        flags.update(zip(eqn.outvars, output_flags(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _classify(trace: Trace, keyed: Sequence[tuple[str, Any]], units: Mapping[Any, Unit]) -> Graph:
    flags: dict[Any, int] = {}
    for var, unit in units.items():
        flags[var] = MODEL_STATE if trace.leaves[unit.leaf].kind == STATE else PARAM
    flags.update(dict.fromkeys(trace.batch_vars, BATCH))
    flags.update(dict.fromkeys(trace.const_vars, 0))
    for var in trace.leaf_vars:  # leaves used only in pieces still appear among the outputs
        flags.setdefault(var, PARAM)
    nodes = []
    for key, eqn in keyed:
        inputs = [0 if isinstance(a, _compat.Literal) else flags[a] for a in eqn.invars]
        union = 0
        for flag in inputs:
            union |= flag
        cheap = eqn.primitive.name in _CHEAP and not eqn.effects
        placed = not (cheap and union in (0, PARAM, BATCH, MODEL_STATE) and _one_leaf(eqn, union, flags))
        outs = output_flags(eqn, inputs)
        if placed:
            # A result that depends on the state alone can be computed ahead even out of a placed scan.
            outs = [out if out in (0, MODEL_STATE) else out | PLACED for out in outs]
        flags.update(zip(eqn.outvars, outs, strict=True))
        nodes.append(Node(eqn=eqn, key=key, placed=placed, flags=union | (PLACED if placed else 0)))
    return Graph(trace=trace, nodes=tuple(nodes), units=units, flags=flags)


def _one_leaf(eqn: Any, union: int, flags: Mapping[Any, int]) -> bool:
    """A replicable function of parameters uses one of them: combining several is real work."""
    if union != PARAM:
        return True
    with_param = {a for a in eqn.invars if not isinstance(a, _compat.Literal) and flags[a] & PARAM}
    return len(with_param) <= 1


def _split_scan(
    eqn: Any,
    bounds: Sequence[int],
    producers: Mapping[Any, Any],
    units: dict[Any, Unit],
    pieces: dict[tuple[Any, int, int], Any],
    whole: set[int],
) -> list[tuple[list[Any], int | None]]:
    """Equations of a scan cut at ``bounds``; each group ends with the scan that starts at its number."""
    num_consts, num_carry = _compat.scan_sizes(eqn)
    consts = list(eqn.invars[:num_consts])
    carry = list(eqn.invars[num_consts : num_consts + num_carry])
    stacked = eqn.invars[num_consts + num_carry :]
    final_carry, ys = eqn.outvars[:num_carry], eqn.outvars[num_carry:]
    groups: list[tuple[list[Any], int | None]] = []
    y_pieces: list[list[Any]] = [[] for _ in ys]
    for start, stop in itertools.pairwise(bounds):
        group: list[Any] = []
        xs = [_slice(x, start, stop, producers, units, pieces, whole, group) for x in stacked]
        last = stop == bounds[-1]
        next_carry = list(final_carry) if last else [_compat.Var(v.aval) for v in final_carry]
        y_vars = []
        for y, parts in zip(ys, y_pieces, strict=True):
            part = _compat.Var(y.aval.update(shape=(stop - start, *y.aval.shape[1:])))
            parts.append(part)
            y_vars.append(part)
        group.append(
            eqn.replace(
                invars=[*consts, *carry, *xs],
                outvars=[*next_carry, *y_vars],
                params={**eqn.params, "length": stop - start},
            )
        )
        groups.append((group, start))
        carry = next_carry
    joins = [_apply(lambda *p: lax.concatenate(p, 0), parts, [y]) for y, parts in zip(ys, y_pieces, strict=True)]
    groups.append(([join for group in joins for join in group], None))
    return groups


def _slice(
    atom: Any,
    start: int,
    stop: int,
    producers: Mapping[Any, Any],
    units: dict[Any, Unit],
    pieces: dict[tuple[Any, int, int], Any],
    whole: set[int],
    group: list[Any],
) -> Any:
    """A variable for ``atom[start:stop]``; slices of leaves become inputs of their own.

    Casts between the leaf and the scan are applied to the slice, so that no stage holds the whole.
    """
    if (atom, start, stop) in pieces:
        return pieces[atom, start, stop]
    unit = units.get(atom)
    producer = producers.get(atom)
    if unit is not None and not unit.is_piece and unit.leaf not in whole:
        var = _compat.Var(atom.aval.update(shape=(stop - start, *atom.aval.shape[1:])))
        units[var] = Unit(leaf=unit.leaf, start=start, stop=stop)
    elif producer is not None and producer.primitive.name == "convert_element_type":
        source = _slice(producer.invars[0], start, stop, producers, units, pieces, whole, group)
        var = _compat.Var(atom.aval.update(shape=(stop - start, *atom.aval.shape[1:])))
        group.append(producer.replace(invars=[source], outvars=[var]))
    else:
        var = _compat.Var(atom.aval.update(shape=(stop - start, *atom.aval.shape[1:])))
        group.extend(_apply(lambda x: lax.slice_in_dim(x, start, stop, axis=0), [atom], [var]))
    pieces[atom, start, stop] = var
    return var


def _apply(function: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Equations that compute ``outputs`` from ``inputs`` as ``function`` does; it must be one equation."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    closed = jax.make_jaxpr(function)(*structs)
    (eqn,) = closed.jaxpr.eqns
    return [eqn.replace(invars=list(inputs), outvars=list(outputs))]
