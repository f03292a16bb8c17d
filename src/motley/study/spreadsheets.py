"""Studies and sweeps as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np

from motley.study import sweep
from motley.study.findings import Findings
from motley.study.outcomes import Outcome
from motley.study.standings import Against, opponents_of
from motley.study.statistics import Estimate
from motley.study.sweep import Trial
from motley.tasks import Measure

CSV_HEAD = (
    "crew",
    "arm",
    "seed",
    "peer",
    "kind",
    "measure",
    "start",
    "end",
    "lowest",
    "out_of_distribution",
    "compared_with",
    "difference",
)
STUDY_HEAD = (*CSV_HEAD, "sampled_tokens", "own_tokens", "foreign_tokens", "seconds")
COMPARISONS_HEAD = (
    "crew",
    "peer",
    "arm",
    "compared_with",
    "unit",
    "units",
    "difference",
    "low",
    "high",
    "p",
    "holm_p",
    "on",
    "margin",
    "equivalence_p",
    "equivalence_holm_p",
    "g",
    "g_low",
    "g_high",
)
CLAIMS_HEAD = (
    "claim",
    "verdict",
    "arm",
    "compared_with",
    "is",
    "margin",
    "on",
    "where",
    "verdict_there",
    "seeds",
    "difference",
    "low",
    "high",
    "p",
    "holm_p",
    "g",
    "g_low",
    "g_high",
    "seeds_to_decide",
)


def study_csv(found: Findings, measure: Measure) -> str:
    """A row per crew, arm, seed, peer and kind."""
    rows = []
    for one in found.crews:
        baseline = opponents_of(one.arms)[0]
        before = {(o.seed, o.peer): o.end for o in one.outcomes if o.arm == baseline}
        rows += [
            (
                *(one.crew, o.arm, o.seed, o.peer, kind, measure),
                *(o.start.get(kind), o.end.get(kind), o.lowest.get(kind), o.ood.get(kind)),
                *_against(
                    baseline, o.end.get(kind), before.get((o.seed, o.peer)), kind, o.arm == baseline
                ),
                *_spent(o),
            )
            for o in one.outcomes
            for kind in dict.fromkeys([*o.end, *o.ood])  # some are out of distribution only
        ]
    return _csv(STUDY_HEAD, rows)


def _spent(outcome: Outcome) -> tuple[float | None, ...]:
    spent = outcome.spent
    if spent is None:
        return (None,) * 4
    return (spent.sampled, spent.own, spent.foreign, spent.seconds)


def comparisons_csv(found: Findings) -> str:
    """A row per crew, peer, arm and opponent; no peer: the mean over peers; no crew: over crews."""
    rows = [
        (one.crew, row.peer, row.arm, other, *_compared(against, on))
        for one in found.crews
        for row in one.standings
        for on, met in (("heldout", row.against), ("ood", row.ood_against))
        for other, against in met.items()
    ]
    rows += [("", "", one.arm, one.opponent, *_compared(one.over, "heldout")) for one in found.over]
    return _csv(COMPARISONS_HEAD, rows)


def _compared(against: Against, on: str) -> tuple[object, ...]:
    compared = against.compared
    return (
        compared.unit,
        len(compared.differences),
        *_numbers(against.difference, against.p_value, against.holm_p),
        on,
        *_numbers(against.margin, against.equivalence_p, against.equivalence_holm_p),
        *_numbers(against.effect),
    )


def _numbers(*values: float | Estimate) -> list[float | None]:
    """An estimate has three; nan is no number."""
    flat: list[float] = []
    for value in values:
        flat += [value.mean, value.low, value.high] if isinstance(value, Estimate) else [value]
    return [None if np.isnan(one) else one for one in flat]


def claims_csv(found: Findings) -> str:
    """A row per claim and per crew, or crew and peer, in which it is judged."""
    rows: list[tuple[object, ...]] = []
    for one in found.judgements:
        claim = one.claim
        asked = (claim.arm, claim.against, claim.is_, claim.margin, claim.on)
        before = (claim.text, one.verdict, *asked)
        rows += [
            (
                *(*before, part.where, part.verdict, len(part.compared.differences)),
                *_numbers(part.difference, part.p_value, part.holm_p, part.effect),
                part.seeds if part.verdict == "undecided" else None,
            )
            for part in one.parts
        ] or [(*before, *[None] * (len(CLAIMS_HEAD) - len(before)))]
    return _csv(CLAIMS_HEAD, rows)


def sweep_csv(trials: Sequence[Trial], first: str, measure: Measure) -> str:
    """A row per crew, arm, seed, learner and kind; of trials that kept no kinds, their mean."""
    ends = lambda t: t.end or {"mean": sweep.last_of(t)}
    before = {(t.arm, t.seed, t.peer): ends(t) for t in trials if t.crew == first}
    rows = [
        (
            *(t.crew, t.arm, t.seed, t.peer, kind, measure),
            *(t.start.get(kind), end, None, None),
            *_against(first, end, before.get((t.arm, t.seed, t.peer)), kind, t.crew == first),
        )
        for t in trials
        for kind, end in ends(t).items()
    ]
    return _csv(CSV_HEAD, rows)


def _against(
    other: str, value: float | None, before: Mapping[str, float] | None, kind: str, same: bool
) -> tuple[str, float | None]:
    if same or value is None or before is None or kind not in before:
        return "", None
    return other, value - before[kind]


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()
