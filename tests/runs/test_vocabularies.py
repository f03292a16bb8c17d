"""What peers of different vocabularies can make of each other's answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.test_cli import as_json, motley
from fakes import PROBLEM, reference_logp
from families import family_model
from motley.config import PeerConfig
from motley.engines import Completion
from motley.models.opening import initial_policy
from motley.models.policy import Policy
from motley.records import Problem
from motley.runs.other_cuts import CutText, Likelihood, Marginal
from motley.runs.vocabularies import Crossing, Speaker, Spoken, crossing, crossings

PROMPT = "sort 4312="


def policy_of(vocabulary: str, seed: int = 0) -> Policy:
    return initial_policy(PeerConfig(name="a", model=f"tiny:0.3m/{vocabulary}"), seed=seed)


def ids(policy: Policy, text: str) -> tuple[int, ...]:
    return tuple(policy.vocabulary.encode(text))


def speaker(
    vocabulary: str, answers: Sequence[tuple[Sequence[str], bool]] = (), name: str = ""
) -> Speaker:
    """Answers as the texts of tokens, and whether they ended."""
    policy = policy_of(vocabulary)
    made = []
    for tokens, ended in answers:
        spoken = [id for token in tokens for id in ids(policy, token)]
        whole = (*spoken, policy.vocabulary.end_id) if ended else tuple(spoken)
        made.append(
            Completion(whole, (-1.0,) * len(whole), "stop" if ended else "length"),
        )
    problem = Problem(prompt=PROMPT, answer="1234")
    return Speaker(name or vocabulary, policy, [Spoken(problem, one) for one in made])


def crossed(sender: Speaker, receiver: str) -> Crossing:
    return crossing(sender, speaker(receiver), temperature=1.0)


# Spans


def test_between_digits_and_bytes_every_digit_is_a_span() -> None:
    found = crossed(speaker("words", [("12", True), ("312", True)]), "bytes")
    assert (found.sender, found.receiver) == ("words", "bytes")
    assert (found.bytes_in_spans, found.tokens_per_span) == (1.0, 1.0)
    assert (found.not_canonical, found.uncut, found.gap) == (0.0, 0.0, 0.0)
    assert found.objectives == "spans are nearly tokens: hardly anything is lost"


def test_with_pairs_a_span_is_the_whole_answer() -> None:
    found = crossed(speaker("words", [("1234", True), ("12", True)]), "pairs")
    assert (found.bytes_in_spans, found.tokens_per_span) == (0.0, 2.5)  # 12 34 end, 12 end
    assert found.gap is not None
    assert found.gap > 0
    assert found.objectives.startswith("a span is the whole answer")


def test_what_stands_behind_the_last_stable_cut_of_an_answer_without_end_is_in_no_span() -> None:
    found = crossed(speaker("words", [("1,23", False)]), "pairs")
    assert (found.bytes_in_spans, found.tokens_per_span) == (0.5, 1.5)  # 1 comma | 23


def test_answers_in_other_tokens_than_the_own_are_text_only() -> None:
    sender = speaker("pairs", [(["1", "2"], True), (["12"], True), (["34"], True), ("5", True)])
    found = crossed(sender, "words")
    assert (found.not_canonical, found.uncut) == (0.25, 0.0)
    assert "25% of the answers are text only: rescue and branch use them" in found.objectives


def test_answers_that_a_receiver_has_no_tokens_for_count_in_the_baseline_only() -> None:
    found = crossed(speaker("bytes", [("12", True), ("what", True), ("3", True)]), "words")
    assert (found.not_canonical, found.uncut) == (0.0, pytest.approx(1 / 3))
    assert "33% count in the baseline only" in found.objectives
    assert "text only" not in found.objectives


def test_answers_that_are_too_long_in_the_receivers_tokens_are_not_cut() -> None:
    sender = speaker("words", [(["increment "] * 6, True), (["increment "] * 5, False)])
    found = crossed(sender, "bytes")  # behind ten bytes of prompt, in 64 positions
    assert (found.not_canonical, found.uncut) == (0.0, 0.5)


def test_an_answer_with_a_special_token_inside_cannot_be_read() -> None:
    sender = speaker("words", [("12", True)])
    pad, end = sender.policy.vocabulary.pad_id, sender.policy.vocabulary.end_id
    odd = Completion((*ids(sender.policy, "1"), pad, end), (-1.0,) * 3, "stop")
    both = Speaker("words", sender.policy, [*sender.answers, Spoken(PROBLEM, odd)])
    found = crossed(both, "bytes")
    assert (found.not_canonical, found.uncut) == (0.5, 0.5)


def test_a_sender_of_whom_nothing_can_be_compared_says_so() -> None:
    found = crossed(speaker("bytes", [("what", True)]), "words")
    assert (found.bytes_in_spans, found.tokens_per_span, found.gap) == (None, None, None)
    assert "nothing can be learned by a weight" in found.objectives


def test_every_sender_meets_every_receiver_of_another_vocabulary() -> None:
    answers = [("12", True)]
    crew = [speaker("words", answers, "a"), speaker("bytes", answers, "b")]
    crew.append(speaker("words", answers, "c"))
    pairs = [(one.sender, one.receiver) for one in crossings(crew, 1.0)]
    assert pairs == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]


# Other cuts


def all_cuts(text: str) -> list[list[str]]:
    """Of digits, one or two at a time."""
    if not text:
        return [[]]
    sizes = (1, 2) if len(text) > 1 else (1,)
    return [[text[:size], *rest] for size in sizes for rest in all_cuts(text[size:])]


def likelihoods(
    policy: Policy, texts: Sequence[str], num_walks: int, temperature: float = 1.0
) -> list[Likelihood]:
    prompt, end = ids(policy, PROMPT), (policy.vocabulary.end_id,)
    cuts = [CutText(prompt, text.encode(), ids(policy, text), end) for text in texts]
    return Marginal(policy, temperature, random.Random(0)).likelihoods(cuts, num_walks)


@pytest.mark.slow
@pytest.mark.parametrize("num_walks", [20, 1])
def test_what_other_cuts_add_is_that_of_all_of_them(num_walks: int) -> None:
    """With a walk for each way out, and on average where one of them is drawn."""
    policy = policy_of("pairs", seed=3)
    with torch.no_grad():
        policy.base.get_input_embeddings().weight.mul_(2)  # a model that is surer of itself
    prompt, end = ids(policy, PROMPT), policy.vocabulary.end_id
    logp = {}
    for cut in all_cuts("1234"):
        tokens = (*(id for part in cut for id in ids(policy, part)), end)
        logp[tuple(cut)] = float(reference_logp(policy, prompt, tokens).detach().double().sum())
    canonical = logp["12", "34"]
    times = 2000 // num_walks
    found = likelihoods(policy, ["1234"] * times, num_walks)
    assert found[0].canonical == pytest.approx(canonical, abs=1e-3)
    added = sum(math.exp(other - canonical) for other in logp.values()) - 1
    told = [math.expm1(one.gap) for one in found]
    assert sum(told) / times == pytest.approx(added, rel=0.1)


@pytest.mark.parametrize("vocabulary", ["words", "bytes"])
def test_where_there_is_one_cut_only_nothing_is_added(vocabulary: str) -> None:
    (found,) = likelihoods(policy_of(vocabulary), ["1234"], num_walks=4)
    assert found.gap == 0.0


def test_the_temperature_is_that_of_the_crew() -> None:
    policy = policy_of("pairs")
    prompt, tokens = ids(policy, PROMPT), (*ids(policy, "1234"), policy.vocabulary.end_id)
    (found,) = likelihoods(policy, ["1234"], 2, temperature=0.5)
    wanted = reference_logp(policy, prompt, tokens, temperature=0.5).detach().double().sum()
    assert found.canonical == pytest.approx(float(wanted), abs=1e-4)


def test_a_model_that_is_scored_one_sequence_at_a_time_has_its_own_likelihood() -> None:
    vocabulary = policy_of("pairs").vocabulary
    model = family_model("granite", sizes={"vocab_size": vocabulary.size})
    policy = Policy(model, vocabulary, one_by_one=True)
    prompt, tokens = ids(policy, PROMPT), (*ids(policy, "1234"), policy.vocabulary.end_id)
    (found,) = likelihoods(policy, ["1234"], 2)
    wanted = reference_logp(policy, prompt, tokens).detach().double().sum()
    assert found.canonical == pytest.approx(float(wanted), abs=1e-4)


# The check


CREW = """
[crew]
name = "two"
task = "digits"
objective = "ftis"
rounds = 1
group_size = 4
problems_per_round = 4
[task]
kinds = ["compare"]
levels = [2]
[sampling]
max_tokens = 4
[[peer]]
name = "a"
model = "tiny:0.3m/bytes"
warm = { kinds = ["compare"], steps = 20 }
[[peer]]
name = "b"
model = "tiny:0.3m/OTHER"
warm = { kinds = ["compare"], steps = 20 }
"""


def checked(folder: Path, other: str) -> dict[str, Any]:
    crew = folder / "crew.toml"
    crew.write_text(CREW.replace("OTHER", other))
    return as_json("check", crew)


@pytest.mark.slow
def test_a_check_tells_of_each_pair(tmp_path: Path) -> None:
    found = checked(tmp_path, "words")
    assert {row["result"] for row in found["rows"]} == {"ok"}
    first, second = found["pairs"]
    assert (first["sender"], first["receiver"]) == ("a", "b")
    assert (second["sender"], second["receiver"]) == ("b", "a")
    assert all(
        0 < pair["bytes_in_spans"] <= 1 <= pair["tokens_per_span"] for pair in (first, second)
    )
    assert second["gap"] == 0.0  # bytes spell a text in one way only
    assert "spans are nearly tokens" in motley("check", tmp_path / "crew.toml").stdout


@pytest.mark.slow
def test_a_crew_of_one_vocabulary_has_no_pairs(tmp_path: Path) -> None:
    assert checked(tmp_path, "bytes").keys() == {"title", "rows"}
