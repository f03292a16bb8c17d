"""The audit of senders whose vocabulary is another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from motley.records import Group, Origin, Rollout, Sampling
from motley.spelling import Aligned, Pair
from motley.trust.audit import NOISE, Audit
from spelling.chains import Chain, Model, Samples
from spelling.other_cuts import by_rule, every_common_cut

LETTERS = b"abc5"
SINGLE = [bytes([letter]) for letter in LETTERS]
PLAIN = Sampling(max_tokens=16)


@dataclass(frozen=True)
class Foreigner:
    """A sender and a receiver of other vocabularies, and whether the sender lies."""

    sender: Model
    receiver: Model
    pair: Pair
    most_tokens: int
    lie: float = 0.0  # nats taken off every reported log-prob
    forgone: float = 0.0  # share of completions that are text only

    @staticmethod
    def drawn(rng: np.random.Generator) -> Foreigner:
        chain = Chain.drawn(LETTERS, rng, end=0.05, spread=float(rng.choice([0.5, 2.0])))
        apart = float(rng.choice([0.0, 0.3, 1.0]))
        sides = []
        for _ in range(2):
            words = [bytes(rng.choice(list(b"abc"), rng.integers(2, 4)).tolist()) for _ in range(5)]
            sides.append(tuple(dict.fromkeys([*SINGLE, *words, b"a5"])))
        sender = Model(chain, sides[0])
        receiver = Model(chain.near(rng, apart) if apart else chain, sides[1])
        most = int(rng.choice([4, 16, 1000]))
        pair = Pair.of(sender.spelling, receiver.spelling)
        return Foreigner(sender, receiver, pair, most)

    def group(self, rng: np.random.Generator) -> tuple[Samples, Aligned]:
        samples = Samples.drawn(self.sender, self.receiver, rng, 8, self.most_tokens)
        sent = [self.sender.ids(tokens) for tokens in samples.sent]
        scored = [self.receiver.ids(tokens) for tokens in samples.scored]
        samples.sent_logprobs = [logq - self.lie for logq in samples.sent_logprobs]
        return samples, self.pair.align(sent, scored, samples.ended)

    def caught(self, seed: int, num_groups: int, alpha: float) -> int | None:
        """After how many groups; None: not within so many."""
        rng = np.random.default_rng(seed)
        audit = Audit(PLAIN, len(self.receiver.tokens), alpha)
        for number in range(num_groups):
            samples, spans = self.group(rng)
            sent, scored = np.array(samples.sent_logprobs), np.array(samples.scored_logprobs)
            kept = rng.random(len(spans.closed_S)) >= self.forgone
            audit.compare_spans(
                "s",
                spans.wagers(sent, scored)[kept],
                spans.num_sent()[kept],
                int((~kept).sum()),
            )
            if audit.lie("s"):
                return number + 1
        return None


def honest(seed: int) -> Foreigner:
    return Foreigner.drawn(np.random.default_rng(seed))


def test_honest_senders_of_another_vocabulary_pass() -> None:
    assert [honest(seed).caught(seed, 20, alpha=0.02) for seed in range(10)] == [None] * 10


@pytest.mark.slow
def test_hundreds_of_them_raise_no_more_alarms_than_promised() -> None:
    caught = [honest(seed).caught(seed, 40, alpha=0.02) for seed in range(200)]
    assert sum(c is not None for c in caught) <= 4


@pytest.mark.parametrize(("lie", "within"), [(0.2, 150), (1.0, 15)])
def test_one_that_reports_too_little_is_caught(lie: float, within: int) -> None:
    for seed in range(3):
        sender = replace(honest(seed), lie=lie, most_tokens=1000)
        assert sender.caught(seed, within, alpha=1e-3)


def test_one_that_calls_a_part_of_it_text_only_is_caught_as_well() -> None:
    sender = replace(honest(0), lie=1.0, most_tokens=1000, forgone=0.2)
    assert sender.caught(0, 60, alpha=1e-3)


def test_with_common_cuts_an_honest_sender_would_be_taken_for_a_liar() -> None:
    rng = np.random.default_rng(2)
    chain = Chain.drawn(LETTERS, rng, end=0.05, spread=0.5)
    sender = Model(chain, (*SINGLE, b"ab", b"abc", b"b5", b"ca"))
    receiver = Model(chain, (*SINGLE, b"bc", b"aa"))
    pair = Pair.of(sender.spelling, receiver.spelling)
    audits = {"stable": Audit(PLAIN, 7, alpha=1e-3), "common": Audit(PLAIN, 7, alpha=1e-3)}
    for _ in range(100):
        samples, aligned = Foreigner(sender, receiver, pair, 1000).group(rng)
        sent, scored = np.array(samples.sent_logprobs), np.array(samples.scored_logprobs)
        for rule, spans in {
            "stable": aligned,
            "common": by_rule(samples, every_common_cut),
        }.items():
            audits[rule].compare_spans("s", spans.wagers(sent, scored), spans.num_sent(), 0)
    assert {rule: audit.lie("s") for rule, audit in audits.items()} == {
        "stable": None,
        "common": "under-reported",
    }


def test_a_span_is_allowed_the_rounding_of_all_its_tokens() -> None:
    audits = [Audit(PLAIN, 4, alpha=1e-3) for _ in range(2)]
    audits[0].compare_spans("s", np.full(50, 0.3 + 3 * NOISE), np.full(50, 3), 0)
    audits[1].compare("s", [np.full(50, 0.3 + NOISE)])
    assert audits[0].evidence("s") == pytest.approx(audits[1].evidence("s"))


def test_what_is_left_out_with_hindsight_pays_nothing() -> None:
    # half of the spans pay 2, and the others are left out: 1 on average
    audit, drawn = Audit(PLAIN, 4, alpha=1e-3), np.ones(20, np.int64)
    for _ in range(50):
        audit.compare_spans("s", np.full(20, math.log(2.0)), drawn, 20)
    assert audit.lie("s") is None
    hindsight = Audit(PLAIN, 4, alpha=1e-3)
    for _ in range(4):
        hindsight.compare_spans("s", np.full(20, math.log(2.0)), drawn, 0)
    assert hindsight.lie("s") == "under-reported"


def test_full_log_probs_of_truncated_sampling_are_not_held_against_spans() -> None:
    audit = Audit(Sampling(top_k=5, max_tokens=16, logprobs="full"), 40, alpha=1e-3)
    audit.compare_spans("s", np.full(50, 3.0), np.ones(50, np.int64), 0)
    assert audit.evidence("s") == 0.0


def test_a_guess_is_among_the_tokens_of_the_senders_vocabulary() -> None:
    # it draws from 1,000 tokens, all alike; the receiver has 10
    said = Rollout(
        tokens=tuple(range(16)), logprobs=(-math.log(1000),) * 16, reward=0.0, ending="length"
    )
    origin = Origin(peer="s", model="m", vocabulary="v", version=0, sampling=PLAIN)
    group = Group(
        crew="c", problem="p", round=0, slot=0, origin=origin, rollouts=(said,) * 1, created_s=0.0
    )
    audit = Audit(PLAIN, 10, alpha=1e-3)
    audit.hear(group, sender_size=1000)
    assert audit.lie("s") is None
    audit.hear(group)
    assert audit.lie("s") == "under-reported"
