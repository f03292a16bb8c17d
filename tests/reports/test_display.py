"""An accuracy is a share, a reward is a number: tables, curves and progress follow."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fakes import spread_crew
from motley.reports.display import LiveTable, _figure, draw_curves, skill_matrix, skills_at
from motley.reports.scores import score_text
from motley.runs.metrics import LearnerLine, decode_lines, learner_lines, measure_of


def lines_of(values: list[float], measure: str | None) -> list[LearnerLine]:
    return [
        LearnerLine(round=n, peer="full0", heldout={"sort": value}, measure=measure)  # type: ignore[arg-type]
        for n, value in enumerate(values)
    ]


def shown(table: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.412, "3.41"), (-3562, "-3562"), (0.0, "0.00"), (-0.0004, "-0.0004"), (2.5e5, "2.5e+05")],
)
def test_a_reward_is_a_number_of_its_size(value: float, text: str) -> None:
    assert score_text(value, "reward") == text


def test_what_lines_measure_is_what_they_say_or_what_their_values_can_be() -> None:
    assert measure_of(lines_of([0.2, 1.0], None)) == "accuracy"
    assert measure_of(lines_of([0.2, 0.4], "reward")) == "reward"
    assert measure_of(lines_of([0.2, 2.72], None)) == "reward", "an old run"
    old = learner_lines(decode_lines(b'{"round":0,"peer":"a","heldout":{"x":-35.62}}\n'))
    assert measure_of(old) == "reward"


@pytest.mark.slow
def test_rewards_are_never_shown_as_per_cent(tmp_path: Path) -> None:
    lines = lines_of([-3562.0, -12.5, 2.72], "reward")
    before, after = skills_at(lines, last=False), skills_at(lines, last=True)
    text = shown(skill_matrix(before, after, {}, "reward"))
    assert "held-out reward: before → after" in text
    assert "-3562 → 2.72" in text
    assert "%" not in text
    table = LiveTable(spread_crew(tmp_path))
    table.update(lines)
    assert "held-out reward" in shown(table)
    assert "sort 2.72" in shown(table)
    _, page = draw_curves(lines, {}, tmp_path)
    cells = re.findall(r"<td>(.*?)</td>", page.read_text())
    assert cells == ["full0", "-3562 → 2.72", "-3562 → 2.72", ""]


def test_an_accuracy_is_shown_as_before(tmp_path: Path) -> None:
    lines = lines_of([0.25, 0.5], None)
    text = shown(
        skill_matrix(skills_at(lines, last=False), skills_at(lines, last=True), {}, "accuracy")
    )
    assert "held-out accuracy: before → after" in text
    assert "25% → 50%" in text


def test_the_axis_fits_the_rewards_and_runs_to_100_per_cent_for_accuracies() -> None:
    low, high = _figure(lines_of([-3562.0, -12.5], "reward"), {}, "reward").axes[0].get_ylim()
    assert low < -3562 < -12.5 < high < 1000
    assert _figure(lines_of([0.2, 0.4], None), {}, "accuracy").axes[0].get_ylim() == (0, 1.02)
