"""What rows did to samples: numbers from metrics.jsonl, averaged by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.learning.senders import Distribution, SenderMetrics, Spread
from motley.reports import page
from motley.runs.metrics import LearnerLine, append_lines
from motley.study.looks import MOST_POINTS, heard_in, looks_of, number_of
from motley.study.outcomes import StudyRun
from motley.study.pages import _shown
from motley.study.sections import Section


def took(
    weight: float, free: float, dropped: float | None = 0.25, tau: float = 0.8
) -> SenderMetrics:
    spread = lambda mean: {"mean": mean, "max": 9.0, "q05": mean / 2, "q50": mean, "q95": 2 * mean}
    return SenderMetrics(
        groups=2, sequences=8, reward=0.5, accuracy=0.5, tokens=4.0, truncated=0.0, age=1.0,
        silent_groups=0, kl_k3=0.1, weight=Distribution(**spread(weight)),
        free_weight=Spread(**spread(free), var=1.0), clipped=0.1, ess=weight / 2,
        filtered_positive=0.0, filtered_negative=dropped, tau_before=1.0, tau_after=tau,
    )  # fmt: skip


SILENT = SenderMetrics(
    groups=1, reward=0.0, accuracy=0.0, tokens=3.0, truncated=1.0, age=0.0, silent_groups=1
)


def run(
    folder: Path, arm: str, seed: int, steps: list[dict[str, SenderMetrics]], crew: str = "pair"
) -> StudyRun:
    made = folder / f"{crew}-{arm}-{seed}"
    made.mkdir()
    lines = [
        LearnerLine(round=number, peer="small", senders=senders)
        for number, senders in enumerate(steps, 1)
    ]
    append_lines(made / "metrics.jsonl", lines)
    return StudyRun(crew, arm, seed, made)


def cells(section: Section) -> dict[tuple[str, str], dict[str, str]]:
    head, rows = section.table
    return {(row[0], row[1]): dict(zip(head[2:], row[2:], strict=True)) for row in rows}


def test_a_cell_is_the_mean_over_steps_and_then_over_seeds(tmp_path: Path) -> None:
    first = run(tmp_path, "tis", 0, [{"deep": took(1.0, 2.0)}, {"deep": took(2.0, 6.0)}])
    second = run(tmp_path, "tis", 1, [{"deep": took(0.5, 4.0)}])
    weights = cells(looks_of([first, second])[0])["tis", "deep → small"]
    # seeds: (1 + 2) / 2 and 0.5; the t interval of two values is 12.7 · half their difference
    assert weights["mean after"] == "1 ± 6.35"
    assert weights["mean before"] == "4 ± 0"
    assert weights["q95 before"] == "8 ± 0"


def test_what_was_not_measured_counts_nothing_and_not_zero(tmp_path: Path) -> None:
    one = run(tmp_path, "ftis", 0, [{"deep": took(1.0, 1.0, dropped=None)}, {"deep": SILENT}])
    sections = {section.title: section for section in looks_of([one])}
    dropped = cells(sections["What the filter dropped"])["ftis", "deep → small"]
    assert dropped == {"A > 0": "0", "A ≤ 0": ""}
    assert cells(sections["Rank agreement"])["ftis", "deep → small"]["tau after"] == "0.8"


def test_the_own_sender_is_in_the_table_and_in_no_curve(tmp_path: Path) -> None:
    one = run(tmp_path, "ftis", 0, [{"deep": took(0.4, 3.0), "small": took(1.0, 1.0)}])
    weights = looks_of([one])[0]
    assert set(cells(weights)) == {("ftis", "deep → small"), ("ftis", "small → small")}
    (after,) = weights.curves["mean weight after: small"]
    assert (after.label, list(after.y)) == ("ftis", [0.4])


def test_arms_in_which_nobody_hears_another_are_left_out(tmp_path: Path) -> None:
    alone = run(tmp_path, "alone", 0, [{"small": took(1.0, 1.0)}])
    assert looks_of([alone]) == []
    crew = run(tmp_path, "tis", 0, [{"deep": took(1.0, 1.0)}])
    assert {arm for arm, _ in cells(looks_of([alone, crew])[0])} == {"tis"}


def test_a_run_whose_metrics_are_gone_does_not_stop_a_report(tmp_path: Path) -> None:
    kept = run(tmp_path, "tis", 0, [{"deep": took(1.0, 2.0)}])
    gone = run(tmp_path, "tis", 1, [{"deep": took(3.0, 2.0)}])
    (gone.folder / "metrics.jsonl").unlink()
    assert cells(looks_of([kept, gone])[0])["tis", "deep → small"]["mean after"] == "1"


def test_many_rounds_are_put_together_at_the_middle_of_their_rounds(tmp_path: Path) -> None:
    steps = [{"deep": took(float(number), 1.0)} for number in range(1, 2 * MOST_POINTS + 1)]
    (curve,) = looks_of([run(tmp_path, "tis", 0, steps)])[0].curves["mean weight after: small"]
    assert len(curve.x) == MOST_POINTS
    assert list(curve.x)[:2] == [1.5, 3.5] == list(curve.y)[:2]


def test_bands_need_a_second_seed(tmp_path: Path) -> None:
    runs = [run(tmp_path, "tis", seed, [{"deep": took(1.0 + seed, 1.0)}]) for seed in (0, 1)]
    chart = "mean weight after: small"
    assert not looks_of(runs[:1])[0].curves[chart][0].low
    assert looks_of(runs)[0].curves[chart][0].low == pytest.approx([1.5 - 6.353], abs=1e-3)


def test_crews_have_sections_of_their_own_and_each_can_be_shown(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, "tis", 0, [{"deep": took(1.0, 1.0)}], crew=crew) for crew in ("near", "far")
    ]
    sections = looks_of(runs)
    assert sections[0].title == "near: Weights before and after truncation"
    assert len(sections) == 8
    text = page.page("x", [part for section in sections for part in _shown(section)])
    assert "deep → small" in text


def test_numbers_are_found_by_key_and_part(tmp_path: Path) -> None:
    (one,) = heard_in(run(tmp_path, "tis", 3, [{"deep": took(0.5, 3.0)}]))
    paths = ["ess", "weight", "free_weight.q50", "free_weight.q95"]
    assert [number_of(one.took, path) for path in paths] == [0.25, 0.5, 3.0, 6.0]
    assert number_of(SILENT, "free_weight.q50") is None
