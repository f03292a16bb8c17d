"""What the lines of a peer tell for the page of its crew: what it can, from whom it learned, what
was wrong. Each reads a few lines only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from motley.dashboard.answers import Arrow, Warned
from motley.dashboard.lines import HELDOUT, WARNINGS
from motley.dashboard.numbers import number_keys
from motley.dashboard.run_lines import PeerLines, RunLines
from motley.runs.metrics import ByKind, Sign, Timing
from motley.tasks import Measure

GROUPS, SEQUENCES, WEIGHT = "senders.groups", "senders.sequences", "senders.weight.mean"
MOST_WARNINGS = 500


class NewestScores(msgspec.Struct, frozen=True):
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
    def device(self) -> str:
        return (self.timing.device if self.timing else None) or ""

    @property
    def took_s(self) -> float | None:
        took = self.timing
        if took is None:
            return None
        return took.sample_s + (took.learn_s or 0.0) - (took.overlap_s or 0.0)


class _WarnedLine(msgspec.Struct, frozen=True):
    round: int
    warnings: list[Sign] = []


_scores_decoder = msgspec.json.Decoder(NewestScores)
_newest_decoder = msgspec.json.Decoder(NewestLine)
_warned_decoder = msgspec.json.Decoder(_WarnedLine)


def newest_scores(lines: PeerLines) -> NewestScores:
    return next(lines.marked(HELDOUT).last().decode(_scores_decoder), NewestScores())


def newest_line(lines: PeerLines) -> NewestLine:
    return next(lines.last().decode(_newest_decoder), NewestLine())


def arrows(
    run: RunLines, learner: str, lines: PeerLines, most_lines: int, rollouts_per_group: int
) -> list[Arrow]:
    """From whom a peer learned, by some of its steps. Counts are scaled up to all of them."""
    some, _ = lines.steps.spread(most_lines)
    sequences: dict[str, float] = defaultdict(float)
    weighed: dict[str, float] = defaultdict(float)  # those that were scored
    weights: dict[str, float] = defaultdict(float)  # summed over them
    for _, found in run.numbers(some, [GROUPS, SEQUENCES, WEIGHT]):
        for sender, groups in found[GROUPS].items():
            # an old line has no sequences
            count = found[SEQUENCES].get(sender, groups * rollouts_per_group)
            sequences[sender] += count
            if (weight := found[WEIGHT].get(sender)) is not None:
                weighed[sender] += count
                weights[sender] += count * weight
    total, scale = sum(sequences.values()), len(lines.steps) / max(1, len(some))
    return [
        Arrow(
            sender=sender,
            learner=learner,
            sequences=round(count * scale),
            share=count / total if total else 0.0,
            weight=weights[sender] / weighed[sender] if weighed[sender] else None,
        )
        for sender, count in sequences.items()
    ]


def warnings(peers: Mapping[str, PeerLines]) -> list[Warned]:
    """The newest of all, in the order of rounds."""
    told = [
        Warned(round=line.round, peer=name, sign=one.sign, words=one.words, senders=one.senders)
        for name, lines in peers.items()
        for line in lines.marked(WARNINGS).last(MOST_WARNINGS).decode(_warned_decoder)
        for one in line.warnings
    ]
    return sorted(told, key=lambda one: one.round)[-MOST_WARNINGS:]


class KnownKeys:
    """Of all numbers that the newest lines have. Each line is looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], list[str]] = {}  # (file, times cut, line) -> keys

    def of(self, peers: Mapping[str, PeerLines]) -> list[str]:
        known = self._known
        self._known = {}  # older lines are not asked for again
        for lines in peers.values():
            for one in (lines.last(), lines.marked(HELDOUT).last()):
                for place in one.starts:
                    line = (str(one.index.path), one.lines.times_cut, place)
                    self._known[line] = known.get(line) or number_keys(next(one.read(), b""))
        return list(dict.fromkeys(key for found in self._known.values() for key in found))
