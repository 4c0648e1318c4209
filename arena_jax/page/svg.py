"""Charts as inline SVG text: step lines, stacked steps, points, bars and Gantt bars. No script, no outside file."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 12, 40
_MOST_POINTS = 700
_BAR_HEIGHT = 20
# About the width of a character and the height of a line of text, in pixels.
_CHARACTER, _LINE = 6.2, 11.0
# A limit this many times beyond what is drawn would squeeze it.
_FARTHEST = 3.0
# Points that lie further apart than this are told apart only on a logarithmic axis.
_DECADES = 20.0

# Colours that stay apart for colour-blind readers, in light and dark.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7a7a7a", "#b22222", "#4b0082")


# Seconds at which people read clocks, for the ticks of time axes.
_ROUND_TIMES = (
    *(m * 10.0**e for e in range(-6, 0) for m in (1, 2, 5)),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0 * m for m in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * h for h in (1, 2, 3, 6, 12)),
    *(86400.0 * d for d in (1, 2, 5, 10, 20, 50, 100)),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named line: ``y`` holds from each ``x`` to the next."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a Gantt chart on line ``row``; ``text`` is written inside where it fits."""

    row: int
    start: float
    end: float
    color: str
    label: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a scatter chart; hollow ones are drawn as rings, ``text`` stands beside it."""

    x: float
    y: float
    color: str
    label: str
    text: str = ""
    hollow: bool = False


def lines(series: Sequence[Series], *, x_label: str, y_label: str, log_x: bool = False, step: bool = True) -> str:
    """A chart of lines with its legend."""
    drawn = [s for s in series if len(s.x)]
    if not drawn:
        return "<p>nothing to draw</p>"
    low = min(float(s.x.min()) for s in drawn)
    high = max(float(s.x.max()) for s in drawn)
    if log_x:
        low = max(low, high / 1e6, 1e-9)
    top = max(float(s.y.max()) for s in drawn)
    to_x, ticks = _x_axis(low, high, log_x)
    to_y = _y_axis(top)
    body = [_frame(ticks, to_x, top, to_y, x_label, y_label, log_x)]
    for s in drawn:
        x, y = _thin(s.x, s.y)
        points = []
        for i in range(len(x)):
            px, py = to_x(max(float(x[i]), low)), to_y(float(y[i]))
            if step and i:
                points.append(f"{px:.1f},{to_y(float(y[i - 1])):.1f}")
            points.append(f"{px:.1f},{py:.1f}")
        body.append(
            f'<polyline fill="none" stroke="{s.color}" stroke-width="1.6" points="{" ".join(points)}">'
            f"<title>{escape(s.name)}</title></polyline>"
        )
    return _svg(body, HEIGHT) + legend({s.name: s.color for s in drawn})


def stacked(
    x: np.ndarray, parts: Mapping[str, np.ndarray], colors: Mapping[str, str], *, x_label: str, y_label: str
) -> str:
    """Stacked step areas, one per part; all parts share ``x``."""
    if not len(x):
        return "<p>nothing to draw</p>"
    keep = _thin_index(len(x))
    x = x[keep]
    total = np.zeros(len(x))
    top = float(np.sum([part[keep] for part in parts.values()], axis=0).max())
    to_x, ticks = _x_axis(float(x[0]), float(x[-1]), False)
    to_y = _y_axis(top)
    body = [_frame(ticks, to_x, top, to_y, x_label, y_label, False)]
    for name, part in parts.items():
        upper = total + part[keep]
        up, down = [], []
        for i in range(len(x)):
            right = to_x(float(x[min(i + 1, len(x) - 1)]))
            left = to_x(float(x[i]))
            up += [f"{left:.1f},{to_y(float(upper[i])):.1f}", f"{right:.1f},{to_y(float(upper[i])):.1f}"]
            down += [f"{left:.1f},{to_y(float(total[i])):.1f}", f"{right:.1f},{to_y(float(total[i])):.1f}"]
        body.append(
            f'<polygon fill="{colors[name]}" fill-opacity="0.8" points="{" ".join(up + down[::-1])}">'
            f"<title>{escape(name)}</title></polygon>"
        )
        total = upper
    return _svg(body, HEIGHT) + legend({name: colors[name] for name in parts})


def points(
    found: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    limits: Mapping[str, tuple[float, str]],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """A scatter chart. Its origin is zero; y is logarithmic where the points lie over decades.

    Args:
        limits: name -> (x, colour) of vertical lines; those far beyond all points are left out.
        x_text, y_text: how the numbers of an axis are written.
    """
    if not found:
        return "<p>nothing to draw</p>"
    high = max(p.x for p in found)
    near = {name: limit for name, limit in limits.items() if limit[0] <= _FARTHEST * high}
    to_x, ticks = _x_axis(0.0, 1.05 * max([high, *(x for x, _ in near.values())]), False, times=False)
    top, least = 1.05 * max(p.y for p in found), min(p.y for p in found)
    if 0 < least < top / _DECADES:
        to_y, y_ticks = _log_y_axis(0.8 * least, top)
    else:
        to_y, y_ticks = _y_axis(top), _ticks(0.0, top)
    body = [_frame(ticks, to_x, top, to_y, x_label, y_label, False, x_text=x_text, y_text=y_text, y_ticks=y_ticks)]
    for name, (x, color) in near.items():
        body.append(
            f'<line x1="{to_x(x):.1f}" y1="{_TOP}" x2="{to_x(x):.1f}" y2="{HEIGHT - _BOTTOM}" stroke="{color}" '
            f'stroke-dasharray="4 3"><title>{escape(name)}</title></line>'
            f'<text x="{to_x(x) - 4:.1f}" y="{_TOP + 10}" text-anchor="end">{escape(name)}</text>'
        )
    written: list[tuple[float, float, float]] = []  # left, right and baseline of the texts so far
    for p in found:
        paint = f'fill="none" stroke="{p.color}" stroke-width="1.8"' if p.hollow else f'fill="{p.color}"'
        at_x, at_y = to_x(p.x), to_y(p.y)
        body.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4.5" {paint}><title>{escape(p.label)}</title></circle>'
        )
        if p.text:
            long = _CHARACTER * len(p.text)
            left = at_x - 7 - long if at_x > WIDTH * 0.8 else at_x + 7
            base = at_y + 4
            while any(left < end and left + long > start and abs(base - y) < _LINE for start, end, y in written):
                base += _LINE  # beside another point's text, one line further down
            written.append((left, left + long, base))
            body.append(f'<text x="{left:.1f}" y="{base:.1f}">{escape(p.text)}</text>')
    return _svg(body, HEIGHT)


def bars(
    rows: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    *,
    x_label: str,
    text: Callable[[float], str],
    limit: tuple[float, str] | None = None,
) -> str:
    """Horizontal stacked bars, one a row, with their legend.

    Args:
        rows: row -> part -> length.
        text: how a length is written.
        limit: a vertical line and its name.
    """
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    high = max([*totals.values(), 0.0])
    if high <= 0:
        return "<p>nothing to draw</p>"
    shown = limit is not None and limit[0] <= _FARTHEST * high
    if limit is not None and shown:
        high = max(high, limit[0])
    height = int(_TOP + _BOTTOM + _BAR_HEIGHT * len(rows))
    # A little room to the right, for the total beside the longest bar.
    to_x, ticks = _x_axis(0.0, high * 1.12, False, times=False)
    body = [_frame(ticks, to_x, 0.0, None, x_label, "", False, height=height, x_text=text)]
    for number, (name, parts) in enumerate(rows.items()):
        top, start = _TOP + number * _BAR_HEIGHT, 0.0
        body.append(f'<text x="{_LEFT - 6}" y="{top + 13:.0f}" text-anchor="end">{escape(name)}</text>')
        for part, length in parts.items():
            left, right = to_x(start), to_x(start + length)
            start += length
            if length > 0:
                body.append(
                    f'<rect x="{left:.1f}" y="{top + 2:.1f}" width="{max(right - left, 0.3):.1f}" '
                    f'height="{_BAR_HEIGHT - 5}" fill="{colors[part]}">'
                    f"<title>{escape(f'{name}, {part}: {text(length)}')}</title></rect>"
                )
        body.append(f'<text x="{to_x(start) + 5:.1f}" y="{top + 13:.0f}">{escape(text(start))}</text>')
    if limit is not None and shown:
        x = to_x(limit[0])
        body.append(
            f'<line class="axis" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{height - _BOTTOM}" '
            f'stroke-dasharray="4 3"><title>{escape(limit[1])}</title></line>'
        )
    used = {part for parts in rows.values() for part, length in parts.items() if length > 0}
    return _svg(body, height) + legend({part: color for part, color in colors.items() if part in used})


def gantt(
    bars: Sequence[Bar],
    num_rows: int,
    *,
    x_label: str,
    y_label: str = "",
    row_height: float = 14.0,
    names: Sequence[str] = (),
) -> str:
    """Bars on rows of ``row_height`` pixels, less where there are many; ``names`` stand to the left of the rows."""
    if not bars:
        return "<p>nothing to draw</p>"
    row_height = max(2.0, min(row_height, 1400.0 / max(num_rows, 1)))
    height = int(_TOP + _BOTTOM + row_height * num_rows)
    low, high = min(b.start for b in bars), max(b.end for b in bars)
    to_x, ticks = _x_axis(low, high, False)
    body = [_frame(ticks, to_x, 0.0, None, x_label, y_label, False, height=height)]
    for number, name in enumerate(names):
        base = _TOP + (number + 0.6) * row_height
        body.append(f'<text x="{_LEFT - 6}" y="{base:.1f}" text-anchor="end">{escape(name)}</text>')
    for bar in bars:
        left, right, top = to_x(bar.start), to_x(bar.end), _TOP + bar.row * row_height
        body.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{row_height * 0.85:.1f}" fill="{bar.color}"><title>{escape(bar.label)}</title></rect>'
        )
        if bar.text and right - left > _CHARACTER * len(bar.text) + 2:
            body.append(
                f'<text x="{(left + right) / 2:.1f}" y="{top + row_height * 0.6:.1f}" text-anchor="middle" '
                f'style="fill:#1a1a1a">{escape(bar.text)}</text>'
            )
    return _svg(body, height)


def legend(colors: Mapping[str, str]) -> str:
    """Names beside their colours."""
    items = (
        f'<span class="key"><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'


def duration(seconds: float) -> str:
    """Seconds as people write them: ``90 s``, ``2.5 h``."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms" if seconds else "0"


def _clock(seconds: float) -> str:
    """A time on an axis, in the largest unit that it is whole or half of: ``80 s`` rather than ``1.33 min``."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size and (2 * seconds / size) % 1 < 1e-9:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s" if 1 <= seconds < 3600 else duration(seconds)


def _svg(body: Sequence[str], height: int) -> str:
    # Scrolled rather than shrunk on a narrow screen: the labels have to stay legible.
    return f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(body)}</svg></div>'


def _x_axis(low: float, high: float, log: bool, *, times: bool = True) -> tuple[Callable[[float], float], list[float]]:
    span = WIDTH - _LEFT - _RIGHT
    if log:
        first, last = math.log10(low), math.log10(max(high, low * 1.001))
        ticks = [t for t in _ROUND_TIMES if low <= t <= high]
        # Few decades are told by evenly spaced times as well.
        ticks = ticks[:: -(-len(ticks) // 8)] if len(ticks) > 2 else _time_ticks(low, high)
        return lambda x: _LEFT + span * (math.log10(max(x, low)) - first) / max(last - first, 1e-9), ticks
    width = max(high - low, 1e-9)
    return lambda x: _LEFT + span * (x - low) / width, (_time_ticks if times else _ticks)(low, high)


def _y_axis(top: float) -> Callable[[float], float]:
    span = HEIGHT - _TOP - _BOTTOM
    return lambda y: _TOP + span * (1.0 - y / max(top, 1e-12))


def _log_y_axis(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    first, last = math.log10(low), math.log10(high)
    span = HEIGHT - _TOP - _BOTTOM
    marks = [m * 10.0**e for e in range(math.floor(first), math.ceil(last)) for m in (1, 3)]
    return lambda y: _TOP + span * (last - math.log10(y)) / (last - first), [m for m in marks if low <= m <= high]


def _frame(
    ticks: Sequence[float],
    to_x: Callable[[float], float],
    top: float,
    to_y: Callable[[float], float] | None,
    x_label: str,
    y_label: str,
    log_x: bool,
    *,
    height: int = HEIGHT,
    x_text: Callable[[float], str] | None = None,
    y_text: Callable[[float], str] | None = None,
    y_ticks: Sequence[float] | None = None,
) -> str:
    bottom = height - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH - _RIGHT}" y2="{bottom}"/>']
    if x_text is None:
        x_text = _clock if log_x or "time" in x_label else _number
    for tick in ticks:
        text = x_text(tick)
        parts.append(f'<line class="grid" x1="{to_x(tick):.1f}" y1="{_TOP}" x2="{to_x(tick):.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{to_x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    if to_y is not None:
        for tick in _ticks(0.0, top) if y_ticks is None else y_ticks:
            y = to_y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{(y_text or _number)(tick)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (_TOP + bottom) / 2
    if y_label:
        parts.append(
            f'<text x="14" y="{centre:.0f}" text-anchor="middle" transform="rotate(-90 14 {centre:.0f})">'
            f"{escape(y_label)}</text>"
        )
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:g}"


def _ticks(low: float, high: float, about: int = 6) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / size)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _time_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Ticks at round times: 15 min, 1 h, 6 h."""
    raw = (high - low) / about
    if raw <= 0:
        return [low]
    size = next((t for t in _ROUND_TIMES if t >= raw), None)
    if size is None:
        return _ticks(low, high, about)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size + 1e-9) + 1)]


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keep = _thin_index(len(x))
    return x[keep], y[keep]


def _thin_index(length: int) -> np.ndarray:
    """Every point, or evenly chosen ones where there are more than a line can show."""
    return np.unique(np.linspace(0, length - 1, min(length, _MOST_POINTS)).astype(int))
