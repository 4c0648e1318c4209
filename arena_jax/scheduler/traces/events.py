"""Node failures, drains and repairs from a file, to be replayed."""

from pathlib import Path

from arena_jax.errors import nearest
from arena_jax.scheduler.cluster import Cluster
from arena_jax.scheduler.simulator import NodeEvent
from arena_jax.scheduler.traces.rows import Row, TraceError, csv_rows, parse_rows, read_text

COLUMNS = ("time_s", "device_type", "node", "kind")
KINDS = ("fail", "drain", "up")


def load_node_events(path: str | Path, cluster: Cluster) -> list[NodeEvent]:
    """Read a CSV with the columns ``time_s`` (seconds after the first arrival), ``device_type``, ``node``, ``kind``.

    ``node`` counts the nodes of the type from 0; ``kind`` is fail, drain or up. Raises :class:`TraceError`
    with the line numbers of all malformed rows.
    """
    text, source = read_text(path, "node events"), str(path)
    header = [name.strip() for name in next(iter(text.lstrip().splitlines()), "").split(",")]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise TraceError(f"{source} lacks the columns {', '.join(missing)}", hint=f"expected {','.join(COLUMNS)}")

    def parse(row: Row) -> NodeEvent:
        group = cluster.group(cluster.catalogue.canonical(row.text("device_type")))
        node, kind = row.count("node", least=0), row.text("kind")
        if node >= group.num_nodes:
            raise ValueError(f"node {node} of {group.num_nodes} {group.device_type} nodes, which count from 0")
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}{nearest(kind, KINDS)}")
        return NodeEvent(time_s=row.number("time_s"), device_type=group.device_type, node=node, kind=kind)

    return parse_rows(csv_rows(text), parse, source, what="events")
