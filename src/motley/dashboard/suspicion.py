"""What a learner's lines hold against those who send to it, now and over the rounds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from motley.dashboard.answers import Point, Suspect
from motley.dashboard.lines import SUSPECTS
from motley.dashboard.run_lines import PeerLines
from motley.runs.metrics import Counts
from motley.trust.standing import Suspicion

MOST_LINES = 1000  # with suspects, of all learners


class _Held(msgspec.Struct, frozen=True):
    """What a line holds against others."""

    round: int = 0
    refused: Counts = {}
    dropped: Counts = {}
    missing: dict[str, int] = {}
    suspects: dict[str, Suspicion] = {}


_decoder = msgspec.json.Decoder(_Held)


def suspects_of(learner: str, lines: PeerLines, num_learners: int) -> list[Suspect]:
    """Everyone that a learner refused, dropped or suspects."""
    now = next(lines.last().decode(_decoder), _Held())
    told = list(_told(lines, max(10, MOST_LINES // num_learners)).decode(_decoder))
    names = dict.fromkeys(
        [*now.refused, *now.dropped, *now.missing, *(n for held in told for n in held.suspects)]
    )
    nothing = Suspicion(evidence=0.0)
    return [
        Suspect(
            learner=learner,
            sender=name,
            refused=now.refused.get(name, {}),
            dropped=now.dropped.get(name, {}),
            missing=now.missing.get(name, 0),
            evidence=list(_points(told, name, "evidence")),
            strikes=list(_points(told, name, "strikes")),
            muted=now.suspects.get(name, nothing).muted,
            until=now.suspects.get(name, nothing).until,
        )
        for name in names
    ]


def _told(lines: PeerLines, most: int) -> PeerLines:
    """Some lines with suspects, and those right behind that have none any more."""
    marks = (lines.lines.marks[lines.places] & SUSPECTS) > 0
    some = lines.where(marks).spread(most)[0].places
    is_behind = np.zeros(len(marks), bool)
    is_behind[1:] = marks[:-1] & ~marks[1:]
    behind = lines.where(is_behind).spread(most)[0].places
    return lines.where(np.isin(lines.places, [*some, *behind]))


def _points(told: list[_Held], name: str, key: str) -> Iterator[Point]:
    """A number over the rounds; None where a line stops showing it, since it is too small."""
    is_shown = False
    for held in told:
        suspicion = held.suspects.get(name)
        if suspicion is not None or is_shown:
            yield held.round, getattr(suspicion, key) if suspicion else None
        is_shown = suspicion is not None
