from __future__ import annotations

import re
from math import nan
from xml.etree import ElementTree

import pytest

from motley.reports.drawing import (
    DARK,
    LIGHT,
    Curve,
    Scale,
    Span,
    curve_chart,
    padded,
    span_chart,
    standalone,
)

CURVES = [
    Curve("alone", [0, 10, 20], [0.2, 0.4, 0.5], [0.1, 0.3, 0.45], [0.3, 0.5, 0.55]),
    Curve("uplift <b>&", [0, 10, 20], [0.2, 0.6, nan]),
]
SVG = "{http://www.w3.org/2000/svg}"


def parts(svg: str, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(standalone(svg))
    return [node for node in root.iter() if kind in node.get("class", "").split()]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_a_chart_is_well_formed_whatever_labels_say_and_the_same_each_time() -> None:
    svg = curve_chart("a < b", CURVES, "round", "score")
    root = ElementTree.fromstring(standalone(svg))
    assert "uplift <b>&" in "".join(root.itertext())
    assert svg == curve_chart("a < b", CURVES, "round", "score")
    assert "<script" not in svg


def test_a_picture_has_colours_for_light_and_for_dark() -> None:
    light, dark = standalone(curve_chart("t", CURVES, "x", "y")).split("prefers-color-scheme:dark")
    assert LIGHT[0] in light
    assert DARK[0] in dark


def test_curves_and_bands_stand_where_the_axis_says() -> None:
    svg = curve_chart("t", CURVES[:1], "x", "y", (0.0, 1.0), size=(620, 300))
    line, _legend = parts(svg, "line")
    y = Scale(0, 1, 260, 26)
    assert points(line.get("d", "")) == [
        (52, pytest.approx(y(0.2), abs=0.05)),
        (330, pytest.approx(y(0.4), abs=0.05)),
        (608, pytest.approx(y(0.5), abs=0.05)),
    ]
    (band,) = parts(svg, "band")
    edges = [b for _, b in points(band.get("d", ""))]
    expected = [0.3, 0.5, 0.55, 0.45, 0.3, 0.1]  # there along the top, back along the bottom
    assert edges == pytest.approx([y(v) for v in expected], abs=0.05)


def test_a_point_that_is_no_number_is_left_out() -> None:
    svg = curve_chart("t", CURVES[1:], "x", "y", (0.0, 1.0))
    line, _legend = parts(svg, "line")
    assert len(points(line.get("d", ""))) == 2
    assert "nan" not in svg


def test_more_curves_than_colours_are_dashed() -> None:
    many = [Curve(str(n), [0, 1], [0.0, 1.0]) for n in range(len(LIGHT) + 2)]
    assert len(parts(curve_chart("t", many, "x", "y"), "dashed")) == 2 * 2  # line and legend


def test_a_span_without_interval_is_a_point() -> None:
    svg = span_chart("t", [Span("a", 0.1, -0.1, 0.3), Span("b", 0.2, nan, nan)], "x")
    assert len(parts(svg, "line")) == 1
    assert len(parts(svg, "b0")) == 2
    assert "nan" not in svg


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3562.0, 10.0, [-3000.0, -2000.0, -1000.0, 0.0]),
        (0.93, 0.97, [0.93, 0.94, 0.95, 0.96, 0.97]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 1).ticks(5) == ticks


def test_an_axis_has_room_even_where_all_values_are_one() -> None:
    low, high = padded([0.5, 0.5])
    assert low < 0.5 < high
    assert padded([]) == padded([0.0, 1.0])
