"""Audit: whether a sender's tokens were drawn with the probabilities that it reports.

It needs nothing of the sender's model. Two questions, and four bets, each a wager (`wager.py`):

| it reports | which shows as | bets |
|---|---|---|
| too little | rare tokens come too often | `learner`, `guess`, `again` |
| too much | sure tokens fail to come | `new` |

`learner`: if a token is drawn from q, the mean of p/q is at most 1 for *any* p; here p is the
receiver's own policy. `guess`: the same with p = 1/W, for W tokens to choose from. `again` and
`new`: the completions of one group share their beginnings. Where one continues like those before
it, the tokens seen there so far come again with the sum of their reported probabilities.

What is audited must not depend on how it came out: a group is chosen before anybody looks at its
rewards. Right answers of a worse peer are tokens it was lucky to draw, and would look like a lie.

Each bet is wrong about an honest sender with its part of alpha at most, and so all of them
together with alpha at most, however much they know of each other: half is for either question, and
the bets of one question share its half.

A sender of another vocabulary is bet on by spans (motley.spelling): a token of its own cut has no
p. The other bets are on its own tokens alone, and stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.records import Group, Rollout, Sampling
from motley.trust.wager import Floats, Wager

# What an honest engine's log-probs may be off by on average, as a ratio: rounding on the wire is
# 0.0003, and bfloat16 against its own trainer came out at 0.0001 (docs/performance.md).
NOISE = 0.005
Ints = NDArray[np.int64]
Lie = Literal["under-reported", "over-reported"]
Bet = Literal["learner", "guess", "again", "new"]
_ON_LITTLE: tuple[Bet, ...] = ("learner", "guess", "again")  # reported; on too much there is `new`


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """The wealth of every bettor, by sender and bet, in a checkpoint."""

    wealth: dict[str, dict[Bet, list[float]]] = {}


class SenderAudit:
    def __init__(self) -> None:
        self.wagers: dict[Bet, Wager] = {bet: Wager() for bet in get_args(Bet)}

    def little(self) -> float:
        """The log of the largest wealth that was won from too little reported."""
        best = max(self.wagers[bet].log_wealth for bet in _ON_LITTLE)
        return best - math.log(len(_ON_LITTLE))

    def much(self) -> float:
        """The same of too much."""
        return self.wagers["new"].log_wealth


@dataclass(slots=True)
class Audit:
    sampling: Sampling
    vocabulary_size: int
    alpha: float  # chance of ever taking an honest sender for a liar
    senders: dict[str, SenderAudit] = field(default_factory=dict)

    def _width(self, vocabulary_size: int) -> int:
        """How many tokens there are to choose from."""
        return min(self.sampling.top_k or vocabulary_size, vocabulary_size)

    @property
    def _truncates(self) -> bool:
        """Whether less is drawn from than the reported probabilities are spread over."""
        cut = self.sampling.top_k > 0 or self.sampling.top_p < 1
        return cut and self.sampling.logprobs == "full"

    def hear(self, group: Group, sender_size: int | None = None) -> None:
        """Bet on a group by itself, before anything is learned from it.

        `sender_size`: tokens of the sender's vocabulary; None: it is the receiver's own.
        """
        sender = self._of(group.origin.peer)
        if not self._truncates:
            width = self._width(self.vocabulary_size if sender_size is None else sender_size)
            guesses = [-np.array(r.logprobs) - math.log(width) for r in group.rollouts]
            sender.wagers["guess"].bet(_ratios(np.concatenate(guesses)))
        again, new = sibling_payoffs(group.rollouts)
        if not self._truncates:
            sender.wagers["again"].bet(again)
        sender.wagers["new"].bet(new)

    def compare(self, sender: str, log_ratios: Sequence[Floats]) -> None:
        """Bet on what the learner makes of a group's tokens: learner's minus reported log-prob.

        The group was chosen without regard to its rewards.
        """
        if log_ratios and not self._truncates:
            self._of(sender).wagers["learner"].bet(_ratios(np.concatenate(log_ratios)))

    def compare_spans(
        self, sender: str, log_ratio_S: Floats, num_sent_S: Ints, num_forgone: int
    ) -> None:
        """Bet on spans of a group that was chosen without regard to how it came out.

        The log-ratios are `Aligned.wagers`, with the sender's tokens in each span. `num_forgone`
        are the spans of completions that were left out once they were seen: not canonical, or not
        to be spelled. They pay nothing, since what is left out with hindsight cannot be drawn.
        """
        if not self._truncates:
            paid = _ratios(log_ratio_S, num_sent_S)
            self._of(sender).wagers["learner"].bet(np.append(paid, np.zeros(num_forgone)))

    def lie(self, sender: str) -> Lie | None:
        """What a sender is caught at."""
        known = self.senders.get(sender)
        if known is None:
            return None
        # either question may be wrong with half the chance
        caught = math.log(2 / self.alpha)
        if known.little() >= caught:
            return "under-reported"
        return "over-reported" if known.much() >= caught else None

    def evidence(self, sender: str) -> float:
        """Powers of ten of the larger wealth; 0 for who never was heard."""
        known = self.senders.get(sender)
        if known is None:
            return 0.0
        return max(known.little(), known.much()) / math.log(10)

    def forget(self, sender: str) -> None:
        """Begin anew with a sender."""
        self.senders.pop(sender, None)

    def _of(self, sender: str) -> SenderAudit:
        return self.senders.setdefault(sender, SenderAudit())

    # For checkpoints

    def state(self) -> AuditState:
        return AuditState(
            wealth={
                name: {bet: wager.logs.tolist() for bet, wager in kept.wagers.items()}
                for name, kept in sorted(self.senders.items())
            }
        )

    def load_state(self, state: AuditState) -> None:
        self.senders = {}
        for name, wealth in state.wealth.items():
            kept = self._of(name)
            for bet, logs in wealth.items():
                kept.wagers[bet].logs = np.array(logs)


def _ratios(log_ratio: Floats, num_tokens: Ints | int = 1) -> Floats:
    """Payoffs of at most 1 on average, whatever an honest engine's rounding does."""
    return np.exp(np.clip(log_ratio - NOISE * num_tokens, -700.0, 700.0))


def sibling_payoffs(rollouts: Sequence[Rollout]) -> tuple[Floats, Floats]:
    """What completions pay that begin alike: where a token comes again, and where a new one comes.

    Of the tokens seen so far behind one beginning, some token comes again with the chance s, the
    sum of what was reported for them: coming again pays 1/s, a new one 1/(1 - s).
    """
    root = _Beginning()
    again: list[float] = []
    new: list[float] = []
    for rollout in rollouts:
        node = root
        for place, token in enumerate(rollout.tokens):
            node.expand(place)
            child = node.children.get(token)
            if node.children:
                again.append(1 / min(1.0, node.chance * _MORE) if child else 0.0)
                new.append(0.0 if child else 1 / (1 - min(node.chance, 1.0) * _LESS))
            if child is None:
                node.add(rollout, place)
                break
            node = child
    return np.array(again), np.array(new)


_MORE, _LESS = math.exp(NOISE), math.exp(-NOISE)


@dataclass(slots=True)
class _Beginning:
    """What completions share. Behind it, the first that came this way goes on by itself."""

    first: Rollout | None = None
    children: dict[int, _Beginning] = field(default_factory=dict)
    chance: float = 0.0  # of the tokens seen behind it, as reported

    def expand(self, place: int) -> None:
        """Take the first that came this way one token further, now that another comes."""
        if self.first and not self.children and place < len(self.first.tokens):
            self.add(self.first, place)

    def add(self, rollout: Rollout, place: int) -> None:
        self.children[rollout.tokens[place]] = _Beginning(rollout)
        self.chance += math.exp(rollout.logprobs[place])
