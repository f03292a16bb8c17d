"""Looks: what the rows of a study did to samples, over training, from each sender to each receiver.

Weights before and after truncation, what the filter dropped, whether the order of rewards was
kept, how many samples are left. Reads metrics.jsonl of runs; docs/metrics.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motley.learning.senders import SenderMetrics
from motley.reports.drawing import Curve
from motley.runs.curves import run_lines
from motley.runs.metrics import learner_lines
from motley.study.outcomes import StudyRun
from motley.study.sections import Section
from motley.study.statistics import Estimate, interval

MOST_POINTS = 40  # of a curve: more rounds are put together, so many at a time


class FromSender(NamedTuple):
    """What a step of one run took from one sender."""

    run: StudyRun
    round: int
    receiver: str
    sender: str
    took: SenderMetrics

    @property
    def pair(self) -> str:
        return f"{self.sender} → {self.receiver}"

    @property
    def is_foreign(self) -> bool:
        return self.sender != self.receiver


@dataclass(frozen=True, slots=True)
class Look:
    """One thing to look at: the columns of a table, and those of them that are drawn."""

    title: str
    text: str
    columns: Mapping[str, str]  # head -> key of a sender, or KEY.PART of a distribution
    drawn: Mapping[str, str]  # title of a chart -> the same
    label: str


LOOKS = (
    Look(
        "Weights before and after truncation",
        "The factor on A·grad log p of a token. Before: the row's own importance ratio. After: "
        "what was used, with truncation and clip, and 0 where the filter dropped the sequence. "
        "Means over steps and seeds of the mean and the quantiles over a step's tokens.",
        {
            f"{part} {when}": f"{key}.{part}"
            for when, key in (("before", "free_weight"), ("after", "weight"))
            for part in ("mean", "q05", "q50", "q95")
        }
        | {"changed by a bound": "clipped"},
        {"mean weight before": "free_weight.mean", "mean weight after": "weight.mean"},
        "weight",
    ),
    Look(
        "What the filter dropped",
        "Share of a sender's scored sequences that the filter dropped, by the sign of the "
        "advantage. Silent sequences are not scored.",
        {"A > 0": "filtered_positive", "A ≤ 0": "filtered_negative"},
        {"dropped of A ≤ 0": "filtered_negative"},
        "share",
    ),
    Look(
        "Rank agreement",
        "Kendall's tau-b within a group, between rewards and advantage · mean weight of a "
        "sequence: 1 where the order of rewards is kept. Before: had nothing been dropped. After: "
        "as it was; a dropped sequence counts 0. Equal rewards with unequal weights cost some of "
        "it, so compare the two.",
        {"tau before": "tau_before", "tau after": "tau_after"},
        {"tau before": "tau_before", "tau after": "tau_after"},
        "tau",
    ),
    Look(
        "Effective sample size and age",
        "Effective sample size: (sum w)² / (n · sum w²) over the n tokens of a sender, w the "
        "weight that was used. It does not see a common scale. Age: in versions of the receiver.",
        {"effective share": "ess", "age": "age", "distance (k3)": "kl_k3"},
        {"effective share": "ess"},
        "share",
    ),
)


def looks_of(runs: Sequence[StudyRun]) -> list[Section]:
    """A section for each look, crew by crew. Arms whose peers hear nobody but themselves are left
    out: there every weight is 1. So are runs whose metrics somebody has deleted.
    """
    sections = []
    kept = [run for run in runs if has_lines(run)]
    crews = list(dict.fromkeys(run.crew for run in kept))
    for crew in crews:
        heard = [one for run in kept if run.crew == crew for one in heard_in(run)]
        shared = {one.run.arm for one in heard if one.is_foreign}
        heard = [one for one in heard if one.run.arm in shared]
        before = f"{crew}: " if len(crews) > 1 else ""
        if heard:
            sections += [_section(look, before, heard) for look in LOOKS]
    return sections


def has_lines(run: StudyRun) -> bool:
    return any(run.folder.glob("metrics.jsonl")) or any(run.folder.glob("peers/*/metrics.jsonl"))


def heard_in(run: StudyRun) -> list[FromSender]:
    """Step by step, what a run's peers took from whom."""
    return [
        FromSender(run, line.round, line.peer, sender, took)
        for line in learner_lines(run_lines(run.folder))
        for sender, took in sorted((line.senders or {}).items())
    ]


def number_of(took: SenderMetrics, path: str) -> float | None:
    """>>> number_of(took, "ess"), number_of(took, "free_weight.q50")
    (0.81, 1.02)
    """
    key, _, part = path.partition(".")
    if not part or part == "mean":
        return took.number(key)
    value: float | None = getattr(getattr(took, key), part, None)
    return value


def _section(look: Look, before: str, heard: Sequence[FromSender]) -> Section:
    arms = list(dict.fromkeys(one.run.arm for one in heard))
    rows = []
    for arm in arms:
        own = [one for one in heard if one.run.arm == arm]
        for pair in dict.fromkeys(one.pair for one in own):
            theirs = [one for one in own if one.pair == pair]
            rows.append([arm, pair, *(_mean_text(theirs, path) for path in look.columns.values())])
    foreign = [one for one in heard if one.is_foreign]
    charts = {
        f"{words}: {receiver}": curves
        for receiver in dict.fromkeys(one.receiver for one in foreign)
        for words, path in look.drawn.items()
        if (curves := _curves([one for one in foreign if one.receiver == receiver], arms, path))
    }
    head = ["arm", "sender → receiver", *look.columns]
    drawn = " Curves: mean over a receiver's foreign senders; bands are 95 % intervals over seeds."
    return Section(before + look.title, look.text + drawn, (head, rows), charts, y_label=look.label)


def _mean_text(heard: Sequence[FromSender], path: str) -> str:
    """Mean over steps, then over seeds."""
    return f"{interval([*_by_seed(heard, path).values()]):.3g}"


def _by_seed(heard: Sequence[FromSender], path: str) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for one in heard:
        if (value := number_of(one.took, path)) is not None:
            values.setdefault(one.run.seed, []).append(value)
    return {seed: float(np.mean(some)) for seed, some in values.items()}


def _curves(heard: Sequence[FromSender], arms: Sequence[str], path: str) -> list[Curve]:
    width = -(-max(one.round for one in heard) // MOST_POINTS)
    made = []
    for arm in arms:
        of_bin: dict[int, list[FromSender]] = {}
        for one in heard:
            if one.run.arm == arm:
                of_bin.setdefault((one.round - 1) // width, []).append(one)
        known = {
            number: interval([*by_seed.values()])
            for number, some in sorted(of_bin.items())
            if (by_seed := _by_seed(some, path))
        }
        if known:
            made.append(curve_of(arm, {(n + 0.5) * width + 0.5: e for n, e in known.items()}))
    return made


def curve_of(label: str, points: Mapping[float, Estimate]) -> Curve:
    """With a band where every point has an interval."""
    band = not any(np.isnan(e.low) for e in points.values())
    return Curve(
        label,
        list(points),
        [e.mean for e in points.values()],
        [e.low for e in points.values()] if band else (),
        [e.high for e in points.values()] if band else (),
    )
