"""A study and a sweep as one HTML file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from motley.config import CrewConfig, config_text
from motley.reports import page
from motley.reports.drawing import Curve, Span, curve_chart, padded, span_chart
from motley.study import crews, judging, report, standings, sweep
from motley.study.crews import OverCrews
from motley.study.findings import CrewFindings, Findings
from motley.study.outcomes import Outcome
from motley.study.report import by_seed, mean_of
from motley.study.sections import Section
from motley.study.statistics import (
    FEW_SEEDS,
    LEVEL,
    Comparison,
    bounded_interval,
    few_seeds_warning,
    number,
    sentences,
)
from motley.study.sweep import Trial
from motley.tasks import Measure

OVER_CREWS = (
    "Over crews: a crew counts once, with its mean over peers and seeds, and the interval is about "
    "other crews of the same sort. Crews below and above are those whose own interval leaves out 0."
)

CLAIMS = (
    "Claims: reproduced means that the test a claim asks for has p below .05, after Holm's "
    "correction for the arms of which the same is claimed. Better: the difference is above the "
    "margin. Equivalent: it is within the margin. Not worse: it is above minus the margin. Not "
    "reproduced: the whole 95 % interval lies where the claim is wrong. All else is undecided. A "
    "claim about several crews or peers must hold in each. One where it is wrong is enough, after "
    "Holm's correction for their number."
)


@dataclass(frozen=True, slots=True)
class Making:
    """How a report came to be: what it shows at its end."""

    command: str
    crews: Sequence[CrewConfig]
    arms: Sequence[str]
    measure: Measure
    names: Mapping[str, str] = field(default_factory=dict)  # of arms -> what they stand for


# Study


def study_page(found: Findings, made: Making, sections: Sequence[Section] = ()) -> str:
    several = len(found.crews) > 1
    parts = [
        *_warned(found.num_seeds),
        *_claims(found),
        page.heading("What was found"),
        *_found_over_crews(found),
        *(part for one in found.crews for part in _found_in(one, several)),
        *(part for one in found.crews for part in _section(one, made, several)),
        *(_over_crews(found.over) if found.over else ()),
        *(part for section in sections for part in _shown(section)),
        page.heading(f"How to read this: {made.measure}, ±, 95 % and p"),
        page.box(words_of(found, made.measure)),
        *_ending(made),
    ]
    named = ", ".join(one.crew for one in found.crews)
    return page.page(f"Study of the crew{'s' * several} {named}", parts)


def _claims(found: Findings) -> list[str]:
    if not found.judgements:
        return []
    return [
        page.heading("The claims"),
        page.bullets([one.sentence for one in found.judgements]),
        *([page.table(*judging.cells(found.judgements))] if found.has_parts else ()),
    ]


def words_of(found: Findings, measure: Measure) -> list[str]:
    """What the words and signs of a study's report mean."""
    rows = [row for one in found.crews for row in one.standings]
    made = [a for row in rows for a in (*row.against.values(), *row.ood_against.values())]
    num = sum(not np.isnan(one.p_value) for one in [*made, *(row.over for row in found.over)])
    return [
        *how_to_read(measure, num),
        *(_of_sizes(found.margin) if num or found.judgements else ()),
        *([CLAIMS] if found.judgements else ()),
        *([OVER_CREWS] if found.over else ()),
    ]


def _warned(num_seeds: int) -> list[str]:
    return [page.warning(text)] if (text := few_seeds_warning(num_seeds)) else []


def _found_over_crews(found: Findings) -> list[str]:
    if not found.over:
        return []
    return [
        page.paragraph("Over crews:"),
        page.bullets([one.sentence for one in found.over]),
    ]


def _found_in(one: CrewFindings, several: bool) -> list[str]:
    """The sentences of a crew."""
    name = [page.paragraph(f"{one.crew}:")] if several else []
    over_all, by_peer = standings.said(one.over_peers), standings.said(one.by_peer)
    if not over_all:
        return [*name, page.paragraph("There is nothing to compare: no arm but opponents.")]
    parts = [*name, page.bullets(over_all)]
    if by_peer:
        parts += [page.paragraph("Peer by peer:"), page.bullets(by_peer)]
    return [*parts, page.bullets(standings.below(one.standings))]


def _section(one: CrewFindings, made: Making, several: bool) -> list[str]:
    """Curves and tables of a crew."""
    before = f"{one.crew}: " if several else ""
    config = next(config for config in made.crews if config.crew.name == one.crew)
    against = [a.compared for row in one.over_peers for a in row.against.values()]
    return [
        page.heading(f"{before}Curves"),
        page.paragraph(
            f"Held-out {made.measure}, mean over kinds and seeds. Bands are 95 % intervals over "
            "seeds."
        ),
        page.charts(_study_charts(one, config.crew.rounds, made.measure)),
        *_differences(against, "mean over peers and kinds", f"{before}Differences"),
        page.heading(f"{before}The crew at a glance"),
        page.table(*report.glance_cells(one.glance)),
        page.heading(f"{before}Against alone"),
        page.table(*standings.cells(one.standings)),
        *_out_of_distribution(one, before),
        page.heading(f"{before}What each peer paid"),
        page.table(*standings.took_cells(one.standings)),
        page.heading(f"{before}Every peer"),
        page.table(*report.cells(one.lines)),
    ]


def _out_of_distribution(one: CrewFindings, before: str) -> list[str]:
    if not standings.has_ood(one.standings):
        return []
    return [
        page.heading(f"{before}Against alone, out of distribution"),
        page.table(*standings.cells(one.standings, "ood")),
    ]


def _over_crews(over: Sequence[OverCrews]) -> list[str]:
    return [
        *_differences([one.over.compared for one in over], "mean over crews", "Over crews"),
        page.table(*crews.cells(over)),
    ]


def _shown(section: Section) -> list[str]:
    head, rows = section.table
    drawn = [
        curve_chart(title, curves, section.x_label, section.y_label)
        for title, curves in section.curves.items()
    ]
    return [
        page.heading(section.title),
        page.paragraph(section.text),
        *([page.charts(drawn)] if drawn else ()),
        *([page.table(head, rows)] if rows else ()),
    ]


def _study_charts(one: CrewFindings, rounds: int, measure: Measure) -> list[str]:
    peers = report.peers_of(one.outcomes)
    own = lambda peer: [o for o in one.outcomes if peer in ("", o.peer)]
    titles = (
        {"": "all peers"} | {peer: peer for peer in peers}
        if len(peers) > 1
        else {peers[0]: peers[0]}
    )
    curves = {
        title: [_study_curve(own(peer), arm, measure, rounds) for arm in one.arms]
        for peer, title in titles.items()
    }
    return _alike(curves, measure)


def _study_curve(outcomes: Sequence[Outcome], arm: str, measure: Measure, rounds: int) -> Curve:
    curve = lambda o: o.curve or {0: o.start, rounds: o.end}
    own = [o for o in outcomes if o.arm == arm]
    shared = sorted(set.intersection(*(set(curve(o)) for o in own)))
    values = {number: by_seed(own, arm, lambda o: mean_of(curve(o)[number])) for number in shared}  # noqa: B023 - called at once
    return _curve(arm, values, measure)


def _curve(label: str, values: Mapping[int, Sequence[float]], measure: Measure) -> Curve:
    """`values`: round -> one per seed."""
    known = {number: bounded_interval(per_seed, measure) for number, per_seed in values.items()}
    band = all(len(per_seed) > 1 for per_seed in values.values())
    return Curve(
        label,
        list(known),
        [e.mean for e in known.values()],
        [e.low for e in known.values()] if band else (),
        [e.high for e in known.values()] if band else (),
    )


def _alike(curves: Mapping[str, Sequence[Curve]], measure: Measure) -> list[str]:
    """Charts whose axes can be compared."""
    every = [v for some in curves.values() for c in some for v in (*c.y, *c.low, *c.high)]
    inside = measure == "accuracy" and all(0 <= v <= 1 for v in every)
    ends = (0.0, 1.0) if inside else padded(every)
    label = f"held-out {measure}"
    return [curve_chart(title, some, "round", label, ends) for title, some in curves.items()]


# Sweep


def sweep_page(trials: Sequence[Trial], made: Making) -> str:
    crews, arms, measure = [c.crew.name for c in made.crews], made.arms, made.measure
    compared = sweep_comparisons(trials, crews, arms)
    lines = sweep.table(trials, crews, arms, measure)
    parts = [
        *_warned(len({t.seed for t in trials})),
        page.heading("What was found"),
        page.bullets(sentences(compared))
        if compared
        else page.paragraph("There is one crew only: nothing to compare."),
        page.heading(f"How to read this: {measure}, ±, 95 % and p"),
        page.box(how_to_read(measure, len(compared))),
        page.heading("Curves"),
        page.paragraph(
            f"Held-out {measure}, mean over kinds and seeds. Bands are 95 % intervals over seeds."
        ),
        page.charts(
            _alike(
                {
                    crew: [_sweep_curve(trials, crew, arm, measure) for arm in arms]
                    for crew in crews
                },
                measure,
            )
        ),
        *_differences(compared, "after the last round"),
        page.heading("Every arm in every crew"),
        page.table(*sweep.cells(lines)),
        *_ending(made),
    ]
    return page.page(f"Sweep over {', '.join(crews)}", parts)


def sweep_comparisons(
    trials: Sequence[Trial], crews: Sequence[str], arms: Sequence[str]
) -> list[Comparison]:
    """Every arm in every crew against itself in the first one."""
    return [sweep.comparison(trials, arm, crew, crews[0]) for arm in arms for crew in crews[1:]]


def _sweep_curve(trials: Sequence[Trial], crew: str, arm: str, measure: Measure) -> Curve:
    own = [t for t in trials if t.crew == crew and t.arm == arm]
    shared = sorted(set.intersection(*(set(t.curve) for t in own)))
    values = {number: sweep.by_seed(own, _at(number)) for number in shared}
    return _curve(arm, values, measure)


def _at(number: int) -> Callable[[Trial], float]:
    return lambda trial: trial.curve[number]


# Both


def _differences(
    compared: Sequence[Comparison], words: str, heading: str = "Differences"
) -> list[str]:
    """A chart per baseline."""
    against: dict[str, list[Span]] = {}
    for one in compared:
        e = one.estimate
        against.setdefault(one.second, []).append(Span(one.first, e.mean, e.low, e.high))
    if not against:
        return []
    drawn = [
        span_chart(f"difference from {other}: {words}", spans, "right of 0: better")
        for other, spans in against.items()
    ]
    return [
        page.heading(heading),
        page.paragraph("An interval that leaves out 0 decides; p below .05 says the same."),
        page.charts(drawn),
    ]


def how_to_read(measure: Measure, num_comparisons: int) -> list[str]:
    what = {
        "accuracy": "Accuracy is the share of held-out problems answered rightly, greedily.",
        "reward": "Reward is the mean of what the reward function gives for greedy answers to "
        "held-out problems. It has no fixed range.",
    }
    bounded = (
        "Intervals of accuracies are taken on the log-odds scale. They stay between 0 and 1, and "
        "need not be as wide above as below. Differences have ordinary t intervals."
    )
    return [
        what[measure],
        "a ± b, and 95 % a to b: the mean over seeds, and an interval that holds the true mean in "
        "95 of 100 such studies. It is about other seeds of the same crew file. It says nothing "
        "of other tasks, models or settings.",
        *([bounded] if measure == "accuracy" else []),
        *(_of_comparisons(num_comparisons) if num_comparisons else ()),
        f"Fewer than {FEW_SEEDS} seeds: intervals are wide and rest on hardly any data.",
    ]


def _of_comparisons(num: int) -> list[str]:
    chance = f"{num * (1 - LEVEL):.1f}".removesuffix(".0")
    many = (
        f"{num} comparisons are made here. If no difference were real, about {chance} would be "
        "called decided by chance. A sentence says so where Holm's correction for that takes a "
        "decision back. It is made among all that are compared with one and the same thing: the "
        "arms of a study with one opponent and one peer, the rows of a sweep. In a table p (Holm) "
        "is p after it."
    )
    return [
        "p: the chance of a difference at least this large if there were none. It is of the paired "
        "t test: each seed is compared with the same seed. Below .05 counts as decided.",
        *([many] if num > 1 else []),
        "About N seeds would decide it: so many find a difference of this size and spread four "
        "times in five. It is a guess from few seeds. Of a claim it counts in Holm's correction, "
        "and that all crews and peers of the claim must be decided.",
    ]


def _of_sizes(margin: float) -> list[str]:
    stated = (
        f" In tables the margin is {number(margin)}: a smaller difference is taken to make none."
        if not np.isnan(margin)
        else ""
    )
    return [
        "Within ±m: two one-sided paired t tests, against a loss of m and against a gain of m. The "
        "larger p counts. Below .05 says that the true difference is smaller than the margin m, "
        f"either way: the two are equivalent. A large p does not say that they differ.{stated}",
        "g: Hedges' g, the mean difference divided by the spread of differences between seeds, "
        "corrected for few seeds, with its 95 % interval. It says how reliably one seed shows "
        "the difference: at 1 about five seeds of six point the same way. It says nothing of how "
        "much the difference matters. It needs three seeds.",
    ]


def _ending(made: Making) -> list[str]:
    return [
        page.heading("How it was made"),
        page.code(made.command),
        *(page.paragraph(f"{name} = {text}") for name, text in made.names.items()),
        *(
            page.folded(f"the crew file of {config.crew.name}", config_text(config))
            for config in made.crews
        ),
        page.paragraph(f"This report was written with {page.versions()}."),
    ]
