from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from motley.config import parse_config
from motley.learning.senders import SenderMetrics
from motley.runs.metrics import KeptSuccesses, LearnerLine, MetProblems, SamplerLine, Timing
from motley.study.outcomes import (
    Spent,
    outcome_of,
    read_crew_outcomes,
    read_outcomes,
    read_whole_outcomes,
    spent_of,
)

CREW = parse_config(
    '[crew]\nname = "c"\ntask = "digits"\nrounds = 2\ngroup_size = 4\nproblems_per_round = 4\n'
    'objective = "ftis"\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n[[peer]]\nname = "b"\n'
    'model = "tiny:1m"\n'
)


def sender(groups: int, tokens: float, **more: int) -> SenderMetrics:
    return SenderMetrics(
        groups=groups, reward=0.5, accuracy=0.5, tokens=tokens, truncated=0.0, age=0.0,
        silent_groups=0, **more,
    )  # fmt: skip


def step(number: int, peer: str = "a", rate: float = 40.0, **senders: SenderMetrics) -> LearnerLine:
    return LearnerLine(
        round=number, peer=peer, reward=0.5, senders=senders,
        timing=Timing(0.5, 0.25, rate, 0.0), heldout={"sort": 0.1 * number},
    )  # fmt: skip


def test_tokens_and_seconds_are_those_of_the_peers_own_lines() -> None:
    lines = [
        LearnerLine(round=0, peer="a", heldout={"sort": 0.5}),
        step(1, a=sender(2, 2.5, sequences=8), b=sender(2, 3.0, sequences=8)),
        step(1, peer="b", a=sender(9, 9.0, sequences=9)),
        step(2, rate=44.0, a=sender(1, 2.0, sequences=5), b=sender(1, 1.5, sequences=2)),
    ]
    expected = Spent(sampled=20 + 22, own=20 + 10, foreign=24 + 3, seconds=1.5)
    assert spent_of(CREW, "a", lines) == expected
    assert expected.learned == 57
    found = outcome_of(CREW, "best", "a", lines, "ftis:C=3")
    assert (found.spent, found.made, found.lowest) == (expected, "ftis:C=3", {"sort": 0.1})


def test_lines_that_do_not_count_sequences_have_whole_groups() -> None:
    assert spent_of(CREW, "a", [step(1, a=sender(2, 2.5), b=sender(3, 3.0))]) == Spent(
        sampled=20, own=20, foreign=36, seconds=0.75
    )


def test_a_round_that_was_sampled_before_a_crash_counts_what_the_step_took_of_it() -> None:
    again = step(1, rate=0.0, a=sender(2, 2.5, sequences=8))
    assert spent_of(CREW, "a", [again]).sampled == 20
    waited = msgspec.structs.replace(again, reward=None)  # it did not sample in this round
    assert spent_of(CREW, "a", [waited]).sampled == 0


def test_what_is_learned_beside_the_objective_counts() -> None:
    """Rescues are others' tokens; continuations are own ones, in sampling and in learning."""
    met = MetProblems(rescued_tokens=7, branched_tokens=5, branches=1, branch_tokens=6)
    taught = msgspec.structs.replace(step(1, a=sender(2, 2.5, sequences=8)), met=met)
    assert spent_of(CREW, "a", [taught]) == Spent(sampled=20, own=25, foreign=7, seconds=0.75)
    again = msgspec.structs.replace(taught, timing=None)
    assert spent_of(CREW, "a", [again]).sampled == 26


def test_own_successes_that_are_kept_count_as_own_in_learning_alone() -> None:
    plain = step(1, a=sender(2, 2.5, sequences=8), b=sender(2, 3.0, sequences=8))
    kept = KeptSuccesses(sequences=3, tokens=11, fallen=0.5)
    lines = [msgspec.structs.replace(plain, kept=kept), step(2, a=sender(1, 2.0, sequences=5))]
    expected = Spent(sampled=20 + 20, own=20 + 10 + 11, foreign=24, seconds=1.5)
    assert spent_of(CREW, "a", lines) == expected


def test_what_samplers_draw_is_their_learners() -> None:
    crew = parse_config(
        '[crew]\nname = "c"\ntask = "digits"\nrounds = 2\ngroup_size = 4\n'
        'problems_per_round = 4\nobjective = "ftis"\npace = "async"\n'
        '[[peer]]\nname = "a"\nmodel = "tiny:1m"\nrole = "learner"\n'
        '[[peer]]\nname = "b"\nrole = "sampler"\nfollows = "a"\n'
    )
    lines = [
        SamplerLine(round=1, peer="b", version=0, reward=0.5, sampled_tokens=17),
        msgspec.structs.replace(step(1, b=sender(2, 2.5, sequences=8)), reward=None, timing=None),
    ]
    assert spent_of(crew, "a", lines) == Spent(sampled=17, own=20, foreign=0, seconds=0.0)


def test_outcomes_kept_before_tokens_were_counted_still_read(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(
        '{"arm":"ftis","seed":1,"peer":"a","start":{"x":0.1},"end":{"x":0.2},"lowest":{"x":0.1},'
        '"ood":{}}\n'
    )
    (found,) = read_outcomes(path)
    assert (found.spent, found.made, found.curve) == (None, "", {})
    assert read_outcomes(tmp_path / "none") == []


LINE = (
    '{"arm":"ftis","seed":1,"peer":"a","start":{"x":0.1},"end":{"x":0.2},"lowest":{"x":0.1},'
    '"ood":{}}\n'
)


def test_a_line_that_cannot_be_read_is_named_with_its_file_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(LINE + LINE[:30])
    words = r"outcomes\.jsonl, line 2 cannot be read \(.*\); delete this line, and give the command"
    with pytest.raises(ValueError, match=words):
        read_outcomes(path)
    with pytest.raises(ValueError, match=words):
        read_crew_outcomes(path)


def test_a_last_line_that_a_kill_cut_short_can_be_left_out_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(LINE + LINE[:30])
    assert [one.arm for one in read_whole_outcomes(path)] == ["ftis"]
    path.write_text(LINE[:30] + "\n" + LINE)
    with pytest.raises(ValueError, match="line 1 cannot be read"):
        read_whole_outcomes(path)
