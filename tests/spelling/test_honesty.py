"""Ratios of spans average 1 between exact models, whatever their vocabularies; no others do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from motley.spelling.spans import Aligned, Floats, Ints, Pair, StableCuts, align

from .chains import END, FIRST, Chain, Model, Samples
from .other_cuts import before_a_space, by_rule, cut_of, every_common_cut, only_the_end

LETTERS = b"abc5 "
SENDER = (b"a", b"b", b"c", b"5", b" ", b"ab", b"abc", b"b5", b" a", b" ab", b"ca")
RECEIVER = (b"a", b"b", b"c", b"5", b" ", b"bc", b" b", b"ca5", b"cab", b"aa")
SHARP = 2  # a chain whose letters tell much of those behind them


def stable(samples: Samples, sender: Model, receiver: Model) -> Aligned:
    pair = Pair.of(sender.spelling, receiver.spelling)
    sent = [sender.ids(tokens) for tokens in samples.sent]
    scored = [receiver.ids(tokens) for tokens in samples.scored]
    return pair.align(sent, scored, samples.ended)


def log_ratios(samples: Samples, spans: Aligned) -> Floats:
    return spans.log_ratios(np.array(samples.sent_logprobs), np.array(samples.scored_logprobs))


def deviations(excess_S: Floats, count_B: Ints) -> float:
    """How many standard errors the mean lies above 0. Spans of one completion hang together."""
    last_B = np.cumsum(count_B)
    totals = np.concatenate([[0.0], np.cumsum(excess_S)])
    sum_B = totals[last_B] - totals[last_B - count_B]
    return float(sum_B.mean() / (sum_B.std(ddof=1) / math.sqrt(len(sum_B))))


def models(seed: int, apart: float) -> tuple[Model, Model]:
    rng = np.random.default_rng(seed)
    chain = Chain.drawn(LETTERS, rng, end=0.02, spread=0.5)
    return Model(chain, SENDER), Model(chain.near(rng, apart) if apart else chain, RECEIVER)


# The models themselves


def test_tokens_of_a_model_have_all_the_chance_there_is() -> None:
    sender, _ = models(SHARP, 0.0)
    states, seen = [FIRST], set()
    while states:
        state = states.pop()
        moves = sender.next(state)
        assert math.fsum(chance for chance, _ in moves.values()) == pytest.approx(1.0)
        new = {after for _, after in moves.values()} - seen
        seen |= new
        states += new
    assert len(seen) > 10


def test_a_model_draws_the_tokens_that_its_vocabulary_makes_of_the_text() -> None:
    sender, _ = models(SHARP, 0.0)
    rng = np.random.default_rng(1)
    for _ in range(200):
        tokens, logprobs = sender.draw(rng, 1000)
        assert sender.cut(b"".join(tokens), END in tokens) == tokens
        assert sender.score(tokens) == pytest.approx(logprobs)


def test_two_vocabularies_give_a_whole_text_the_same_chance() -> None:
    sender, receiver = models(SHARP, 0.0)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(2), 200)
    whole = by_rule(samples, lambda *_: set())
    assert log_ratios(samples, whole) == pytest.approx(np.zeros(200), abs=1e-9)


# Stable spans


def test_between_exact_models_of_one_text_each_stable_span_has_the_ratio_one() -> None:
    sender, receiver = models(SHARP, 0.0)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(3), 1000)
    ratios = log_ratios(samples, stable(samples, sender, receiver))
    assert len(ratios) > 10_000
    assert np.abs(ratios).max() < 1e-9


def test_the_ratio_of_a_stable_span_is_that_of_its_letters_alone() -> None:
    sender, receiver = models(SHARP, 0.3)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(8), 200)
    pair = Pair.of(sender.spelling, receiver.spelling)
    expected = []
    for tokens in samples.sent:
        text, last, ratio = b"".join(tokens), -1, 0.0
        for letter, closes in zip(text, pair.stable(text), strict=True):
            chances = [m.chain.chance[last][letter] for m in (sender, receiver)]
            ratio, last = ratio + math.log(chances[1] / chances[0]), letter
            if closes:
                expected.append(ratio)
                ratio = 0.0
        ends = [m.chain.end(last) for m in (sender, receiver)]
        expected.append(ratio + math.log(ends[1] / ends[0]))
    found = log_ratios(samples, stable(samples, sender, receiver))
    assert found == pytest.approx(np.array(expected), abs=1e-9)


def excess_of_unlike_models(seed: int, num: int) -> tuple[Floats, Ints]:
    """Ratios of stable spans, less 1, between models that differ in the text they expect."""
    sender, receiver = models(seed, 0.3)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(seed), num)
    spans = stable(samples, sender, receiver)
    excess = np.exp(log_ratios(samples, spans)) - 1
    assert excess.std() > 0.1
    return excess, spans.count_B


def test_ratios_of_stable_spans_average_one_between_models_that_differ() -> None:
    excess, count_B = excess_of_unlike_models(seed=SHARP, num=1_000)
    assert abs(deviations(excess, count_B)) < 3
    assert abs(excess.mean()) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, SHARP])
def test_ratios_of_a_hundred_thousand_stable_spans_average_one(seed: int) -> None:
    excess, count_B = excess_of_unlike_models(seed, num=22_000)
    assert len(excess) >= 100_000
    assert abs(deviations(excess, count_B)) < 3
    assert abs(excess.mean()) < 0.01


@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_with_every_common_cut_they_do_not(apart: float) -> None:
    sender, receiver = models(SHARP, apart)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(4), 1_000)
    spans = by_rule(samples, every_common_cut)
    excess = np.exp(log_ratios(samples, spans)) - 1
    assert deviations(excess, spans.count_B) > 10
    assert excess.mean() > 0.05


@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_with_cuts_that_are_seen_by_the_space_behind_them_they_do_not(apart: float) -> None:
    sender, receiver = models(SHARP, apart)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(5), 1_000)
    spans = by_rule(samples, before_a_space)
    excess = np.exp(log_ratios(samples, spans)) - 1
    assert deviations(excess, spans.count_B) > 10
    assert excess.mean() > 0.05


@pytest.mark.slow
def test_with_a_cut_before_each_end_token_they_do_not() -> None:
    sender, receiver = models(SHARP, 0.0)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(6), 2_000)
    spans = by_rule(samples, only_the_end)
    excess = np.exp(log_ratios(samples, spans)) - 1
    assert deviations(excess, spans.count_B) > 5


@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_with_vocabularies_drawn_at_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    single = [bytes([c]) for c in b"abc5"]
    words = [bytes(rng.choice(list(b"abc"), rng.integers(2, 5)).tolist()) for _ in range(12)]
    chain = Chain.drawn(b"abc5", rng, end=0.03, spread=2.0)
    sides = [dict.fromkeys([*single, *words[:6], b"a5"]), dict.fromkeys([*single, *words[6:]])]
    sender, receiver = (Model(chain, tuple(tokens)) for tokens in sides)
    samples = Samples.drawn(sender, receiver, rng, 500)
    assert np.abs(log_ratios(samples, stable(samples, sender, receiver))).max() < 1e-9
    common = by_rule(samples, every_common_cut)
    excess = np.exp(log_ratios(samples, common)) - 1
    assert deviations(excess, common.count_B) > 5


# By hand


def test_a_common_cut_that_a_token_can_cross_doubles_the_ratio_of_an_honest_sender() -> None:
    # the sender says `ab` or `abc`, each half of the time; the receiver `ab` surely, `c` surely
    sent, scored = [[b"ab"], [b"abc"]], [[b"ab"], [b"ab", b"c"]]
    samples = Samples(sent, scored, [math.log(0.5)] * 2, [0.0] * 3)
    ratios = log_ratios(samples, by_rule(samples, every_common_cut))
    assert np.exp(ratios) == pytest.approx([2.0, 2.0])
    cuts = [StableCuts.of([b"ab", b"abc"]), StableCuts.of([b"ab", b"c"])]
    assert not (cuts[0].after(np.frombuffer(b"ab", np.uint8), np.array([2]))).any()
    # neither is closed, so nobody may bet on them
    spans = align(cut_of(sent), cut_of(scored), cuts)
    assert spans.closed_S.tolist() == [False, True]
    wagers = spans.wagers(np.array(samples.sent_logprobs), np.array(samples.scored_logprobs))
    assert np.exp(wagers) == pytest.approx([0.0, 2.0])  # 1 on average


def test_to_leave_out_what_did_not_close_would_be_hindsight() -> None:
    # the sender says `5` or `a`, each half of the time, and is cut there; the receiver says `5`
    cuts = [StableCuts.of([b"a", b"5", b"ab"])]
    sides = cut_of([[b"5"], [b"a"]])
    wagers = align(sides, sides, cuts).wagers(np.log([0.5, 0.5]), np.array([0.0, -9.0]))
    assert np.exp(wagers) == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_what_is_cut_by_length_has_no_honest_ratio_and_pays_nothing(most: int) -> None:
    sender, receiver = models(SHARP, 0.0)
    samples = Samples.drawn(sender, receiver, np.random.default_rng(7), 2_000, most)
    spans = stable(samples, sender, receiver)
    sent, scored = np.array(samples.sent_logprobs), np.array(samples.scored_logprobs)
    assert np.exp(spans.log_ratios(sent, scored)[~spans.closed_S]).mean() > 1.2
    assert np.exp(spans.wagers(sent, scored)).mean() < 1.0
    assert np.exp(spans.wagers(sent, scored)[spans.closed_S]) == pytest.approx(1.0)
