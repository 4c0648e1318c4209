"""``arena-jax plan --report``: one HTML page that needs nothing else."""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from arena_jax.cli.plan_explain import HELD, Named, cause_text, explain_lines, size
from arena_jax.cli.plan_report import table_rows
from arena_jax.cli.plan_trace import span_text
from arena_jax.cli.progress import meshes, seconds
from arena_jax.grid import IndexRow, Plan, Spec
from arena_jax.page import svg
from arena_jax.page.document import document, folded, table
from arena_jax.runtime.timeline import idle_share, timeline

if TYPE_CHECKING:
    from arena_jax.compiler.problem import Leaf

# More microbatches than this are not told apart in a picture.
_MOST_DRAWN = 400
_PARTS = ("compute", "forward collectives", "backward collectives", "gathered parameters", "update")
_TIME_COLORS = dict(zip(_PARTS, svg.PALETTE, strict=False))
_MEMORY_COLORS = dict(
    zip(("parameters", "gradients", "optimizer state", "activations", "other"), svg.PALETTE, strict=False)
)
_SPAN_COLORS = {"forward": "#56b4e9", "backward": "#e69f00", "update": "#009e73"}


def render(
    report: Mapping[str, Any], unit: str, plans: Sequence[Named], leaves: Sequence["Leaf"], best: Sequence[Named]
) -> str:
    """The page as text.

    Args:
        report: the object of ``--json``.
        unit: what is counted per second.
        plans: every plan by name.
        leaves: the model's leaves, whose shapes the sharding is shown with.
        best: the best plan of each allocation.
    """
    title = f"Plans of {report['model']}"
    rows = table_rows(report)
    parts = [
        f"<h1>{escape(title)}</h1><p>{_intro(report)}</p>",
        "<h2>Grids</h2>",
        _grids(rows, unit, set(report["best"].values())),
        "<h2>Time against memory</h2>",
        _scatter(rows),
        "<p>Rings are plans written by hand.</p>" if report.get("compared") else "",
    ]
    explained = {said["allocation"]: said for said in report.get("explanations", ())}
    for number, plan in enumerate(best):
        said = explained.get(str(plan.row.grid.allocation))
        parts.append(folded(f"Best on {plan.row.grid.allocation}: {plan.name}", _best(plan, leaves, said), number == 0))
    others = [plan for plan in plans if plan.row.feasible and plan not in best]
    if others:
        parts.append("<h2>Timelines of the other plans</h2>")
        parts += [folded(plan.name, _timeline(plan.row), False) for plan in others]
    return document(title, parts)


def _intro(report: Mapping[str, Any]) -> str:
    measured = max((grid["measured_share"] or 0.0 for grid in report["grids"]), default=0.0)
    source = f"up to {measured:.0%} of a time was measured" if measured else "no part of a time was measured"
    return escape(
        f"{report['num_parameters']:,} parameters, global batch {report['global_batch']}. Times and bytes are "
        f"predicted; {source}. Searched in {report['search_s']:.1f} s."
    )


def _grids(rows: Sequence[Mapping[str, Any]], unit: str, best: set[str]) -> str:
    head = ["grid", "dp x tp", "zero", "remat", "microbatches", "step", f"{unit}/s", "MFU", "memory", "usable"]
    body: list[list[str]] = []
    for row in rows:
        name = escape(row["grid"])
        if not row["feasible"]:
            body.append([name, f'<td class="left" colspan="{len(head) - 1}">{escape(row["reason"])}</td>'])
            continue
        stages = row["stages"]
        mark = ' class="best"' if not row.get("name") and row["plan_id"] in best else ""
        body.append(
            [
                f"<td{mark}>{name}</td>",
                meshes([(stage["dp"], stage["tp"]) for stage in stages]),
                _each(str(stage["zero"]) for stage in stages),
                _each("yes" if stage["remat"] else "no" for stage in stages),
                str(row["num_microbatches"]),
                f"<td{mark}>{seconds(row['step_time_s'])}</td>",
                f"{row['tokens_or_samples_per_s']:,.0f}",
                f"{row['mfu']:.1%}",
                size(row["memory_bytes"]),
                size(row["device_memory_bytes"]),
            ]
        )
    return table(head, body)


def _each(values: Iterator[str]) -> str:
    found = list(values)
    return found[0] if len(set(found)) == 1 else " ".join(found)


def _scatter(rows: Sequence[Mapping[str, Any]]) -> str:
    feasible = [row for row in rows if row["feasible"]]
    allocations = list(dict.fromkeys(row["grid"].split("/")[0].split(" ")[0] for row in feasible))
    colors = {name: svg.PALETTE[i % len(svg.PALETTE)] for i, name in enumerate(allocations)}
    unit, scale = _byte_unit(max((row["memory_bytes"] for row in feasible), default=0))
    points, limits = [], {}
    for row in feasible:
        allocation = row["grid"].split("/")[0].split(" ")[0]
        text = row.get("name") or row["grid"].partition("/")[2]
        points.append(
            svg.Point(
                x=row["memory_bytes"] / scale,
                y=row["step_time_s"],
                color=colors[allocation],
                text=text,
                hollow=bool(row.get("name")),
                label=f"{row['grid']}: {seconds(row['step_time_s'])}, {size(row['memory_bytes'])}",
            )
        )
        limits[f"{allocation} usable"] = (row["device_memory_bytes"] / scale, colors[allocation])
    chart = svg.points(
        points,
        x_label=f"memory of the fullest device, {unit}",
        y_label="one step",
        limits=limits,
        x_text=lambda value: f"{value:g}",
        y_text=svg.duration,
    )
    return chart + svg.legend(colors)


def _best(plan: Named, leaves: Sequence["Leaf"], said: Mapping[str, Any] | None) -> str:
    row = plan.row
    assert row.plan is not None
    assert row.estimate is not None
    parts = ["<h3>One step</h3>", _step_bar(row)]
    if len(row.estimate.stages) > 1:
        parts += ["<h3>Time of each stage</h3><p>A whole step's work, without waiting.</p>", _time_bars(row)]
    parts += ["<h3>Memory of a device of each stage</h3>", _memory_bars(row)]
    parts += ["<h3>Predicted 1F1B timeline</h3>", _timeline(row)]
    parts += ["<h3>How parameters are sharded</h3>", _sharding(row.plan, leaves)]
    if said is not None:
        text = escape("\n".join(explain_lines(said)))
        parts += ["<h3>Explained</h3>", f'<div class="scroll"><pre>{text}</pre></div>']
    return "".join(parts)


def _step_bar(row: IndexRow) -> str:
    assert row.estimate is not None
    parts = {cause_text(cause): value for cause, value in row.estimate.breakdown.items()}
    colors = {part: svg.PALETTE[i % len(svg.PALETTE)] for i, part in enumerate(parts)}
    return svg.bars({"step": parts}, colors, x_label="seconds by cause, pipeline filling included", text=svg.duration)


def _time_bars(row: IndexRow) -> str:
    assert row.estimate is not None
    m = row.num_microbatches
    bars = {}
    for number, stage in enumerate(row.estimate.stages):
        by_kind = [m * stage.communication.get(kind, 0.0) for kind in ("forward", "backward", "parameters")]
        bars[f"stage {number}"] = dict(zip(_PARTS, (m * stage.compute_s, *by_kind, stage.update_s), strict=True))
    return svg.bars(bars, _TIME_COLORS, x_label="seconds a step", text=svg.duration)


def _memory_bars(row: IndexRow) -> str:
    assert row.estimate is not None
    unit, scale = _byte_unit(row.estimate.memory_bytes)
    bars = {}
    for number, stage in enumerate(row.estimate.stages):
        parts = {HELD.get(part, part): value / scale for part, value in stage.memory.items()}
        known = {part if part in _MEMORY_COLORS else "other": value for part, value in parts.items()}
        bars[f"stage {number}"] = known
    usable = row.estimate.device_memory_bytes
    limit = usable / scale, f"usable: {size(usable)}"
    text = f"{unit} of one device, {size(usable)} usable"
    return svg.bars(bars, _MEMORY_COLORS, x_label=text, text=lambda value: f"{value:.3g}", limit=limit)


def _byte_unit(most: float) -> tuple[str, int]:
    """A unit in which so many bytes are a number to read, and its bytes."""
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20) if most >= 2**20 else ("KiB", 2**10)


def _timeline(row: IndexRow) -> str:
    assert row.plan is not None
    assert row.estimate is not None
    spans = timeline(row.estimate.stages, row.num_microbatches, step_time_s=row.estimate.step_time_s)
    end = max(span.end_s for span in spans)
    bars = [
        svg.Bar(
            row=span.stage,
            start=span.start_s,
            end=span.end_s,
            color=_SPAN_COLORS[span.kind],
            label=f"stage {span.stage}, {span_text(span)}: {seconds(span.end_s - span.start_s)}",
            text="" if span.microbatch is None else str(span.microbatch),
        )
        for span in spans
        if span.kind in _SPAN_COLORS
    ]
    if len(bars) > _MOST_DRAWN:
        return f"<p>{len(bars)} programs are too many to draw; --trace writes them for Perfetto.</p>"
    names = [f"stage {number}" for number in range(len(row.plan.stages))]
    chart = svg.gantt(bars, len(names), x_label="time in a step", names=names, row_height=26.0)
    idle = idle_share(spans, len(row.plan.stages))
    told = (
        f"{seconds(end)} from first to last program, of which the stages wait {idle:.0%}; the estimate, which does "
        f"not let transfers overlap and counts the issuing of programs, is {seconds(row.estimate.step_time_s)}."
    )
    return chart + svg.legend(_SPAN_COLORS) + f"<p>{told}</p>"


def _sharding(plan: Plan, leaves: Sequence["Leaf"]) -> str:
    """One table a unique layer: parameters alike but for the layer's number are one line."""
    groups: dict[str, dict[tuple[str, tuple[int, ...], str], int]] = {}
    for leaf in leaves:
        if leaf.kind == "state":
            continue
        pattern = re.sub(r"(?<=/)\d+(?=/)", "*", f"/{leaf.name}/").strip("/")
        head, star, _ = pattern.partition("*")
        specs = dict.fromkeys(_spec_text(leaf.shape, stage.parameters[leaf.name]) for stage in _holders(plan, leaf))
        line = pattern, leaf.shape, " or ".join(specs) or f"{_shape_text(leaf.shape)}, replicated"
        lines = groups.setdefault(f"{head}{star}" if star else "outside repeated layers", {})
        lines[line] = lines.get(line, 0) + 1
    parts = []
    for name, lines in groups.items():
        body = [
            [escape(pattern), str(count), f'<td class="left">{escape(spec)}</td>']
            for (pattern, _, spec), count in lines.items()
        ]
        parts.append(
            f"<h4>{escape(name)}</h4>" + table(["parameter", "times", "dims, and the axes that split them"], body)
        )
    zero = sorted({stage.zero for stage in plan.stages if stage.zero})
    told = {1: "optimizer state", 2: "optimizer state and gradients", 3: "all of it, parameters included,"}
    parts += [f"<p>ZeRO-{level}: {told[level]} also split over dp.</p>" for level in zero]
    return "".join(parts)


def _holders(plan: Plan, leaf: "Leaf") -> list[Any]:
    return [stage for stage in plan.stages if leaf.name in stage.parameters]


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _spec_text(shape: Sequence[int], spec: Spec) -> str:
    dims = []
    for size_of_dim, axes in zip(shape, (*spec, *(None,) * len(shape)), strict=False):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        dims.append(f"{size_of_dim}/{'/'.join(names)}" if names else str(size_of_dim))
    return " x ".join(dims)
