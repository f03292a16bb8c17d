from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from motley.benchmarks import grpo, local
from motley.benchmarks.local import local_benchmark
from motley.benchmarks.timing import Cost


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, untrained: the numbers mean little, what is measured is the same.

    Nor is there a pretrained one.
    """

    def nothing(name: str) -> None:
        raise ValueError(f"model {name} is not here yet")

    monkeypatch.setattr(local, "SHAPES", {"0.3m": local.SHAPES["0.3m"]})
    monkeypatch.setattr(local, "warm_start", lambda *arguments, **named: None)
    monkeypatch.setattr(local, "find", nothing)


def steps() -> list[dict[str, Any]]:
    return [
        row
        for row in local_benchmark(1, lambda *shown: None)
        if row["half"].startswith("whole step")
    ]


@pytest.mark.slow
def test_a_row_for_each_half_and_for_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def trl_cost(
        policy: object, work: grpo.StepWork, repeats: int, between: Callable[[], None]
    ) -> Cost:
        for _ in range(1 + repeats):
            between()
        assert work.may_end
        return Cost(2.0, None)

    monkeypatch.setattr(grpo, "has_trl", lambda: True)
    monkeypatch.setattr(grpo, "trl_cost", trl_cost)
    seen: list[tuple[str, int, int]] = []
    rows = local_benchmark(1, lambda *shown: seen.append(shown))
    assert seen == [
        ("tiny:0.3m", 0, 3),
        ("tiny:0.3m, whole step", 1, 3),
        ("smollm2-135m, whole step", 2, 3),
    ]
    assert [(row["model"], row["half"], row["against"]) for row in rows] == [
        ("tiny:0.3m", "sampling", "generate"),
        ("tiny:0.3m", "training", "padded rows"),
        ("tiny:0.3m", "whole step", "TRL"),
        ("tiny:0.3m", "whole step, all train", "TRL"),
        ("smollm2-135m", "whole step, all train", "TRL"),
    ]
    for row in rows[:4]:
        assert row["ratio"] == pytest.approx(row["motley"] / row["rival"], rel=0.01)
    assert 24 * 12 <= 2.0 * rows[2]["rival"] <= 24 * 12 * 8  # tokens in 2 s
    # untrained: all are wrong
    assert [row["note"] for row in rows[2:4]] == [
        "0 of 288 sequences train",
        "288 of 288 sequences train",
    ]
    assert len({tuple(row) for row in rows}) == 1


@pytest.mark.slow
def test_what_is_not_measured_says_how_to_have_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "has_trl", lambda: False)
    tiny, _, real = steps()
    assert tiny["note"].startswith("not measured: pip install 'motley-rl[bench]'")
    assert tiny["rival"] is tiny["ratio"] is None
    assert tiny["motley"] > 0
    assert real["note"] == "not measured: motley models fetch smollm2-135m"
    assert real["motley"] is real["rival"] is real["ratio"] is None


@pytest.mark.slow
def test_a_real_step_runs_beside_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    _, tiny, _ = steps()
    assert tiny["note"] == "288 of 288 sequences train"
    assert tiny["ratio"] == pytest.approx(tiny["motley"] / tiny["rival"], rel=0.01)
