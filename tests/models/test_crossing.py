"""Between two vocabularies: spans of any text, and the traps that lie between tokenizers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from architectures import END, TURN_END, text_tokenizer
from motley.engines import Completion
from motley.models.policy import Policy
from motley.models.prompts import Prompts
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary
from motley.records import Problem
from motley.runs.vocabularies import Speaker, Spoken, are_canonical
from motley.spelling import Aligned, Pair
from vocabularies import text_token

from .test_spelled import SMALL, random_text

OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
KINDS = [*SMALL, "tiny words", "tiny pairs", "tiny bytes"]


@cache
def of_kind(kind: str) -> Vocabulary:
    tiny = kind.removeprefix("tiny ")
    return Vocabulary(SMALL[kind]()) if kind in SMALL else tiny_vocabulary(tiny)


@cache
def pair_of(sender: str, receiver: str) -> Pair:
    return Pair.of(of_kind(sender).spelling, of_kind(receiver).spelling)


def ended(vocabulary: Vocabulary, ids: Sequence[int]) -> list[int]:
    return [*ids, vocabulary.end_id]


def check_tiling(
    pair: Pair, texts: Sequence[bytes], sent: list[list[int]], scored: list[list[int]]
) -> Aligned:
    """Spans spell their texts on both sides, each byte and each log-prob once."""
    spans = pair.align(sent, scored, [True] * len(texts))
    assert len(spans.sender_T) == sum(map(len, sent))
    assert len(spans.receiver_T) == sum(map(len, scored))
    spelled = []
    for spelling, many, span_T in (
        (pair.sender, sent, spans.sender_T),
        (pair.receiver, scored, spans.receiver_T),
    ):
        assert (np.diff(span_T) >= 0).all()
        parts = [b""] * len(spans.closed_S)
        for token, span in zip((t for ids in many for t in ids), span_T, strict=True):
            parts[span] += spelling.token_bytes[token] or b""
        spelled.append(parts)
    assert spelled[0] == spelled[1]
    bounds = np.cumsum([0, *spans.count_B]).tolist()
    assert [b"".join(spelled[0][a:b]) for a, b in pairwise(bounds)] == list(texts)
    rng = np.random.default_rng(len(spans.sender_T))
    logq_T, logp_T = (-rng.exponential(size=len(one)) for one in (spans.sender_T, spans.receiver_T))
    total = spans.log_ratios(logq_T, logp_T).sum()
    assert total == pytest.approx(logp_T.sum() - logq_T.sum())
    return spans


# Any text


@pytest.mark.slow
@settings(max_examples=200)
@given(
    sender=st.sampled_from(KINDS),
    receiver=st.sampled_from(KINDS),
    texts=st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")),
            st.text("0123456789+=, sort"),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_spans_between_any_two_kinds_tile_any_text(
    sender: str, receiver: str, texts: list[str]
) -> None:
    both = [of_kind(sender), of_kind(receiver)]
    raw = [text.encode() for text in texts]
    cuts = [side.cut_all(raw) for side in both]
    known = [i for i in range(len(raw)) if all(isinstance(side[i], tuple) for side in cuts)]
    sent, scored = (
        [ended(vocabulary, cast(tuple[int, ...], side[i])) for i in known]
        for vocabulary, side in zip(both, cuts, strict=True)
    )
    check_tiling(pair_of(sender, receiver), [raw[i] for i in known], sent, scored)


def trained(seed: int) -> Vocabulary:
    """Byte-level BPE as a few random texts make it, with a rule of its own for what is joined."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    rules = [Regex(r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), Regex(r"\p{N}{1,3}|[^\p{N}]+"), None]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=seed % 2 == 0)
    rule = rules[seed % len(rules)]
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(rule, "isolated"), byte_level])
        if rule
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + rng.randint(20, 300),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([random_text(rng) * 3 for _ in range(40)], trainer)
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END))


@pytest.mark.parametrize("seed", range(6))
def test_spans_between_vocabularies_of_random_texts_tile_them(seed: int) -> None:
    sender, receiver = trained(seed), trained(seed + 100)
    rng = random.Random(seed)
    texts = [random_text(rng).encode() for _ in range(100)]
    sent, scored = (
        [ended(side, cast(tuple[int, ...], cut)) for cut in side.cut_all(texts)]
        for side in (sender, receiver)
    )
    check_tiling(Pair.of(sender.spelling, receiver.spelling), texts, sent, scored)


# The traps


def crossed(sender: Vocabulary, receiver: Vocabulary, text: str) -> Aligned:
    raw = text.encode()
    sent, scored = (
        ended(side, cast(tuple[int, ...], side.cut(raw))) for side in (sender, receiver)
    )
    return check_tiling(Pair.of(sender.spelling, receiver.spelling), [raw], [sent], [scored])


def test_a_character_that_both_sides_split_elsewhere_closes_with_its_last_byte() -> None:
    """Byte-level BPE has it in parts, the other one as bytes that it falls back to."""
    spans = crossed(of_kind("tiny bytes"), of_kind("pieces"), "é5")
    assert spans.count_B.tolist() == [4]  # C3, A9, 5 and the end: nothing joins these bytes
    joined = text_tokenizer()
    joined.add_tokens([text_token("é")])
    spans = crossed(of_kind("tiny bytes"), Vocabulary(joined), "é5")
    assert spans.num_sent().tolist()[0] == 2  # é is one token there, and is not torn apart


def test_a_begin_token_that_one_side_has_is_in_its_prompt_and_in_no_span() -> None:
    begins, plain = (Vocabulary(text_tokenizer(begins=begins)) for begins in (True, False))
    problem = Problem(prompt="1", answer="12")
    with_begin, without = (Prompts(side).ids(problem) for side in (begins, plain))
    assert with_begin == (*begins.begin, *without)
    spans = crossed(begins, plain, "12 and 5")
    assert len(spans.sender_T) == len(spans.receiver_T)


def test_an_end_token_that_is_padding_on_one_side_ends_once() -> None:
    tokenizer = text_tokenizer()
    tokenizer.pad_token = END
    padded, plain = Vocabulary(tokenizer), of_kind("tiny bytes")
    assert padded.pad_id == padded.end_id
    spans = crossed(padded, plain, "12")
    assert spans.sender_T[-1] == spans.receiver_T[-1] == len(spans.closed_S) - 1
    again = [*ended(padded, padded.encode("12")), padded.pad_id]
    assert not padded.is_canonical(again)


@pytest.mark.parametrize("text", [" Hello world", "Hello", "  12", "a\n 1"])
@pytest.mark.parametrize("kind", ["pieces, prepended", "pieces, metaspace", "unigram"])
def test_no_space_comes_or_goes_between_sentencepiece_and_bytes(kind: str, text: str) -> None:
    for pair in ((kind, "tiny bytes"), ("tiny bytes", kind)):
        crossed(of_kind(pair[0]), of_kind(pair[1]), text)


def test_the_name_of_a_special_token_is_text_on_both_sides() -> None:
    pieces, bytes_ = of_kind("pieces"), of_kind("tiny bytes")
    crossed(bytes_, pieces, "12</s><0x41><unk>")
    crossed(pieces, bytes_, "12<end><pad>")


def test_rows_that_only_fill_a_matrix_change_no_span() -> None:
    tokenizer = text_tokenizer()
    exact, filled = Vocabulary(tokenizer), Vocabulary(tokenizer, size=len(tokenizer) + 64)
    other = of_kind("pieces")
    for one, two in ((crossed(exact, other, "12 é"), crossed(filled, other, "12 é")),):
        assert one.sender_T.tolist() == two.sender_T.tolist()
        assert one.closed_S.tolist() == two.closed_S.tolist()


def speaker(vocabulary: Vocabulary, ends: Sequence[int]) -> Speaker:
    """Says 12, and ends by each of these."""
    policy = SimpleNamespace(vocabulary=vocabulary, prompts=Prompts(vocabulary, chat=True))
    tokens = [(*vocabulary.encode("12"), end) for end in ends]
    made = [Completion(one, (-1.0,) * len(one), "stop") for one in tokens]
    problem = Problem(prompt="1", answer="2")
    return Speaker("a", cast(Policy, policy), [Spoken(problem, one) for one in made])


def test_each_side_ends_by_what_its_own_chat_template_teaches() -> None:
    turn = text_tokenizer()
    other = text_tokenizer(OTHER_TEMPLATE, size=300)
    ids = [t.convert_tokens_to_ids(TURN_END) for t in (turn, other)]
    both = [Vocabulary(t, ends=[id]) for t, id in zip((turn, other), ids, strict=True)]
    assert both[0].turn_end_id == ids[0] != both[0].end_id
    assert both[1].turn_end_id == both[1].end_id != ids[1]
    problem = Problem(prompt="what", answer="12 5")
    sent, scored = (list(Prompts(side, chat=True).answer_ids(problem)) for side in both)
    pair = Pair.of(both[0].spelling, both[1].spelling)
    spans = check_tiling(pair, [b"12 5"], [sent], [scored])
    assert spans.sender_T[-1] == spans.receiver_T[-1]
    # two ends of the sender's for one of the receiver's: the unusual one is text only
    assert are_canonical(speaker(both[0], both[0].end_ids)) == [False, True]
    assert are_canonical(speaker(both[1], both[1].end_ids)) == [True, False]
