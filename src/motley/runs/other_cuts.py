"""How likely a model finds a text over all its cuts, beside the one cut that is scored.

A receiver scores the canonical cut of a text: what its tokenizer makes of it. Its policy may write
the same bytes in other tokens too. What that adds is estimated without bias. One pass over the
canonical cut gives the exact chance to leave it at each place, by a token that still fits the text.
Each such way out goes on by tokens that fit, drawn by the model. Its weight is the chance to leave,
times the chance at each token after that it fits. Where there are too many ways, some are drawn.
A way that is e^-20 as likely as the canonical cut, up to the same byte, is not gone to its end.

Knows a model and bytes. Knows no sender.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from motley.compute.scoring import target_logits
from motley.learning.batches import MicroBatch, ToScore, micro_batches
from motley.models.policy import Policy

TOKENS_AT_ONCE = 4096
NEGLIGIBLE = -20.0  # the log of how likely a way is, beside the canonical cut
Ids = tuple[int, ...]
LogProbs = list[float]  # one for each of some tokens


@dataclass(frozen=True, slots=True)
class CutText:
    """A text behind a prompt, and its canonical cut."""

    prompt: Ids
    text: bytes
    cut: Ids
    end: Ids = ()  # the end token, if the text ended


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-prob of a text by its canonical cut, and how much more it has by all cuts."""

    canonical: float
    gap: float  # at least 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be known of a sequence: the chance of some tokens at each place. () : of none."""

    prompt: Ids
    tokens: Ids
    candidates: list[Ids]


@dataclass(slots=True)
class _Walk:
    """A way through a text that is not the canonical one."""

    one: CutText
    tokens: Ids
    log_weight: float
    canonical: LogProbs  # of the canonical cut up to each byte, or the next place where it is cut


@dataclass
class Marginal:
    """Compares a model's canonical cuts with all cuts."""

    policy: Policy
    temperature: float
    rng: random.Random
    _ids: dict[bytes, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for id, token in enumerate(self.policy.vocabulary.spelling.token_bytes):
            if token is not None:
                self._ids.setdefault(token, []).append(id)
        self._longest = max(map(len, self._ids))

    @torch.no_grad()
    def likelihoods(self, texts: Sequence[CutText], num_walks: int) -> list[Likelihood]:
        """Of each text, by at most so many other ways through it."""
        asked = [self._canonical(one) for one in texts]
        canonical: list[float] = []
        walks: list[list[_Walk]] = []
        for one, sequence, logp_TC in zip(texts, asked, self._chances(asked), strict=True):
            sums, ways = _ways_out(sequence, logp_TC)
            canonical.append(sums[-1])
            begun = self._begun(ways, num_walks)
            at_bytes = self._at_bytes(one, sums)
            walks.append([_Walk(one, way, logp, at_bytes) for way, logp in begun])
        self._finish([walk for of_one in walks for walk in of_one])
        return [
            Likelihood(logp, _gap(logp, [walk.log_weight for walk in of_one]))
            for logp, of_one in zip(canonical, walks, strict=True)
        ]

    def _canonical(self, one: CutText) -> _Asked:
        tokens = (*one.cut, *one.end)
        starts = (one.cut[:number] for number in range(len(tokens)))
        return _Asked(one.prompt, tokens, [self._fitting(one, start) for start in starts])

    def _fitting(self, one: CutText, tokens: Ids) -> Ids:
        """The tokens that the text can go on with behind others; at its end the end token."""
        place = len(self.policy.vocabulary.spelling.bytes_of(tokens))
        if place == len(one.text):
            return one.end
        ends = range(place + 1, min(len(one.text), place + self._longest) + 1)
        return tuple(id for end in ends for id in self._ids.get(one.text[place:end], ()))

    def _at_bytes(self, one: CutText, sums: LogProbs) -> LogProbs:
        sizes = self.policy.vocabulary.spelling.lengths_of(one.cut)
        spread = [logp for size, logp in zip(sizes, sums, strict=False) for _ in range(size)]
        return [0.0, *spread]

    def _begun(self, ways: dict[Ids, float], num: int) -> list[tuple[Ids, float]]:
        """All ways out, or some, so that the mean of their weights stands for the sum of all.

        Half of the draw goes by their chances. The other half is even: a way out may be unlikely,
        and what follows so likely that it counts most.
        """
        if len(ways) <= num:
            return [(way, logp + math.log(len(ways))) for way, logp in ways.items()]
        weights = _weights(list(ways.values()))
        shares = [(weight / sum(weights) + 1 / len(ways)) / 2 for weight in weights]
        drawn = self.rng.choices(list(zip(ways.items(), shares, strict=True)), shares, k=num)
        return [(way, logp - math.log(share)) for (way, logp), share in drawn]

    def _finish(self, walks: list[_Walk]) -> None:
        while walks:
            walks = [walk for walk in walks if self._goes_on(walk)]
            fitting = [self._fitting(walk.one, walk.tokens) for walk in walks]
            asked = [_next(walk, some) for walk, some in zip(walks, fitting, strict=True)]
            for walk, some, logp_TC in zip(walks, fitting, self._chances(asked), strict=True):
                (token,) = self.rng.choices(some, _weights(logp_TC[-1]))
                walk.tokens = (*walk.tokens, token)
                walk.log_weight += _log_sum(logp_TC[-1])

    def _goes_on(self, walk: _Walk) -> bool:
        """Whether a way is not at its end; one that leads nowhere has no weight."""
        if walk.tokens[-1:] == walk.one.end:
            return False
        place = len(self.policy.vocabulary.spelling.bytes_of(walk.tokens))
        if place == len(walk.one.text):
            return bool(walk.one.end)
        far = walk.log_weight - walk.canonical[place] < NEGLIGIBLE
        full = len(walk.one.prompt) + len(walk.tokens) >= self.policy.max_positions
        if far or full or not self._fitting(walk.one, walk.tokens):
            walk.log_weight = -math.inf
            return False
        return True

    def _chances(self, asked: Sequence[_Asked]) -> list[list[LogProbs]]:
        """Log-probs of the candidates at each place of each sequence."""
        found: list[list[LogProbs]] = [[[] for _ in one.tokens] for one in asked]
        sequences = [ToScore(row=i, prompt=a.prompt, tokens=a.tokens) for i, a in enumerate(asked)]
        for micro in micro_batches(sequences, TOKENS_AT_ONCE, self.policy.device):
            places = [(row, place, asked[row].candidates[place]) for row, place in _targets(micro)]
            wanted = [m for m, (_, _, candidates) in enumerate(places) if candidates]
            for m, logp_V in zip(wanted, self._tables(micro, wanted), strict=True):
                row, place, candidates = places[m]
                found[row][place] = logp_V[list(candidates)].tolist()
        return found

    def _tables(self, micro: MicroBatch, wanted: Sequence[int]) -> Iterator[torch.Tensor]:
        for logits_MV in target_logits(self.policy, micro.packed, wanted):
            yield from torch.log_softmax(logits_MV.double() / self.temperature, -1)


def _ways_out(asked: _Asked, logp_TC: Sequence[LogProbs]) -> tuple[LogProbs, dict[Ids, float]]:
    """The log-prob of the canonical cut up to each token, and of each way to leave it."""
    so_far, sums = 0.0, []
    ways: dict[Ids, float] = {}
    for place, (token, candidates, logp_C) in enumerate(
        zip(asked.tokens, asked.candidates, logp_TC, strict=True)
    ):
        at = dict(zip(candidates, logp_C, strict=True))
        ways |= {
            (*asked.tokens[:place], other): so_far + logp
            for other, logp in at.items()
            if other != token
        }
        so_far += at[token]
        sums.append(so_far)
    return sums, ways


def _next(walk: _Walk, candidates: Ids) -> _Asked:
    """What may follow; any token stands in for the one that is looked for."""
    tokens = (*walk.tokens, candidates[0])
    return _Asked(walk.one.prompt, tokens, [*[()] * len(walk.tokens), candidates])


def _targets(micro: MicroBatch) -> list[tuple[int, int]]:
    """Row and place of each target token."""
    width = micro.mask_BT.shape[1]
    rows = micro.row_B.tolist()
    return [(rows[place // width], place % width) for place in micro.place_M.tolist()]


def _weights(logps: Sequence[float]) -> list[float]:
    return [math.exp(logp - max(logps)) for logp in logps]


def _log_sum(logps: Sequence[float]) -> float:
    return max(logps) + math.log(sum(_weights(logps)))


def _gap(canonical: float, log_weights: Sequence[float]) -> float:
    if not log_weights:
        return 0.0
    return math.log1p(sum(math.exp(w - canonical) for w in log_weights) / len(log_weights))
