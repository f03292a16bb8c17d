"""Scrutiny of senders with another vocabulary, from their tokens to the verdict.

Sender and receiver are exact models of texts (spelling/chains.py), so that what is honest is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from fakes import PROBLEM, candidate
from motley.config import Trust
from motley.learning.learner import StepReport
from motley.learning.readings import BySpans, Reading
from motley.learning.select import Candidate
from motley.learning.translating import Translation, Translator
from motley.peers.scrutiny import Scrutiny
from motley.records import Group, Origin, Problem, Rollout, Sampling
from motley.spelling import Spelling
from spelling.chains import END, Model
from trust.test_audit_spans import Foreigner, honest

GROUPS = 40


@dataclass(frozen=True)
class ModelPrompts:
    """What a translator asks of the receiver, by an exact model."""

    model: Model

    @property
    def vocabulary(self) -> ModelPrompts:
        return self

    @property
    def spelling(self) -> Spelling:
        return self.model.spelling

    def ids(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def end_id(self, problem: Problem) -> int:
        return len(self.model.tokens)

    def cut_all(self, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
        return [tuple(self.model.ids(self.model.cut(text, ended=False))) for text in texts]


def drawn(one: Foreigner, rng: np.random.Generator) -> Group:
    rollouts = []
    for _ in range(8):
        tokens, logprobs = one.sender.draw(rng, one.most_tokens)
        rollouts.append(
            Rollout(
                tokens=tuple(one.sender.ids(tokens)),
                logprobs=tuple(min(0.0, q - one.lie) for q in logprobs),
                reward=0.0,
                ending="stop" if END in tokens else "length",
                canonical=bool(rng.random() >= one.forgone),
            )
        )
    origin = Origin(peer="s", model="m", vocabulary="v", version=0, sampling=Sampling())
    return Group(
        crew="c",
        problem=PROBLEM.id,
        round=0,
        slot=0,
        origin=origin,
        rollouts=tuple(rollouts),
        created_s=0.0,
    )


def scored(one: Foreigner, made: Candidate) -> StepReport:
    """What a learner with the receiver's exact probabilities reports of an audited group."""
    assert isinstance(made.reading, Reading)
    log_ratios = []
    for rollout, read in zip(made.group.rollouts, made.reading.rollouts, strict=True):
        if isinstance(read, BySpans):
            tokens = [(*one.receiver.tokens, END)[id] for id in rollout.tokens]
            logp, logq = np.array(one.receiver.score(tokens)), np.array(rollout.logprobs)
            log_ratios.append(read.spans.sums(logp - logq))
    return StepReport(
        loss=0.0,
        grad_norm=0.0,
        num_sequences=8,
        num_scored=8,
        num_tokens=0,
        ages={},
        senders={},
        log_ratios={made.position: log_ratios},
    )


def scrutiny_of(one: Foreigner, alpha: float) -> Scrutiny:
    return Scrutiny(
        me="r",
        rules=Trust(alpha=alpha, habits=False),
        sampling=Sampling(),
        vocabulary_size=len(one.receiver.spelling),
        familiar=lambda problem: (),
        secret=bytes(32),
    )


def caught(one: Foreigner, seed: int, num_groups: int, alpha: float) -> int | None:
    """After how many groups the sender is muted; None: not within so many."""
    rng = np.random.default_rng(seed)
    translator = Translator(ModelPrompts(one.receiver), 100_000, 100_000)
    scrutiny = scrutiny_of(one, alpha)
    for number in range(num_groups):
        told = translator.translate(drawn(one, rng), PROBLEM, one.sender.spelling)
        assert isinstance(told, Translation)
        made = replace(candidate(told.group, position=number + 1), reading=told.reading)
        scrutiny.hear([made], number)
        scrutiny.settle([made], scored(one, made), number)
        if scrutiny.is_muted("s"):
            return number + 1
    return None


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_sender_of_another_vocabulary_is_not_muted(seed: int) -> None:
    one = replace(honest(seed), most_tokens=16, forgone=0.2 * (seed % 2))
    assert caught(one, seed, 10, alpha=0.02) is None


@pytest.mark.slow
def test_hundreds_of_them_raise_no_more_alarms_than_promised() -> None:
    seen = [
        caught(replace(honest(seed), forgone=0.2 * (seed % 2)), seed, GROUPS, alpha=0.02)
        for seed in range(200)
    ]
    assert sum(one is not None for one in seen) <= 4


@pytest.mark.parametrize(("lie", "within"), [(0.3, 100), (1.0, 15)])
def test_one_that_reports_too_little_is_muted(lie: float, within: int) -> None:
    one = replace(honest(1), lie=lie, most_tokens=1000)
    assert caught(one, 1, within, alpha=1e-3)


def test_one_that_calls_a_part_of_it_text_only_is_muted_as_well() -> None:
    one = replace(honest(0), lie=1.0, most_tokens=1000, forgone=0.2)
    assert caught(one, 0, 60, alpha=1e-3)


def test_what_cannot_be_read_is_lost_to_who_bet_on_it() -> None:
    one = replace(honest(0), most_tokens=1000)
    sent = drawn(one, np.random.default_rng(0))
    # an end token inside of every completion but one: none is left to compare it with
    broken = [
        msgspec.structs.replace(
            r, tokens=(0, len(one.sender.tokens), *r.tokens), logprobs=(-1.0, -1.0, *r.logprobs)
        )
        for r in sent.rollouts[1:]
    ]
    sent = msgspec.structs.replace(sent, rollouts=(sent.rollouts[0], *broken))
    translator = Translator(ModelPrompts(one.receiver), 100_000, 100_000)
    unread = translator.translate(sent, PROBLEM, one.sender.spelling)
    assert unread.group.rollouts == ()
    scrutiny = scrutiny_of(one, alpha=1e-3)
    first = scrutiny.audit._of("s").wagers["learner"].logs[1:].copy()
    scrutiny.forgo(replace(candidate(unread.group), reading=unread.reading))
    lost = first - scrutiny.audit.senders["s"].wagers["learner"].logs[1:]
    assert lost[-1] > 7 * np.log(2)  # half of what is left at stake, eight times at least
