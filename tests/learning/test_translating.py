"""Groups of other vocabularies, in the receiver's tokens: what is kept, what is left out, and where
each log-prob goes.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fakes import PROBLEM, group, tiny_policy
from motley.learning import translating
from motley.learning.readings import BySpans, NotCut, Reading, TextOnly
from motley.learning.translating import FOLD_TOKENS, Translation, Translator
from motley.models.prompts import Prompts
from motley.records import Ending, Group, Rollout
from motley.spelling import Pair, Spelling

WORDS = (b"sort ", b"12", b"34", b"1234", b"=", b"+", b"4+", b"56=", b"rev")
# bytes, longer pieces of what the tiny vocabulary has single tokens for, and an end
SENDER = Spelling((*(bytes([byte]) for byte in range(256)), *WORDS, None))
END = len(SENDER) - 1


def spell(*pieces: bytes | int) -> tuple[int, ...]:
    """Ids of the sender's tokens: a word, or each byte of another text."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += [256 + WORDS.index(piece)] if piece in WORDS else list(piece)
    return tuple(ids)


def sent(
    *pieces: bytes | int,
    reward: float = 0.0,
    ending: Ending = "stop",
    canonical: bool = True,
    seed: int = 0,
) -> Rollout:
    tokens = spell(*pieces, *([END] if ending == "stop" else []))
    logprobs = tuple((-np.random.default_rng(seed).exponential(1.0, len(tokens))).tolist())
    return Rollout(
        tokens=tokens, logprobs=logprobs, reward=reward, ending=ending, canonical=canonical
    )


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return tiny_policy().prompts


def translator(prompts: Prompts, max_tokens: int = 16, max_positions: int = 256) -> Translator:
    return Translator(prompts, max_tokens, max_positions)


def translated(made: Translation) -> tuple[Group, Reading]:
    return made.group, made.reading


def test_a_completion_gets_the_receivers_tokens_of_the_same_text(prompts: Prompts) -> None:
    rollouts = [sent(b"1234", b"4+", b"7"), sent(b"12", b"9", ending="length")]
    made, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    first, second = made.rollouts
    assert prompts.vocabulary.spelling.bytes_of(first.tokens[:-1]) == b"12344+7"
    assert first.tokens[-1] == prompts.vocabulary.end_id
    assert prompts.vocabulary.spelling.bytes_of(second.tokens) == b"129"
    assert [r.ending for r in made.rollouts] == ["stop", "length"]
    assert [len(r.logprobs) for r in made.rollouts] == [8, 3]
    assert reading.sent.rollouts == tuple(rollouts)


def test_a_span_has_the_log_probs_of_the_senders_tokens_in_it(prompts: Prompts) -> None:
    # no token of either goes on behind 7 or 9; behind 1, 2, 3 and 4 some do
    rollout = sent(b"12", b"7", b"34", b"9")
    made, reading = translated(
        translator(prompts).translate(group(rollouts=[rollout] * 2), PROBLEM, SENDER)
    )
    q, (read, _) = rollout.logprobs, reading.rollouts
    assert isinstance(read, BySpans)
    assert read.spans.start_S.tolist() == [0, 3, 6]  # 127, 349, end
    assert read.spans.num_sent_S.tolist() == [2, 2, 1]
    sums = read.spans.sums(np.array(made.rollouts[0].logprobs))
    np.testing.assert_allclose(sums, [q[0] + q[1], q[2] + q[3], q[4]], rtol=1e-14)
    assert len(set(made.rollouts[0].logprobs[:3])) == 1  # evenly
    assert not read.spans.is_open
    assert (read.num_bytes, read.num_closed_bytes) == (6, 6)


def test_the_end_keeps_its_log_prob_where_its_span_has_more_than_the_end(prompts: Prompts) -> None:
    rollout = sent(b"12")  # behind 2 the sender's 1234 could go on
    made, reading = translated(
        translator(prompts).translate(group(rollouts=[rollout] * 2), PROBLEM, SENDER)
    )
    read = reading.rollouts[0]
    assert isinstance(read, BySpans)
    assert read.spans.start_S.tolist() == [0]
    assert made.rollouts[0].logprobs == pytest.approx(
        [rollout.logprobs[0] / 2, rollout.logprobs[0] / 2, rollout.logprobs[1]]
    )
    assert read.num_closed_bytes == 0  # one span is all there is


def test_a_span_that_a_length_limit_cut_is_open(prompts: Prompts) -> None:
    rollouts = [sent(b"97", b"1", ending="length"), sent(b"9", b"7", ending="length")]
    _, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    first, second = reading.rollouts
    assert isinstance(first, BySpans)
    assert isinstance(second, BySpans)
    assert (first.spans.is_open, second.spans.is_open) == (True, False)
    assert (first.num_bytes, first.num_closed_bytes) == (3, 2)
    assert first.spans.wagers(np.array([0.1, 0.2, 0.3])).tolist() == [0.1, 0.2, -np.inf]
    assert second.spans.wagers(np.array([0.1, 0.2])).tolist() == [0.1, 0.2]


def test_spans_of_a_whole_group_are_those_of_each_completion(prompts: Prompts) -> None:
    rng = np.random.default_rng(0)
    rollouts = []
    for number in range(40):
        pieces = [bytes([c]) for c in rng.choice(list(b"0123456789+=,<"), rng.integers(1, 9))]
        pieces += [WORDS[1:6][i] for i in rng.integers(0, 5, rng.integers(0, 3))]
        order = [pieces[i] for i in rng.permutation(len(pieces))]
        ending: Ending = "stop" if rng.random() < 0.7 else "length"
        rollouts.append(sent(*order, ending=ending, seed=number))
    made, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    pair = Pair.of(SENDER, prompts.vocabulary.spelling)
    for rollout, mine, read in zip(rollouts, made.rollouts, reading.rollouts, strict=True):
        assert isinstance(read, BySpans)
        alone = pair.align([rollout.tokens], [mine.tokens], [rollout.ending == "stop"])
        totals = np.bincount(alone.sender_T, rollout.logprobs)
        np.testing.assert_allclose(read.spans.sums(np.array(mine.logprobs)), totals, rtol=1e-12)
        assert read.spans.num_sent_S.tolist() == alone.num_sent().tolist()
        assert read.spans.is_open is not bool(alone.closed_S[-1])
        assert sum(mine.logprobs) == pytest.approx(sum(rollout.logprobs), rel=1e-12)


def same(one: Translation, other: Translation) -> bool:
    """Down to the last bit."""
    told = [
        [(type(read), read.spans.start_S.tolist(), read.spans.num_sent_S.tolist(), read.num_bytes)]
        if isinstance(read, BySpans)
        else read
        for made in (one, other)
        for read in made.reading.rollouts
    ]
    half = len(told) // 2
    return (
        one.group == other.group
        and one.reading.number_R == other.reading.number_R
        and told[:half] == told[half:]
    )


@pytest.mark.parametrize("most", [0, 2, 4096])
def test_an_answer_that_comes_again_is_read_as_if_it_were_new(
    prompts: Prompts, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translating, "MOST_KNOWN", most)
    monkeypatch.setattr(translating, "SHORT", 12)
    other = Spelling((*SENDER.token_bytes[:-1], b"127", None))  # where SENDER has its end
    old = translator(prompts)
    for seed in range(3):
        rollouts = [
            sent(b"12", b"7", b"34", b"9", seed=seed),
            sent(b"12", b"7", b"34", b"9", seed=seed + 9),
            sent(b"12", b"7", b"34", b"9", ending="length", seed=seed),
            sent(b"1", b"2", canonical=False, seed=seed),
            sent(b"1", END, b"2", seed=seed),
            sent(b"1!", seed=seed),
            sent(b"9876543210" * 2, seed=seed),
        ]
        made = group(rollouts=rollouts)
        for table in (SENDER, other):
            new = translator(prompts)
            assert same(old.translate(made, PROBLEM, table), new.translate(made, PROBLEM, table))
        short = [one for one in old._known if len(one.tokens) < 12]
        assert len(short) == len(old._known) <= max(1, most)
    narrow = translator(prompts, max_positions=len(prompts.ids(PROBLEM)) + 3)
    for _ in range(2):  # what fits is asked anew, for each prompt
        _, reading = translated(narrow.translate(made, PROBLEM, SENDER))
        assert [type(read) for read in reading.rollouts[:4]] == [NotCut] * 3 + [TextOnly]


def test_what_is_not_its_senders_own_cut_is_text_only(prompts: Prompts) -> None:
    rollouts = [sent(b"1", b"2", canonical=False), sent(b"12")]
    made, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    assert reading.rollouts[0] == TextOnly()
    assert prompts.vocabulary.spelling.bytes_of(made.rollouts[0].tokens[:-1]) == b"12"
    assert sum(made.rollouts[0].logprobs) == pytest.approx(sum(rollouts[0].logprobs))


def test_what_the_receiver_has_no_tokens_for_is_kept_without_any(prompts: Prompts) -> None:
    rollouts = [sent(b"1!", reward=1.0), sent(b"\xff"), sent(b"1")]
    made, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    assert reading.rollouts[:2] == (NotCut(), NotCut())
    assert [len(r.tokens) for r in made.rollouts] == [0, 0, 2]
    assert [r.reward for r in made.rollouts] == [1.0, 0.0, 0.0]


def test_what_has_a_token_without_text_inside_is_left_out(prompts: Prompts) -> None:
    rollouts = [sent(b"1"), sent(b"9", END, b"1"), sent(b"2", canonical=False)]
    made, reading = translated(
        translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    )
    assert reading.number_R == (0, 2)
    assert len(made.rollouts) == 2
    assert reading.sent_letters("lt") == "lxt"
    assert reading.counts()[:3] == (3, 1, 1)


def test_a_group_of_which_one_completion_can_be_read_is_not_read(prompts: Prompts) -> None:
    rollouts = [sent(b"1"), sent(b"9", END, b"1")]
    made = translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    assert made.group.rollouts == ()
    assert made.reading.sent.rollouts == tuple(rollouts)
    assert made.reading.sent_letters("") == "xx"
    # a part of a horizontal group may have no more than one
    alone = group(rollouts=[sent(b"1")])
    assert len(translator(prompts).translate(alone, PROBLEM, SENDER).group.rollouts) == 1


def test_a_table_cannot_make_a_completion_longer_than_the_bounds(prompts: Prompts) -> None:
    huge = Spelling((b"1" * 70, b"1" * 9, b"1", None))
    rollouts = [
        Rollout(tokens=(id, 3), logprobs=(-1.0, -1.0), reward=0.0, ending="stop")
        for id in (0, 1, 2)
    ]
    _, reading = translated(
        translator(prompts, max_tokens=1).translate(group(rollouts=rollouts), PROBLEM, huge)
    )
    assert [type(read) for read in reading.rollouts] == [NotCut, BySpans]
    assert reading.number_R == (1, 2)  # the first is longer than an answer can be
    longer = translator(prompts, max_tokens=2).translate(group(rollouts=rollouts), PROBLEM, huge)
    _, reading = translated(longer)
    assert [type(read) for read in reading.rollouts] == [NotCut, BySpans, BySpans]
    assert FOLD_TOKENS * 2 >= 10


def test_what_does_not_fit_the_receivers_model_is_not_learned_from(prompts: Prompts) -> None:
    asked = len(prompts.ids(PROBLEM))
    rollouts = [sent(b"1234"), sent(b"1")]
    narrow = translator(prompts, max_positions=asked + 4)
    _, reading = translated(narrow.translate(group(rollouts=rollouts), PROBLEM, SENDER))
    assert [type(read) for read in reading.rollouts] == [NotCut, BySpans]


def test_spans_that_nobody_bets_on_are_counted_up_to_where_text_ends(prompts: Prompts) -> None:
    rollouts = [
        sent(b"1"),
        sent(b"987", canonical=False),  # 3 stable cuts, and the end
        sent(b"98", END, b"9876"),  # 2 before the token that nobody can read
        sent(b"9!"),  # 2: the receiver has no token for it, so none can go on
    ]
    made = translator(prompts).translate(group(rollouts=rollouts), PROBLEM, SENDER)
    _, reading = translated(made)
    assert reading.num_forgone() == (3 + 1) + (2 + 1) + (2 + 1)


def test_where_nothing_is_to_be_read_nobody_asks_for_the_receivers_bytes(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: object, texts: object) -> None:
        raise AssertionError("its tokens cannot be told as bytes")

    monkeypatch.setattr(type(prompts.vocabulary), "cut_all", refuses)
    assert translator(prompts).translate_all([]) == []


def test_a_pair_is_made_once_for_a_table(prompts: Prompts) -> None:
    one = translator(prompts)
    made = [group(rollouts=[sent(b"1"), sent(b"2")], peer=peer) for peer in "ab"]
    same = Spelling(SENDER.token_bytes)
    readings = [
        translated(one.translate(g, PROBLEM, s))[1]
        for g, s in zip(made, (SENDER, same), strict=True)
    ]
    assert readings[0].pair is readings[1].pair


def test_rewards_and_origin_stay_as_they_were_sent(prompts: Prompts) -> None:
    told = group(rollouts=[sent(b"1", reward=0.25), sent(b"2", reward=1.0)], vocabulary="other")
    made, _ = translated(translator(prompts).translate(told, PROBLEM, SENDER))
    assert made.origin == told.origin
    assert [r.reward for r in made.rollouts] == [0.25, 1.0]
    assert replace(made, rollouts=told.rollouts) == told
