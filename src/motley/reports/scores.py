"""Numbers in words: an accuracy is a share in per cent, a reward is a number of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motley.tasks import Measure


def score_text(value: float, measure: Measure) -> str:
    """>>> score_text(0.725, "accuracy"), score_text(3.412, "reward"), score_text(-3562, "reward")
    ('72%', '3.41', '-3562')
    """
    if measure == "accuracy":
        return f"{value:.0%}"
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3g}"


def cell_text(value: object) -> str:
    """A value in a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.1e}"
    return str(value)
