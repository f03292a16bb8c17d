"""Formulas of tokens: for every row, with values by hand for the common ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from fakes import spread_crew
from motley.archive.rollouts import NO_ADVANTAGE, NOT_READ, NOT_RECORDED, WAITING, WORDS
from motley.dashboard.answers import Formula
from motley.dashboard.formulas import TokenFacts, formula, shown
from motley.dashboard.reasons import FATES, FAULTS, fate_words, fault_words
from motley.dashboard.rows import ObjectiveRow, _read, _RowName, row_of
from motley.dashboard.token_traces import numbers, spread
from motley.learning.traces import RolloutTrace
from motley.objectives import OBJECTIVES, VARIANTS

ROWS = [(name, variant) for name in OBJECTIVES for variant in ("", *sorted(VARIANTS.get(name, {})))]


def row(name: str, variant: str = "", **settings: float | str) -> ObjectiveRow:
    return _read(_RowName(objective=name, variant=variant, settings=settings))


def trace(**changes: Any) -> RolloutTrace:
    values = np.array([0.0, 1.2, -1.0], np.float32)
    said: dict[str, Any] = {
        "position": 3,
        "number": 0,
        "sender": "b",
        "advantage": 0.7071,
        "kept": True,
        "filter_kl": 0.25,
        "tokens": None,
        "spans": None,
        "log_ratio": values,
        "weight": np.exp(values).clip(max=2),
        "free": np.exp(values),
        "entropy": np.array([0.0, 1.0, 2.0], np.float32),
        "push": np.array([0.1, 0.2, 0.3], np.float32),
    }
    return RolloutTrace(**said | changes)


def told(row: ObjectiveRow, made: RolloutTrace | None, token: int = 1, **changes: Any) -> Formula:
    facts: dict[str, Any] = {
        "token": token,
        "learner": "a",
        "sender": "b",
        "fate": "learned",
        "logprob": -1.5,
        "rewards": [1.0, 0.0],
        "reward": 1.0,
        "round": 7,
        "trace": made,
    }
    return formula(row, TokenFacts(**facts | changes))


def line(made: Formula, symbol: str) -> tuple[str, str]:
    (found,) = (one for one in made.lines if one.symbol == symbol)
    return found.values, found.result


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_every_row_tells_every_token(name: str, variant: str) -> None:
    of = row(name, variant)
    empty = np.zeros(3, np.float32)
    for made in (
        trace(),
        trace(kept=False, advantage=-1.0),
        trace(weight=empty, push=empty),
        trace(push=empty),
        trace(is_lesson=True, scale=0.5),
        trace(tokens=(4, 5, 6), spans=(0, 2)),
        trace(filter_kl=float("nan"), log_ratio=np.full(3, np.inf, np.float32)),
        None,
    ):
        for token in range(3):
            given = told(of, made, token, logprob=None if made and made.tokens else -1.5)
            assert given.objective == of.name
            assert given.about
            assert given.verdict.endswith((".", "]", ")"))
            assert all(one.symbol and one.result for one in given.lines)
            msgspec.json.encode(given)


def test_a_truncated_weight_is_told_with_its_values() -> None:
    made = told(row("ftis"), trace())
    assert line(made, "log q") == ("", "−1.5")
    assert line(made, "log p") == ("−1.5 + (1.2)", "−0.3")
    assert line(made, "d") == ("−0.3 − (−1.5)", "1.2")
    assert line(made, "ρ") == ("exp(1.2)", "3.32")
    assert line(made, "C") == ("", "2")
    assert line(made, "weight") == ("min(3.32, 2)", "2")
    assert line(made, "KL") == ("0.25 against g = 50", "0.25")
    assert line(made, "A") == ("(1 − 0.5) / (0.707 + 0.0001)", "0.707")
    assert line(made, "push")[1] == "0.2"
    assert made.verdict == (
        "made likelier, with a weight of 2 instead of 3.32: a bound of the row held it."
    )
    assert "weight is 1." in told(row("ftis"), trace(), 0).verdict


def test_why_a_sample_was_filtered_is_one_sentence() -> None:
    made = told(row("ftis", g=0.5), trace(kept=False, advantage=-0.7071, filter_kl=0.83))
    assert made.verdict == (
        "dropped: its KL of 0.83 is not below g = 0.5 and its advantage of −0.707 is not "
        "positive, so the filter left the whole completion out."
    )
    assert line(made, "KL")[0] == "0.83 against g = 0.5"


def test_clipped_withheld_and_rescued_tokens_are_told_apart() -> None:
    none = np.zeros(3, np.float32)
    clipped = told(row("grpo"), trace(weight=none, push=none))
    assert "its ratio of 3.32 is outside the row's bounds" in clipped.verdict
    assert line(clipped, "weight")[0] == "3.32 against 0.8 to 1.2"
    withheld = told(row("ftis"), trace(weight=none, push=none), fate="withheld in part")
    assert withheld.verdict.startswith("withheld: it is in a phrase")
    rescued = told(row("ftis"), trace(is_lesson=True))
    assert rescued.verdict.startswith("learned as a rescue")
    assert "KL" not in {one.symbol for one in told(row("tis"), trace()).lines}


def test_where_nothing_was_written_down_it_says_why() -> None:
    of = row("ftis")
    silent = told(of, None, fate="silent group", rewards=[1.0, 1.0])
    assert silent.verdict == ("not scored: all of its group have the same reward of 1, so A = 0.")
    assert line(silent, "A")[1] == "0"
    assert "kept no trace" in told(of, None).verdict
    stale = told(of, None, fate="stale", round=None)
    assert stale.verdict.startswith("stale: It was too old")
    assert "not what the reader computes" in told(of, None, fate="refused: reward").verdict
    odd = told(of, None, fate="", reward=float("nan"), rewards=[float("nan")])
    assert odd.verdict == "not recorded"


def test_an_advantage_that_the_row_adjusts_says_so() -> None:
    made = told(row("uplift", "relative"), trace(advantage=1.9))
    (found,) = (one for one in made.lines if one.symbol == "A")
    assert found.result == "1.9"
    assert found.words.startswith("the step had another, by the row: Foreign samples")


@pytest.mark.parametrize(("kind", "expected"), [("rloo", "1 − 0"), ("dr_grpo", "1 − 0.5")])
def test_other_advantages_have_their_values(kind: str, expected: str) -> None:
    assert line(told(row(kind), None), "A")[0] == expected


def test_every_fate_and_fault_has_words() -> None:
    for fate in (*WORDS.values(), NO_ADVANTAGE, WAITING, NOT_READ, NOT_RECORDED):
        assert fate_words(fate)
    for fate in FATES:
        assert fate_words(fate).endswith(".")
    for fault in (*FAULTS, "unheard of"):
        assert fault_words(fault).startswith("the record ")
        assert fault_words(fault) in fate_words(f"refused: {fault}")
    assert fault_words("") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-1.2345, "−1.23"), (1e-7, "1e−07"), (float("inf"), "∞"), (None, "not known")],
)
def test_numbers_are_shown_short(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_numbers_of_json_are_finite_and_short() -> None:
    values = np.array([0.0, 1 / 3, -123456.789, 1e-30, np.nan, np.inf], np.float64)
    assert numbers(values) == [0.0, 0.33333, -123460.0, 1e-30, None, None]


@pytest.mark.parametrize(("count", "most"), [(0, 30), (1, 2), (5, 30), (31, 30), (10000, 30)])
def test_rounds_are_chosen_evenly(count: int, most: int) -> None:
    chosen = spread(count, most)
    assert len(chosen) == min(count, most)
    assert chosen[:1] == [0][:count]
    assert chosen[-1:] == [count - 1][:count]


@pytest.mark.slow
def test_a_process_without_torch_learns_the_row_and_stays_without(tmp_path: Any) -> None:
    config = spread_crew(tmp_path)
    code = (
        "import sys, msgspec\n"
        "from motley.config import parse_config\n"
        "from motley.dashboard import log_view\n"
        "from motley.dashboard.rows import row_of\n"
        "row = row_of(parse_config(sys.stdin.read()))\n"
        "assert 'torch' not in sys.modules\n"
        "print(msgspec.json.encode(row).decode())\n"
    )
    from motley.config import config_text

    done = subprocess.run(
        [sys.executable, "-c", code],
        input=config_text(config),
        capture_output=True,
        text=True,
        check=True,
    )
    assert msgspec.json.decode(done.stdout, type=ObjectiveRow) == row_of(config) == row("ftis")
