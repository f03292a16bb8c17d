"""The three vocabularies of tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from motley.archive import rollouts
from motley.config import PeerConfig, Warm, parse_config, read_config, with_changes
from motley.learning.warm import expected_accuracy, warm_start
from motley.models.named import TINY_VOCABULARIES, TinyParts
from motley.models.opening import initial_policy, saved_policy
from motley.models.spelled import Uncut
from motley.models.tiny import tiny_model
from motley.models.tiny_vocabularies import tiny_vocabularies
from motley.models.vocabulary import Vocabulary
from motley.reports.export import export_model
from motley.runs.checking import check_config
from motley.runs.conformance import check_crew
from motley.runs.local import LocalCrew
from motley.spelling import Pair
from motley.tasks import draw_problems, load_task
from motley.tasks.digits import SYMBOLS, WORDS

CREWS = Path(__file__).parents[2] / "crews"
KINDS = ["reverse", "sort", "increment", "sum", "difference", "product", "chain", "compare"]
BY_NAME = dict(zip(TINY_VOCABULARIES, tiny_vocabularies(), strict=True))
digits_text = st.lists(st.sampled_from([*WORDS, *SYMBOLS])).map("".join)


def spelled(vocabulary: Vocabulary, text: str) -> list[bytes | None]:
    made = vocabulary.cut(text.encode())
    assert not isinstance(made, Uncut), made
    return [vocabulary.spelling.token_bytes[id] for id in made]


def test_a_name_has_a_shape_and_perhaps_a_vocabulary() -> None:
    assert TinyParts.of("tiny:1m") == TinyParts.of("tiny:1m/words") == ("1m", "words")
    assert TinyParts.of("tiny:deep/pairs") == ("deep", "pairs")


@pytest.mark.parametrize("name", ["tiny:1m/letters", "tiny:1m/", "tiny:1m/bytes/pairs"])
def test_an_unknown_vocabulary_is_refused_with_those_that_exist(name: str) -> None:
    use = "use tiny:1m/words, tiny:1m/bytes, tiny:1m/pairs$"
    with pytest.raises(ValueError, match=use):
        TinyParts.of(name)


def test_the_vocabularies_are_those_that_records_will_name() -> None:
    known = [(name, v.fingerprint, v.size) for name, v in BY_NAME.items()]
    assert known == [
        ("words", "f985d7aef1f03d7f", 28),
        ("bytes", "8e43184c03352892", 258),
        ("pairs", "3a5431fbc3f259e6", 128),
    ]
    for vocabulary in BY_NAME.values():
        assert (vocabulary.pad_id, vocabulary.end_ids, vocabulary.begin) == (0, (1,), ())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_problem_of_the_digits_task_is_spelled_and_scored(name: str) -> None:
    vocabulary, task = BY_NAME[name], load_task("digits", {"kinds": KINDS})
    for problem in draw_problems(task, "spelled", "train", 80):
        for text in (problem.prompt, problem.answer):
            ids = vocabulary.encode(text)
            assert vocabulary.decode([*ids, vocabulary.end_id]) == text
            assert vocabulary.cut(text.encode()) == tuple(ids)
            assert vocabulary.spelling.bytes_of(ids) == text.encode()


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=60)
@given(text=digits_text)
def test_a_cut_spells_its_text_and_is_canonical(name: str, text: str) -> None:
    vocabulary = BY_NAME[name]
    ids = vocabulary.cut(text.encode())
    assert isinstance(ids, tuple)
    assert vocabulary.spelling.bytes_of(ids) == text.encode()
    assert vocabulary.is_canonical([*ids, vocabulary.end_id])


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_spell_any_text_a_token_a_byte(text: str) -> None:
    ids = BY_NAME["bytes"].cut(text.encode())
    assert isinstance(ids, tuple)
    assert len(ids) == len(text.encode())
    assert BY_NAME["bytes"].decode(ids) == text


def test_pairs_are_cut_from_the_left_and_an_odd_digit_stays_alone() -> None:
    assert spelled(BY_NAME["pairs"], "sort 12345=") == [b"sort ", b"12", b"34", b"5", b"="]
    assert spelled(BY_NAME["pairs"], "1+234,5") == [b"1", b"+", b"23", b"4", b",", b"5"]
    one, two = BY_NAME["pairs"].encode("1"), BY_NAME["pairs"].encode("2")
    assert not BY_NAME["pairs"].is_canonical([*one, *two])  # which is 12
    with pytest.raises(ValueError, match=r"tiny:NAME/bytes, which spells any text"):
        BY_NAME["pairs"].encode("what?")


@pytest.mark.parametrize(
    ("sender", "receiver", "stable"),
    [("words", "bytes", "0123456789+-*,<>="), ("words", "pairs", "+-*,<>=")],
)
def test_where_the_cuts_of_two_are_stable(sender: str, receiver: str, stable: str) -> None:
    """No digit ends a span where another may join it."""
    pair = Pair.of(BY_NAME[sender].spelling, BY_NAME[receiver].spelling)
    text = "sort 31+24,5="
    found = [text[i] for i in np.flatnonzero(pair.stable(text.encode()))]
    assert found == [" ", *(c for c in text[5:] if c in stable)]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_tiny_models_of_each_vocabulary_learn_their_digits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    task = load_task("digits", {"kinds": ["compare"], "levels": [2]})
    peer = PeerConfig(name="a", model=f"tiny:0.3m/{name}")
    policy = initial_policy(peer, seed=0, task=task)
    problems = draw_problems(task, "check", "heldout", 16)
    before = expected_accuracy(policy, problems)["compare"]
    warm_start(policy, task, Warm(kinds=("compare",), steps=12), seed=0)
    after = expected_accuracy(policy, problems)["compare"]
    assert after > 10 * before
    policy.save(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == (
        BY_NAME[name].tokenizer.get_vocab()
    )
    again = saved_policy(tmp_path / "model", task=task)
    assert again.vocabulary.fingerprint == BY_NAME[name].fingerprint
    assert again.vocabulary.spelling == BY_NAME[name].spelling
    assert expected_accuracy(again, problems)["compare"] == pytest.approx(after)


def test_a_name_without_a_vocabulary_has_the_weights_it_always_had() -> None:
    value = lambda name: torch.cat([p.detach().flatten() for p in tiny_model(name, 5).parameters()])
    assert torch.equal(value("0.3m"), value("0.3m/words"))
    assert float(value("0.3m").double().abs().sum()) == pytest.approx(13986.53100653111)
    assert value("0.3m/bytes").numel() - value("0.3m").numel() == 96 * (258 - 28)


def test_the_ready_crew_of_three_vocabularies_fits_the_finest_cut() -> None:
    config = read_config(CREWS / "vocabularies.toml")
    assert [TinyParts.of(peer.model).vocabulary for peer in config.peer] == list(BY_NAME)
    check_config(config)
    too_short = with_changes(config, ["sampling.max_tokens=5"])
    with pytest.raises(ValueError, match="use at least 6, the end token included"):
        check_config(too_short)


CREW = """
[crew]
name = "two"
task = "digits"
objective = "ftis"
rounds = 3
group_size = 4
problems_per_round = 4
[task]
kinds = ["compare"]
levels = [2]
[sampling]
max_tokens = 4
[learning]
lr = 1e-3
checkpoint_every = 1
[evaluate]
every = 3
problems = 4
[[peer]]
name = "a"
model = "tiny:0.3m/NAME"
warm = { kinds = ["compare"], steps = 20 }
[[peer]]
name = "b"
model = "tiny:0.3m/NAME"
train = { lora = { rank = 2 } }
warm = { kinds = ["compare"], steps = 20 }
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "words"])
def test_a_crew_of_each_vocabulary_trains_resumes_is_read_and_exported(
    name: str, tmp_path: Path
) -> None:
    config = parse_config(CREW.replace("NAME", name))
    assert {row["result"] for row in check_crew(config).rows} == {"ok"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for _ in LocalCrew.start(config, whole).rounds():
        pass
    for lines in LocalCrew.start(config, stopped).rounds():
        if lines[0].round == 2:
            break
    for _ in LocalCrew.resume(stopped).rounds():
        pass
    logged = [(row.completion, row.reward) for row in rollouts(whole)]
    assert logged == [(row.completion, row.reward) for row in rollouts(stopped)]
    assert all(text is not None for text, _ in logged)
    assert any(reward and text in tuple("<>=") for text, reward in logged)
    for merge in (False, True):
        out = export_model(whole, "b", tmp_path / f"out{merge}", merge=merge)
        assert saved_policy(out).vocabulary.fingerprint == BY_NAME[name].fingerprint
