"""Parts of a study's report that each have a module of their own: what such a module hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motley.reports.drawing import Curve


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report that another module worked out. What it has none of stays empty."""

    title: str
    text: str  # what it shows, and how to read it
    table: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())  # head and rows
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)  # title of a chart ->
    x_label: str = "round"
    y_label: str = ""
