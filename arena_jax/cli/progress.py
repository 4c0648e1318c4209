"""What a person sees of a training: the candidate table, then progress, on stderr.

Both are fed with the events of :mod:`arena_jax.events`. On a terminal two lines stay at the bottom
and what happens between steps scrolls above them; elsewhere plain lines come, not too many.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arena_jax.errors import counted
from arena_jax.events import Event
from arena_jax.grid import Estimate, Plan

PLAIN_EVERY_S = 5.0
REFRESH_PER_S = 4
ETA_WINDOW = 50  # steps over which the time of a step is averaged
MAX_ROWS = 16
_HEADERS = ("", "grid", "dp x tp", "micro", "step", "memory", "")
_RIGHT = (False, False, False, True, True, True, False)


class Progress:
    """Shows the events of one run; use it as a context manager and give it as a callback.

    Args:
        num_steps: the step at which the run will end.
        name: what is trained.
        file: where to; stderr by default.
    """

    def __init__(self, num_steps: int, *, name: str = "", file: TextIO | None = None) -> None:
        self.console = _console(file)
        self._num_steps = num_steps
        self._name = name
        self._grid = ""
        self._step: Event | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW)
        self._last_line = 0.0
        self._shown: Event | None = None
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                console=self.console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._step is not None and self._step is not self._shown:
            self._print(self._line(self._step))

    def __call__(self, event: Event) -> None:
        self.on_event(event)

    def on_event(self, event: Event) -> None:
        """Show one event; cheap, and safe from any thread that emits."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def warn(self, message: str) -> None:
        """Show a warning above the progress."""
        if self.console.is_terminal:
            self._print(Text.assemble(("warning: ", "bold yellow"), message))
        else:
            self._print(f"warning: {message}")

    def _on_candidates(self, event: Event) -> None:
        for renderable in _candidates(event.get("rows") or [], self.console):
            self._print(renderable)

    def _on_plan(self, event: Event) -> None:
        self._grid = str(event.get("grid", ""))
        estimate = event.get("estimated_step_time_s")
        text = f"plan {event.get('plan_id', '')} on {self._grid}"
        if estimate is not None:
            text += f", estimated {seconds(estimate)} a step"
        self._print(text + (f", engine {event['engine']}" if event.get("engine") else ""))

    def _on_step(self, event: Event) -> None:
        now = time.monotonic()
        self._step = event
        self._times.append((int(event["step"]), now))
        if self._live is None and (now - self._last_line >= PLAIN_EVERY_S or event["step"] >= self._num_steps):
            self._last_line = now
            self._shown = event
            self._print(self._line(event))

    def _on_eval(self, event: Event) -> None:
        metrics = "  ".join(f"{key} {number(value)}" for key, value in (event.get("metrics") or {}).items())
        self._print(f"eval at step {event['step']}: {metrics}")

    def _on_checkpoint(self, event: Event) -> None:
        took = f" in {seconds(event['seconds'])}" if event.get("seconds") is not None else ""
        self._print(f"checkpoint at step {event['step']}{took}")

    def _on_request(self, event: Event) -> None:
        self._print(f"preparing {event.get('target')} since step {event['step']}")

    def _on_pause(self, event: Event) -> None:
        why = "" if event.get("asked", True) else ": devices had to be freed before the new plan was compiled"
        self._print(f"paused at step {event['step']}{why}")

    def _on_swap(self, event: Event) -> None:
        reason = f" ({event['reason']})" if event.get("reason") else ""
        self._print(f"swap at step {event['step']}: {event.get('from')} -> {event.get('to')}{reason}")
        facts = [event["difference"]] if event.get("difference") else []
        if event.get("prepared"):
            facts.append("compiled before")
        elif event.get("background_s") is not None:
            facts.append(f"compiled in {seconds(event['background_s'])}")
        if event.get("stall_s") is not None:
            facts.append(f"stalled {seconds(event['stall_s'])}")
        self._print(f"  {'; '.join(facts)}")

    def _on_warning(self, event: Event) -> None:
        self.warn(str(event.get("message", "")))

    def _print(self, renderable: RenderableType) -> None:
        self.console.print(renderable, highlight=False, soft_wrap=isinstance(renderable, str), markup=False)

    def _line(self, event: Event) -> str:
        width = len(str(self._num_steps))
        parts = [f"step {event['step']:>{width}}/{self._num_steps}", *_facts(event)]
        eta = self._eta_s()
        return "  ".join([*parts, *([f"eta {clock(eta)}"] if eta is not None else [])])

    def _render(self) -> RenderableType:
        done = 0 if self._step is None else int(self._step["step"])
        eta = self._eta_s()
        head = Table.grid(padding=(0, 1))
        where = f"{self._name} on {self._grid}" if self._grid else self._name
        tail = f"{done}/{self._num_steps}" + (f"  eta {clock(eta)}" if eta is not None else "")
        bar_width = max(8, min(40, self.console.width - len(where) - len(tail) - 4))
        head.add_row(where, ProgressBar(total=self._num_steps, completed=done, width=bar_width), tail)
        facts = "  ".join(_facts(self._step, estimate=True)) if self._step is not None else "compiling"
        return Group(head, Text(facts, no_wrap=True, overflow="ellipsis"))

    def _eta_s(self) -> float | None:
        if len(self._times) < 2 or self._times[-1][0] >= self._num_steps:
            return None
        (first, began), (last, now) = self._times[0], self._times[-1]
        return (now - began) / (last - first) * (self._num_steps - last) if last > first else None


def render_candidates(rows: Sequence[Mapping[str, Any]], *, file: TextIO | None = None) -> None:
    """Print the candidate table of a search (rows as in the ``candidates`` event)."""
    console = _console(file)
    for renderable in _candidates(rows, console):
        console.print(renderable, highlight=False, soft_wrap=isinstance(renderable, str), markup=False)


def plan_summary(plan: Plan, estimate: Estimate | None = None) -> Iterator[str]:
    """A line for the plan, then one a stage: its layers, mesh, sharding and memory."""
    step = f", estimated {seconds(estimate.step_time_s)} a step" if estimate is not None else ""
    yield f"plan {plan.plan_id} on {plan.grid}, {counted(plan.num_microbatches, 'microbatch', 'microbatches')}{step}"
    for number, stage in enumerate(plan.stages):
        first, last = stage.layers
        layers = f"layers {first}-{last}" if last > first else f"layer {first}"
        memory = f"  {size(estimate.stages[number].memory_bytes)} a device" if estimate is not None else ""
        remat = "on" if stage.remat else "off"
        yield f"stage {number}: {layers}  dp x tp {stage.dp}x{stage.tp}  zero {stage.zero}  remat {remat}{memory}"


def _candidates(rows: Sequence[Mapping[str, Any]], console: Console) -> Iterator[RenderableType]:
    """Feasible rows from the fastest on, then the others with what excludes them.

    On a terminal no wider than that; elsewhere whole, for who reads it can scroll and search.
    """
    order = sorted(rows, key=lambda row: (not row.get("feasible"), row.get("step_time_s") or 0.0))
    shown = order[:MAX_ROWS]
    if console.is_terminal:
        yield _table(shown, min(console.width, 100))
    else:
        yield from _plain_table([_cells(row) for row in shown])
    if len(order) > MAX_ROWS:
        yield Text(f"... and {len(order) - MAX_ROWS} more", style="dim")


def _table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", width=width)
    for header, right in zip(_HEADERS[:-1], _RIGHT[:-1], strict=True):
        table.add_column(header, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    table.add_column(_HEADERS[-1], ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        style = "bold" if row.get("chosen") else "" if row.get("feasible") else "dim"
        table.add_row(*(Text(cell) for cell in _cells(row)), style=style)
    return table


def _plain_table(rows: list[list[str]]) -> Iterator[str]:
    lines = [list(_HEADERS), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADERS))]
    for line in lines:
        cells = [
            f"{cell:>{width}}" if right else f"{cell:{width}}"
            for cell, width, right in zip(line, widths, _RIGHT, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _cells(row: Mapping[str, Any]) -> list[str]:
    fits, chosen = bool(row.get("feasible")), bool(row.get("chosen"))
    return [
        "*" if chosen else "",
        str(row.get("grid", "")),
        meshes(row.get("dp_tp")),
        str(row.get("num_microbatches") or ""),
        seconds(row["step_time_s"]) if fits and row.get("step_time_s") is not None else "-",
        size(row["memory_bytes"]) if row.get("memory_bytes") is not None else "-",
        "; ".join(_remarks(row)),
    ]


def _remarks(row: Mapping[str, Any]) -> Iterator[str]:
    """That a candidate was chosen, why it does not fit, and what each engine found where several were asked."""
    if row.get("chosen"):
        yield "chosen"
    elif not row.get("feasible"):
        yield str(row.get("reason") or "does not fit")
    objectives = row.get("objectives") or {}
    if len(objectives) > 1:
        yield ", ".join(f"{name} {seconds(value)}" for name, value in objectives.items())


def _facts(event: Event, *, estimate: bool = False) -> Iterator[str]:
    yield f"loss {number(event.get('loss'))}"
    if event.get("step_time_s") is not None:
        yield f"{seconds(event['step_time_s'])}/step"
    if estimate and event.get("estimated_step_time_s") is not None:
        yield f"(estimated {seconds(event['estimated_step_time_s'])})"
    if event.get("rate") is not None:
        yield f"{float(event['rate']):,.0f} {event.get('rate_unit') or 'samples'}/s"


def meshes(dp_tp: Any) -> str:
    """``4x2`` per stage, equal neighbours as ``4x2 *3``; text is taken as it is."""
    if dp_tp is None or isinstance(dp_tp, str):
        return dp_tp or ""
    runs: list[list[Any]] = []
    for dp, tp in dp_tp:
        if runs and runs[-1][0] == f"{dp}x{tp}":
            runs[-1][1] += 1
        else:
            runs.append([f"{dp}x{tp}", 1])
    return " ".join(mesh if count == 1 else f"{mesh} *{count}" for mesh, count in runs)


def number(value: Any) -> str:
    """Five significant digits, whatever the size; ``nan`` and ``inf`` as they are."""
    try:
        return f"{float(value):.5g}"
    except (TypeError, ValueError):
        return str(value)


def seconds(value: float) -> str:
    """A duration with its unit, three significant digits."""
    value = float(value)
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def clock(value: float) -> str:
    """A remaining time: ``0:42``, ``1:02:03``."""
    whole = round(value)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def size(value: float) -> str:
    """Bytes as MiB, GiB or TiB, three significant digits."""
    mebibytes = float(value) / 2**20
    for unit in ("MiB", "GiB"):
        if mebibytes < 1000:
            return f"{mebibytes:.3g} {unit}"
        mebibytes /= 1024
    return f"{mebibytes:.3g} TiB"


def _console(file: TextIO | None) -> Console:
    console = Console(file=file, stderr=file is None)
    if not console.is_terminal:
        console.width = 80 if file is None else max(console.width, 80)
    return console
