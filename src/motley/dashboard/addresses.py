"""What the page can ask about a run: one table of addresses, their parameters and answers.

The server, its schema and docs/watch.md are made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from motley.archive import read_range
from motley.dashboard import answers
from motley.dashboard.answers import Answer
from motley.dashboard.log_view import GroupQuery
from motley.dashboard.shown import Range, ShownRun

EVERYTHING = (-math.inf, math.inf)
MOST_POINTS, MOST_KEYS, MOST_GROUPS = 5000, 50, 500
MOST_LETTERS = 2000  # of one value
LARGEST = 2**53  # whole number that JSON carries exactly

ROUNDS = "rounds such as 3, 3..7, ..7 or 3..; all if it is left out"


class Query:
    """What stands in an address: values of the names it may have. Whatever else is refused."""

    def __init__(
        self, items: Sequence[tuple[str, str]], known: Mapping[str, str], path: Mapping[str, str]
    ) -> None:
        self._values: dict[str, list[str]] = {name: [value] for name, value in path.items()}
        for name, value in items:
            if name not in known:
                expected = ", ".join(known) or "none"
                raise ValueError(f"{name[:80]!r} is no parameter here; expected {expected}")
            if len(value) > MOST_LETTERS:
                raise ValueError(
                    f"{name} has {len(value)} letters; expected {MOST_LETTERS} at most"
                )
            self._values.setdefault(name, []).append(value)

    def texts(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def text(self, name: str) -> str:
        values = self.texts(name)
        if len(values) > 1:
            raise ValueError(f"{name} is given {len(values)} times; give it once")
        return values[0] if values else ""

    def whole(self, name: str, otherwise: int, most: int = LARGEST) -> int:
        text = self.text(name)
        if not text:
            return otherwise
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 16 else -1
        if not 0 <= number <= most:
            raise ValueError(f"{name} {text[:80]!r} is no whole number from 0 to {most}")
        return number

    def range(self, name: str) -> Range:
        text = self.text(name)
        return read_range(text, name) if text else EVERYTHING


Ask = Callable[[ShownRun, Query], Answer]


@dataclass(frozen=True, slots=True)
class Address:
    path: str  # behind /api/runs/ID/
    answer: type[Answer]
    ask: Ask
    parameters: Mapping[str, str] = field(default_factory=dict)  # name -> what it means


def _curves(run: ShownRun, query: Query) -> Answer:
    keys = query.texts("key")
    if not 0 < len(keys) <= MOST_KEYS:
        raise ValueError(f"got {len(keys)} keys; give from 1 to {MOST_KEYS}, such as key=reward")
    points = max(2, query.whole("points", 300, MOST_POINTS))
    return run.curves(keys, points, query.range("rounds"), query.text("peer"))


def _groups(run: ShownRun, query: Query) -> Answer:
    return run.groups(
        GroupQuery(
            after=query.whole("after", 0),
            limit=max(1, query.whole("limit", 50, MOST_GROUPS)),
            newest=bool(query.whole("newest", 0, 1)),
            sender=query.text("sender"),
            learner=query.text("learner"),
            rounds=query.range("rounds"),
            kind=query.text("kind"),
            rewards=query.range("rewards"),
            text=query.text("text"),
            fate=query.text("fate"),
        )
    )


def _formula(run: ShownRun, query: Query) -> Answer:
    position, number = query.whole("position", 0), query.whole("number", 0)
    return run.formula(position, number, query.text("learner"), query.whole("token", 0))


def _discarded(run: ShownRun, query: Query) -> Answer:
    points = max(2, query.whole("points", 300, MOST_POINTS))
    return run.discarded(query.text("learner"), points)


def _histograms(run: ShownRun, query: Query) -> Answer:
    return run.histograms(query.text("learner"), query.text("sender"), query.range("rounds"))


ADDRESSES = (
    Address(
        "crew",
        answers.Crew,
        lambda run, query: run.crew(query.range("rounds")),
        {"rounds": f"of the arrows: {ROUNDS}"},
    ),
    Address(
        "curves",
        answers.Curves,
        _curves,
        {
            "key": "a number of a metrics line, such as reward or senders.kl_k3; may be repeated",
            "points": f"of a curve at most, {MOST_POINTS} at the most; 300 if it is left out",
            "rounds": ROUNDS,
            "peer": "whose; everyone's if it is left out",
        },
    ),
    Address(
        "groups",
        answers.GroupPage,
        _groups,
        {
            "after": "the `next` of the page before",
            "limit": f"groups of a page, {MOST_GROUPS} at the most; 50 if it is left out",
            "newest": "1: from the end of the log backwards",
            "sender": "who sampled",
            "learner": "whose fates count",
            "rounds": ROUNDS,
            "kind": "of the problem",
            "rewards": "such as 1, ..0.5 or -3..-1",
            "text": "a part of the prompt or a completion",
            "fate": "a part of what became of it, such as filtered",
        },
    ),
    Address(
        "groups/{position}",
        answers.GroupText,
        lambda run, query: run.group(query.whole("position", 0), query.text("learner")),
        {"learner": "the only one whose traces are wanted; all if it is left out"},
    ),
    Address("groups/{position}/{number}/{learner}/{token}", answers.Formula, _formula),
    Address(
        "discarded",
        answers.Discarded,
        _discarded,
        {"learner": "who did not learn from it", "points": "of a reason at most"},
    ),
    Address(
        "histograms",
        answers.Histograms,
        _histograms,
        {"learner": "who learned", "sender": "who sampled", "rounds": ROUNDS},
    ),
    Address("trust", answers.TrustView, lambda run, query: run.trust()),
    Address("speed", answers.Speed, lambda run, query: run.speed()),
)
