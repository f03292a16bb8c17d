"""What the lines of a peer tell for the page of its crew: what it can, from whom it learned, what
was wrong. Each reads a few lines only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np

from motley.dashboard.answers import Arrow, Warned
from motley.dashboard.lines import HELDOUT, WARNINGS
from motley.dashboard.numbers import number_keys
from motley.dashboard.run_lines import PeerLines
from motley.runs.metrics import ByKind, Sign, Timing
from motley.tasks import Measure

ARROW_LINES = 60  # that tell from whom a peer learned
MOST_WARNINGS = 500


class Scores(msgspec.Struct, frozen=True):
    """What a peer can on problems that it was not trained on."""

    heldout: ByKind = {}
    ood: ByKind = {}
    measure: Measure | None = None

    @property
    def is_reward(self) -> bool:
        """Lines of old runs do not say; there, what is outside 0..1 cannot be an accuracy."""
        values = (self.heldout | self.ood).values()
        return self.measure == "reward" or not all(0 <= value <= 1 for value in values)


class NewestLine(msgspec.Struct, frozen=True):
    version: int | None = None
    reward: float | None = None
    timing: Timing | None = None

    @property
    def took_s(self) -> float | None:
        took = self.timing
        if took is None:
            return None
        return took.sample_s + (took.learn_s or 0.0) - (took.overlap_s or 0.0)


class _Weight(msgspec.Struct, frozen=True):
    mean: float | None = None


class _Taken(msgspec.Struct, frozen=True):
    groups: int = 0
    sequences: int | None = None  # None: an old line
    weight: _Weight = _Weight()


class _Step(msgspec.Struct, frozen=True):
    senders: dict[str, _Taken] = {}


class _WarnedLine(msgspec.Struct, frozen=True):
    round: int
    warnings: list[Sign] = []


_scores_decoder = msgspec.json.Decoder(Scores)
_newest_decoder = msgspec.json.Decoder(NewestLine)
_step_decoder = msgspec.json.Decoder(_Step)
_warned_decoder = msgspec.json.Decoder(_WarnedLine)


def newest_scores(lines: PeerLines) -> Scores:
    return next(lines.marked(HELDOUT).last().decode(_scores_decoder), Scores())


def newest_line(lines: PeerLines) -> NewestLine:
    return next(lines.last().decode(_newest_decoder), NewestLine())


def arrows(learner: str, lines: PeerLines, rollouts_per_group: int) -> list[Arrow]:
    """From whom a peer learned, by some of its steps. Counts are scaled up to all of them."""
    steps = lines.where(lines.round > 0)
    some, _ = steps.spread(ARROW_LINES)
    sequences: dict[str, int] = defaultdict(int)
    weighed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for step in some.decode(_step_decoder):
        for sender, taken in step.senders.items():
            count = taken.sequences
            count = taken.groups * rollouts_per_group if count is None else count
            sequences[sender] += count
            if taken.weight.mean is not None and count:
                weighed[sender].append((taken.weight.mean, count))
    total, scale = sum(sequences.values()), len(steps) / max(1, len(some))
    return [
        Arrow(
            sender=sender,
            learner=learner,
            sequences=round(count * scale),
            share=count / total if total else 0.0,
            weight=_weighted_mean(weighed[sender]),
        )
        for sender, count in sequences.items()
    ]


def _weighted_mean(pairs: list[tuple[float, int]]) -> float | None:
    if not pairs:
        return None
    values, counts = np.array(pairs).T
    return float(np.average(values, weights=counts))


def warnings(peers: Mapping[str, PeerLines]) -> list[Warned]:
    """The newest of all, in the order of rounds."""
    told = [
        Warned(round=line.round, peer=name, sign=one.sign, words=one.words, senders=one.senders)
        for name, lines in peers.items()
        for line in lines.marked(WARNINGS).last(MOST_WARNINGS).decode(_warned_decoder)
        for one in line.warnings
    ]
    return sorted(told, key=lambda one: one.round)[-MOST_WARNINGS:]


def keys(peers: Mapping[str, PeerLines]) -> list[str]:
    """Of all numbers that the newest lines have."""
    return list(
        dict.fromkeys(
            key
            for lines in peers.values()
            for some in (lines.last(), lines.marked(HELDOUT).last())
            for line in some.read()
            for key in number_keys(line)
        )
    )
