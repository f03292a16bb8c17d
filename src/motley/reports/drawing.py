"""Charts as SVG text, without JavaScript and in few bytes: curves with bands, and intervals.

The same input gives the same text. Colours follow the reader's light or dark scheme; so that they
are not needed to tell curves apart, each also has its own marker. Knows numbers and labels only.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LIGHT = ("#0063a6", "#c14a00", "#00805c", "#a8447f", "#8a6500", "#5a4aa0", "#006d77", "#6b6b6b")
DARK = ("#5fb4f0", "#ff9455", "#35d0a2", "#f09fcb", "#e3c04a", "#b3a2ff", "#57cfd8", "#b5b5b5")
LEGEND_LINE, CHARACTER = 18, 6.6  # pixels of a line of the legend, and of a letter in it


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in order; `low` and `high` are the band's edges, or empty."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """An estimate: a point, and the interval around it; both ends are nan if there is none."""

    label: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Round numbers between the ends.

        >>> Scale(0, 1, 0, 300).ticks(5)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def style() -> str:
    """The charts' CSS: once in a page, or inside a picture that stands alone."""
    return (
        ".chart{font:12px system-ui,sans-serif}"
        ".chart .title{font-weight:600;font-size:13px}"
        ".chart .grid,.chart .axis{stroke-width:1;fill:none}"
        ".chart .line{fill:none;stroke-width:2}.chart .band{stroke:none;opacity:.16}"
        ".chart .dashed{stroke-dasharray:5 3}"
        + _colours(LIGHT, "#1c1c1c", "#d0d0d0")
        + f"@media (prefers-color-scheme:dark){{{_colours(DARK, '#e8e8e8', '#444444')}}}"
    )


def _colours(palette: Sequence[str], ink: str, faint: str) -> str:
    """Without variables, which not every viewer of pictures knows."""
    return (
        f".chart text{{fill:{ink}}}.chart .axis{{stroke:{ink}}}.chart .grid{{stroke:{faint}}}"
    ) + "".join(
        f".chart .s{i}{{stroke:{colour}}}.chart .b{i}{{fill:{colour}}}"
        for i, colour in enumerate(palette)
    )


def standalone(svg: str) -> str:
    """A chart as a file of its own."""
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style()}</style>{rest}\n'


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    size: tuple[int, int] = (620, 300),
    legend: bool = True,
) -> str:
    """Curves over a common axis, with a legend below."""
    width, height = size
    low, high = y_range or padded([v for c in curves for v in (*c.y, *c.low, *c.high)])
    across = [v for c in curves for v in c.x] or [0.0]
    x = Scale(min(across), max(max(across), min(across) + 1), 52, width - 12)
    y = Scale(low, high, height - 40, 26)
    words, more = _legend([c.label for c in curves], width, height) if legend else ("", 0)
    body = [
        *_frame(title, x, y, x_label, y_label),
        *(_band(curve, number, x, y) for number, curve in enumerate(curves) if curve.low),
        *(part for number, curve in enumerate(curves) for part in _line(curve, number, x, y)),
        words,
    ]
    return _svg(title, width, height + more, body)


def panels(
    title: str,
    charts: Mapping[str, Sequence[Curve]],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    size: tuple[int, int] = (270, 220),
) -> str:
    """Charts side by side with the same axes and labels, and one legend below all of them."""
    width, height = size
    every = [v for some in charts.values() for c in some for v in (*c.y, *c.low, *c.high)]
    ends = y_range or padded(every)
    body = []
    for number, (name, curves) in enumerate(charts.items()):
        label = "" if number else y_label
        inner = curve_chart(name, curves, x_label, label, ends, size, legend=False)
        body.append(inner.replace("<svg ", f'<svg x="{number * width}" ', 1))
    labels = [curve.label for curve in next(iter(charts.values()))]
    legend, legend_height = _legend(labels, width * len(charts), height)
    return _svg(title, width * len(charts), height + legend_height, [*body, legend])


def span_chart(title: str, spans: Sequence[Span], x_label: str, width: int = 620) -> str:
    """Estimates below each other with their intervals, and a line at 0."""
    room = min(300, 24 + CHARACTER * max((len(s.label) for s in spans), default=0))
    ends = [v for s in spans for v in (s.mean, s.low, s.high) if not math.isnan(v)]
    low, high = padded([*ends, 0.0])
    bottom = 34 + 22 * len(spans)
    x = Scale(low, high, room, width - 16)
    body = [_text(8, 16, title, "title")]
    for tick in x.ticks(6):
        body += [
            f'<path class="grid" d="M{_n(x(tick))} 26V{bottom}"/>',
            _text(x(tick), bottom + 15, _tick(tick), anchor="middle"),
        ]
    body.append(f'<path class="axis" d="M{_n(x(0))} 26V{bottom}"/>')
    for number, span in enumerate(spans):
        place = 44 + 22 * number
        body.append(_text(room - 10, place + 4, span.label, anchor="end"))
        if not math.isnan(span.low):
            body.append(
                f'<path class="line s0" d="M{_n(x(span.low))} {place}H{_n(x(span.high))}"/>'
            )
        body.append(f'<circle class="b0" cx="{_n(x(span.mean))}" cy="{place}" r="4"/>')
    body.append(_text((room + width) / 2, bottom + 32, x_label, anchor="middle"))
    return _svg(title, width, bottom + 40, body)


def padded(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis that holds all values with some room."""
    known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(known), max(known)
    room = (high - low) * 0.06 or max(abs(high), 1.0) * 0.1
    return low - room, high + room


# Parts


def _svg(title: str, width: float, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" aria-label="{html.escape(title)}">\n'
        + "\n".join(body)
        + "\n</svg>"
    )


def _frame(title: str, x: Scale, y: Scale, x_label: str, y_label: str) -> Iterator[str]:
    yield _text(8, 16, title, "title")
    for tick in y.ticks(5):
        yield f'<path class="grid" d="M{_n(x.start)} {_n(y(tick))}H{_n(x.end)}"/>'
        yield _text(x.start - 6, y(tick) + 4, _tick(tick), anchor="end")
    for tick in x.ticks(6):
        yield _text(x(tick), y.start + 16, _tick(tick), anchor="middle")
    yield f'<path class="axis" d="M{_n(x.start)} {_n(y.start)}H{_n(x.end)}"/>'
    yield _text((x.start + x.end) / 2, y.start + 33, x_label, anchor="middle")
    middle = (y.start + y.end) / 2
    yield (
        f'<text transform="translate(13 {_n(middle)}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
    )


def _band(curve: Curve, number: int, x: Scale, y: Scale) -> str:
    edges = [(a, b, c) for a, b, c in zip(curve.x, curve.low, curve.high, strict=True) if b <= c]
    there = [f"{_n(x(a))} {_n(y(high))}" for a, _, high in edges]
    back = [f"{_n(x(a))} {_n(y(low))}" for a, low, _ in reversed(edges)]
    return f'<path class="band b{number % len(LIGHT)}" d="M{"L".join(there + back)}Z"/>'


def _line(curve: Curve, number: int, x: Scale, y: Scale) -> Iterator[str]:
    points = [(x(a), y(b)) for a, b in zip(curve.x, curve.y, strict=True) if math.isfinite(b)]
    if not points:
        return
    dashed = " dashed" if number >= len(LIGHT) else ""
    way = "L".join(f"{_n(a)} {_n(b)}" for a, b in points)
    yield f'<path class="line s{number % len(LIGHT)}{dashed}" d="M{way}"/>'
    # enough to tell it by its marker, few enough to see the line
    every = max(1, len(points) // 8)
    marks = "".join(_marker(number, a, b) for a, b in points[::every])
    yield f'<path class="b{number % len(LIGHT)}" d="{marks}"/>'


def _marker(number: int, a: float, b: float) -> str:
    """Square, triangle, diamond or bar around a point, as a path."""
    shapes = ("h7v7h-7z", "l4.5 8h-9z", "l5 5l-5 5l-5 -5z", "h3v10h-3z")
    shifts = ((-3.5, -3.5), (0, -5), (0, -5), (-1.5, -5))
    right, down = shifts[number % 4]
    return f"M{_n(a + right)} {_n(b + down)}{shapes[number % 4]}"


def _legend(labels: Sequence[str], width: float, top: float) -> tuple[str, int]:
    """In as many lines as it needs; how high it is."""
    place, row, parts = 52.0, 0, []
    for number, label in enumerate(labels):
        room = 34 + CHARACTER * len(label)
        if place > 52 and place + room > width:
            place, row = 52.0, row + 1
        down, colour = top + 8 + row * LEGEND_LINE, number % len(LIGHT)
        dashed = " dashed" if number >= len(LIGHT) else ""
        parts.append(
            f'<path class="line s{colour}{dashed}" d="M{_n(place)} {_n(down)}h18"/>'
            f'<path class="b{colour}" d="{_marker(number, place + 9, down)}"/>'
            + _text(place + 23, down + 4, label)
        )
        place += room
    return "\n".join(parts), (row + 1) * LEGEND_LINE + 4


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{named}{anchored}>{html.escape(text)}</text>'


def _n(value: float) -> str:
    """Tenths of a pixel are enough."""
    return f"{value:.1f}".removesuffix(".0")


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "−")
