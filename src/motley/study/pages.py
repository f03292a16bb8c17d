"""A study and a sweep as one HTML file and one CSV file each."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from motley.config import CrewConfig, config_text
from motley.reports import page
from motley.reports.drawing import Curve, Span, curve_chart, padded, span_chart
from motley.study import report, sweep
from motley.study.outcomes import Outcome
from motley.study.report import by_seed, mean_of
from motley.study.statistics import (
    FEW_SEEDS,
    LEVEL,
    Comparison,
    bounded_interval,
    few_seeds_warning,
    sentences,
)
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


@dataclass(frozen=True, slots=True)
class Making:
    """How a report came to be: what it shows at its end."""

    command: str
    crews: Sequence[CrewConfig]
    arms: Sequence[str]
    measure: Measure


# Study


def study_page(outcomes: Sequence[Outcome], made: Making) -> str:
    name, arms, measure = made.crews[0].crew.name, made.arms, made.measure
    over_all = report.comparisons(outcomes, arms)
    by_peer = report.comparisons_by_peer(outcomes, arms)
    parts = [
        *_opening(len({o.seed for o in outcomes}), over_all, by_peer),
        page.heading(f"How to read this: {measure}, ±, 95 % and p"),
        page.box(how_to_read(measure, len(over_all) + len(by_peer))),
        page.heading("Curves"),
        page.paragraph(
            f"Held-out {measure}, mean over kinds and seeds. Bands are 95 % intervals over seeds."
        ),
        page.charts(_study_charts(outcomes, made)),
        *_differences(over_all, "mean over peers and kinds"),
        page.heading("The crew at a glance"),
        page.table(*report.glance_cells(report.glance(outcomes, arms, measure))),
        page.heading("Every peer"),
        page.table(*report.cells(report.table(outcomes, arms, measure))),
        *_ending(made),
    ]
    return page.page(f"Study of the crew {name}", parts)


def _study_charts(outcomes: Sequence[Outcome], made: Making) -> list[str]:
    peers = list(dict.fromkeys(o.peer for o in outcomes))
    rounds = made.crews[0].crew.rounds
    own = lambda peer: [o for o in outcomes if peer in ("", o.peer)]
    titles = (
        {"": "all peers"} | {peer: peer for peer in peers}
        if len(peers) > 1
        else {peers[0]: peers[0]}
    )
    curves = {
        title: [_study_curve(own(peer), arm, made.measure, rounds) for arm in made.arms]
        for peer, title in titles.items()
    }
    return _alike(curves, made.measure)


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


def study_csv(outcomes: Sequence[Outcome], made: Making) -> str:
    """A row per arm, seed, peer and kind."""
    crew, baseline = made.crews[0].crew.name, report.baselines_of(made.arms)[0]
    before = {(o.seed, o.peer): o.end for o in outcomes if o.arm == baseline}
    rows = [
        (
            *(crew, o.arm, o.seed, o.peer, kind, made.measure),
            *(o.start.get(kind), o.end[kind], o.lowest.get(kind), o.ood.get(kind)),
            *_against(baseline, o.end[kind], before.get((o.seed, o.peer)), kind, o.arm == baseline),
        )
        for o in outcomes
        for kind in o.end
    ]
    return _csv(rows)


# Sweep


def sweep_page(trials: Sequence[Trial], made: Making) -> str:
    crews, arms, measure = [c.crew.name for c in made.crews], made.arms, made.measure
    compared = sweep_comparisons(trials, crews, arms)
    lines = sweep.table(trials, crews, arms, measure)
    parts = [
        *_opening(len({t.seed for t in trials}), compared, []),
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


def sweep_csv(trials: Sequence[Trial], made: Making) -> str:
    """A row per crew, arm, seed, learner and kind; of trials that kept no kinds, their mean."""
    first = made.crews[0].crew.name
    ends = lambda t: t.end or {"mean": sweep.last_of(t)}
    before = {(t.arm, t.seed, t.peer): ends(t) for t in trials if t.crew == first}
    rows = [
        (
            *(t.crew, t.arm, t.seed, t.peer, kind, made.measure),
            *(t.start.get(kind), end, None, None),
            *_against(first, end, before.get((t.arm, t.seed, t.peer)), kind, t.crew == first),
        )
        for t in trials
        for kind, end in ends(t).items()
    ]
    return _csv(rows)


# Both


def _opening(
    num_seeds: int, compared: Sequence[Comparison], further: Sequence[Comparison]
) -> list[str]:
    """The warning, if there is one, and what was found."""
    said = sentences([*compared, *further])
    parts = [page.warning(text)] if (text := few_seeds_warning(num_seeds)) else []
    parts += [page.heading("What was found")]
    if not compared:
        return [*parts, page.paragraph("There is one arm only: nothing to compare.")]
    parts.append(page.bullets(said[: len(compared)]))
    if further:
        parts += [page.paragraph("Peer by peer:"), page.bullets(said[len(compared) :])]
    return parts


def _differences(compared: Sequence[Comparison], words: str) -> list[str]:
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
        page.heading("Differences"),
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
        "decision back."
    )
    return [
        "p: the chance of a difference at least this large if there were none. It is of the paired "
        "t test: each seed is compared with the same seed. Below .05 counts as decided.",
        *([many] if num > 1 else []),
        "About N seeds would decide it: so many find a difference of this size and spread four "
        "times in five. It is a guess from few seeds.",
    ]


def _ending(made: Making) -> list[str]:
    return [
        page.heading("How it was made"),
        page.code(made.command),
        *(
            page.folded(f"the crew file of {config.crew.name}", config_text(config))
            for config in made.crews
        ),
        page.paragraph(f"This report was written with {page.versions()}."),
    ]


def _against(
    other: str, value: float, before: Mapping[str, float] | None, kind: str, same: bool
) -> tuple[str, float | None]:
    known = before is not None and kind in before and not same
    return (other, value - before[kind]) if known and before is not None else ("", None)


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()
