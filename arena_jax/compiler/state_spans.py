"""Where state that depends on data is read and written: no cut into stages may come between."""

from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.graph import Graph
from arena_jax.compiler.stages import advanced_ahead


def state_spans(graph: Graph) -> list[tuple[int, int]]:
    """For each state leaf that is updated from data, the nodes that read it first and that write it.

    Reads through replicable nodes count where their result is used. Leaves that one node reads and writes are
    included, as a scan can be cut itself; leaves that nothing placed reads are not.
    """
    trace = graph.trace
    leaves = trace.state_vars
    ahead = advanced_ahead(trace, graph)
    behind: dict[Any, set[int]] = {var: {k} for k, var in enumerate(leaves) if k not in ahead}
    read: dict[int, int] = {}
    written: dict[Any, int] = {}
    for index, node in enumerate(graph.nodes):
        atoms = [a for a in node.eqn.invars if not isinstance(a, _compat.Literal)]
        found = {k for atom in atoms for k in behind.get(atom, ())}
        if node.placed:
            written.update(dict.fromkeys(node.eqn.outvars, index))
            for k in found:
                read.setdefault(k, index)
        elif found:
            behind.update(dict.fromkeys(node.eqn.outvars, found))
    return [
        (read[k], written[atom])
        for k, atom in enumerate(trace.state_atoms)
        if k in read and not isinstance(atom, _compat.Literal) and atom in written
    ]
