"""What peers of different vocabularies can make of each other's answers.

Measured for each sender and each receiver, on answers that the sender samples now. The sender's
tokens are held to its own tokenizer, the receiver cuts the text anew, and spans are told from both
tables. docs/methods.md says what a span is for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from motley.engines import Completion
from motley.models.four_bits import num_values
from motley.models.policy import Policy
from motley.records import Problem
from motley.runs.other_cuts import CutText, Marginal
from motley.spelling import Pair, UnspelledError

LARGE_PARAMETERS = 10_000_000
NUM_TEXTS = 16  # whose other cuts are looked at
FEW_TEXTS = 4  # where a model is large
NUM_WALKS = 16  # other ways through each
MOST_CUT_TOKENS = 16  # of each, from its beginning
FEW = 0.01  # a share that is not worth a word
NEARLY_TOKENS = 1.5  # of a span: so few that it is nearly a token


class Spoken(NamedTuple):
    problem: Problem
    completion: Completion

    @property
    def ended(self) -> bool:
        return self.completion.ending == "stop"

    @property
    def tokens(self) -> tuple[int, ...]:
        """Without the token that ended it."""
        return self.completion.tokens[:-1] if self.ended else self.completion.tokens


@dataclass(frozen=True, slots=True)
class Speaker:
    """A peer, and answers that it sampled."""

    name: str
    policy: Policy
    answers: Sequence[Spoken]


class Spanned(NamedTuple):
    """Answers by spans."""

    bytes_in_spans: float
    tokens_per_span: float


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver can do with a sender's answers. Shares are of 1."""

    sender: str
    receiver: str
    bytes_in_spans: float | None  # in closed spans that are not the whole answer
    tokens_per_span: float | None  # the receiver's tokens
    not_canonical: float  # of answers: in other tokens than the sender's tokenizer makes of them
    uncut: float  # of answers: the receiver has no tokens for them, or too many
    gap: float | None  # of the log-likelihood: what other cuts add to the canonical one
    objectives: str  # what they lose by it


def is_large(policy: Policy) -> bool:
    return num_values(policy.model) > LARGE_PARAMETERS


def crossings(speakers: Sequence[Speaker], temperature: float) -> list[Crossing]:
    """One for each sender and each receiver of another vocabulary."""
    return [
        crossing(sender, receiver, temperature)
        for sender in speakers
        for receiver in speakers
        if sender.policy.vocabulary.fingerprint != receiver.policy.vocabulary.fingerprint
    ]


def crossing(sender: Speaker, receiver: Speaker, temperature: float) -> Crossing:
    """`temperature`: what the crew samples with, and scores at."""
    canonical = are_canonical(sender)
    cuts = _cuts(sender, receiver)
    both = [
        (answer, cut)
        for answer, cut, is_canonical in zip(sender.answers, cuts, canonical, strict=True)
        if cut is not None and is_canonical
    ]
    spans = _spans(sender, receiver, both) if both else None
    text_only = [cut is not None and not so for cut, so in zip(cuts, canonical, strict=True)]
    uncut = _mean([cut is None for cut in cuts])
    gap = _gap(receiver.policy, [cut for _, cut in both], temperature) if both else None
    return Crossing(
        sender=sender.name,
        receiver=receiver.name,
        bytes_in_spans=spans.bytes_in_spans if spans else None,
        tokens_per_span=spans.tokens_per_span if spans else None,
        not_canonical=1 - _mean(canonical),
        uncut=uncut,
        gap=gap,
        objectives=_lost(spans, _mean(text_only), uncut, gap),
    )


def are_canonical(sender: Speaker) -> list[bool]:
    """Which answers are what their sender's tokenizer makes of them, and ended as it is taught."""
    prompts, answers = sender.policy.prompts, sender.answers
    cut_so = sender.policy.vocabulary.are_canonical([answer.tokens for answer in answers])
    return [
        is_cut_so and (not a.ended or a.completion.tokens[-1] == prompts.end_id(a.problem))
        for a, is_cut_so in zip(answers, cut_so, strict=True)
    ]


def _cuts(sender: Speaker, receiver: Speaker) -> list[CutText | None]:
    """Each answer in the receiver's tokens; None: it has none for it, or too many for its model,
    or nobody can read it.
    """
    prompts, most = receiver.policy.prompts, receiver.policy.max_positions
    found: list[CutText | None] = []
    for answer in sender.answers:
        try:
            text = sender.policy.vocabulary.spelling.bytes_of(answer.tokens)
        except UnspelledError:  # a special token
            found.append(None)
            continue
        cut = receiver.policy.vocabulary.cut(text)
        end = (prompts.end_id(answer.problem),) if answer.ended else ()
        prompt = prompts.ids(answer.problem)
        if isinstance(cut, tuple) and len(prompt) + len(cut) + len(end) <= most:
            found.append(CutText(prompt, text, cut, end))
        else:
            found.append(None)
    return found


def _spans(sender: Speaker, receiver: Speaker, both: Sequence[tuple[Spoken, CutText]]) -> Spanned:
    sides = [speaker.policy.vocabulary.spelling for speaker in (sender, receiver)]
    spans = Pair.of(*sides).align(
        [answer.completion.tokens for answer, _ in both],
        [(*one.cut, *one.end) for _, one in both],
        [answer.ended for answer, _ in both],
    )
    size_T = [
        size for _, one in both for size in (*sides[1].lengths_of(one.cut), *(0 for _ in one.end))
    ]
    bytes_S = np.bincount(spans.receiver_T, size_T, minlength=len(spans.closed_S))
    several_S = np.repeat(spans.count_B > 1, spans.count_B)
    return Spanned(
        float(bytes_S[spans.closed_S & several_S].sum() / max(1, bytes_S.sum())),
        len(spans.receiver_T) / max(1, len(spans.closed_S)),
    )


def _gap(policy: Policy, cuts: Sequence[CutText], temperature: float) -> float:
    """What other cuts add to the log-likelihood, as a share of it."""
    marginal = Marginal(policy, temperature, random.Random("other cuts"))
    num = FEW_TEXTS if is_large(policy) else NUM_TEXTS
    some = [_beginning(policy, one) for one in cuts[:: max(1, len(cuts) // num)][:num]]
    found = marginal.likelihoods(some, NUM_WALKS)
    return sum(one.gap for one in found) / max(1e-9, -sum(one.canonical for one in found))


def _beginning(policy: Policy, one: CutText) -> CutText:
    if len(one.cut) <= MOST_CUT_TOKENS:
        return one
    cut = one.cut[:MOST_CUT_TOKENS]
    return CutText(one.prompt, policy.vocabulary.spelling.bytes_of(cut), cut)


def _mean(of: Sequence[bool]) -> float:
    return sum(of) / max(1, len(of))


def _lost(spans: Spanned | None, text_only: float, uncut: float, gap: float | None) -> str:
    """What it means for those who learn."""
    if spans is None:
        return "nothing can be learned by a weight: no answer has tokens on both sides"
    words = [_by_spans(spans)]
    if text_only > FEW:
        words.append(
            f"{text_only:.0%} of the answers are text only: rescue and branch use them, no "
            "objective does"
        )
    if uncut > FEW:
        words.append(f"{uncut:.0%} count in the baseline only")
    if gap is not None and gap > FEW:
        words.append(f"ratios are too low, by {gap:.1%} of the log-likelihood")
    return "; ".join(words)


def _by_spans(spans: Spanned) -> str:
    if spans.bytes_in_spans < FEW:
        return (
            "a span is the whole answer: token weights act on answers, and cut off more of what "
            "is new"
        )
    if spans.tokens_per_span <= NEARLY_TOKENS:
        return "spans are nearly tokens: hardly anything is lost"
    return f"weights and clips act on {spans.tokens_per_span:.1f} tokens at a time"
