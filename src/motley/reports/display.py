"""What a person sees while a crew trains and after: the live table, the skill matrix, the curves.

Reads metrics lines only.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from motley.clock import Clock, RealClock
from motley.config import CrewConfig
from motley.reports.scores import score_text
from motley.runs.metrics import LearnerLine, mean, measure_of
from motley.tasks import Measure

Skills = dict[str, dict[str, float]]  # peer -> kind -> held-out accuracy or reward


@dataclass(slots=True)
class LiveTable:
    """Shows the newest line of every peer.

    `seen` keeps the newest accuracies, which not every line has.
    """

    config: CrewConfig
    first_round: int = 0
    clock: Clock = RealClock()
    lines: dict[str, LearnerLine] = field(default_factory=dict)
    seen: Skills = field(default_factory=dict)
    measure: Measure = "accuracy"
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock.elapsed_s()

    def update(self, lines: Sequence[LearnerLine]) -> None:
        if measure_of(lines) == "reward":
            self.measure = "reward"
        for line in lines:
            self.lines[line.peer] = line
            if line.heldout:
                self.seen[line.peer] = line.heldout

    def time_left(self) -> str:
        done = max((line.round for line in self.lines.values()), default=0)
        if done <= self.first_round:
            return "?"
        per_round_s = (self.clock.elapsed_s() - self.started_s) / (done - self.first_round)
        return duration(per_round_s * (self.config.crew.rounds - done))

    def __rich__(self) -> Table:
        crew = self.config.crew
        done = max((line.round for line in self.lines.values()), default=0)
        table = Table(
            title=(
                f"{crew.name}: {crew.row}, round {done} of {crew.rounds}, {self.time_left()} left"
            )
        )
        for column in (
            "peer",
            "round",
            "reward",
            f"held-out {self.measure}",
            "groups taken (refused)",
            "filtered",
            "ess",
            "tokens/s sample, learn",
        ):
            table.add_column(column)
        for peer in self.config.students:
            table.add_row(peer.name, *self._cells(peer.name))
        return table

    def _cells(self, peer: str) -> list[str]:
        line = self.lines.get(peer)
        if line is None:
            return [""] * 7
        senders = line.senders or {}
        refused = {
            sender: sum(reasons.values()) for sender, reasons in (line.refused or {}).items()
        }
        accuracy = " ".join(
            f"{kind} {score_text(value, self.measure)}"
            for kind, value in self.seen.get(peer, {}).items()
        )
        taken = {name: str(s.groups) for name, s in senders.items()} | {
            name: "0" for name in refused if name not in senders
        }
        groups = " ".join(
            f"{name} {number}" + (f" ({refused[name]})" if name in refused else "")
            for name, number in taken.items()
        )
        filtered = " ".join(
            f"{name} {share:.0%}"
            for name, s in senders.items()
            if (share := s.number("filtered_negative")) is not None
        )
        ess = " ".join(
            f"{name} {size:.2f}"
            for name, s in senders.items()
            if (size := s.number("ess")) is not None
        )
        took = line.timing
        speed = (
            f"{took.sampled_tokens_per_s or 0:,.0f}, {took.learned_tokens_per_s or 0:,.0f}"
            if took
            else ""
        )
        reward = "" if line.reward is None else score_text(line.reward, "reward")
        return [str(line.round), reward, accuracy, groups, filtered, ess, speed]


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def skills_at(lines: Sequence[LearnerLine], last: bool) -> Skills:
    """Every peer's first or last measured held-out scores."""
    skills: Skills = {}
    for line in lines:
        if line.heldout and (last or line.peer not in skills):
            skills[line.peer] = line.heldout
    return skills


def skill_matrix(before: Skills, after: Skills, alone: Skills, measure: Measure) -> Table:
    """peer x kind, before -> after, beside what each reaches alone with all the crew's sampling."""
    kinds = list(next(iter(after.values())))
    table = Table(title=f"held-out {measure}: before → after" + (" (alone)" if alone else ""))
    for column in ("peer", *kinds, "mean over kinds"):
        table.add_column(column)
    for peer in after:
        columns = [(before[peer][k], after[peer][k], alone.get(peer, {}).get(k)) for k in kinds]
        columns.append(
            (mean(before[peer]), mean(after[peer]), mean(alone[peer]) if peer in alone else None)
        )
        table.add_row(
            peer,
            *(
                f"{score_text(b, measure)} → {score_text(a, measure)}"
                + (f" ({score_text(c, measure)})" if c is not None else "")
                for b, a, c in columns
            ),
        )
    return table


def draw_curves(lines: Sequence[LearnerLine], alone: Skills, folder: Path) -> list[Path]:
    """Write curves.png and a self-contained curves.html into a run folder."""
    measure = measure_of(lines)
    figure = _figure(lines, alone, measure)
    png, page = folder / "curves.png", folder / "curves.html"
    figure.savefig(png, dpi=120)
    page.write_text(
        _page(
            folder.name,
            svg_of(figure),
            skills_at(lines, last=False),
            skills_at(lines, last=True),
            alone,
            measure,
        ),
        encoding="utf-8",
    )
    return [png, page]


def svg_of(figure: Figure) -> str:
    """A figure as an element of an HTML page."""
    image = io.StringIO()
    figure.savefig(image, format="svg")
    svg = image.getvalue()
    return svg[svg.index("<svg") :]


def _figure(lines: Sequence[LearnerLine], alone: Skills, measure: Measure) -> Figure:
    peers = list(dict.fromkeys(line.peer for line in lines))
    figure = Figure(figsize=(4.2 * len(peers), 3.6), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, len(peers), sharey=True, squeeze=False)[0])
    for axis, peer in zip(axes, peers, strict=True):
        measured = {
            line.round: line.heldout for line in lines if line.peer == peer and line.heldout
        }
        rounds, accuracies = list(measured), list(measured.values())
        for kind in accuracies[0]:
            axis.plot(rounds, [by_kind[kind] for by_kind in accuracies], linewidth=1, label=kind)
        axis.plot(
            rounds,
            [mean(by_kind) for by_kind in accuracies],
            color="black",
            linewidth=2,
            label="mean over kinds",
        )
        if peer in alone:
            axis.axhline(
                mean(alone[peer]), color="black", linestyle=":", label="alone, mean at the end"
            )
        axis.set(title=peer, xlabel="round")
    axes[0].set_ylabel(f"held-out {measure}")
    if measure == "accuracy":  # the y axis is shared
        show_shares(axes[0])
    axes[-1].legend(fontsize="small", loc="best")
    return figure


def show_shares(axis: Axes) -> None:
    """Have a y axis run from 0 to 100 %."""
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _page(
    title: str, svg: str, before: Skills, after: Skills, alone: Skills, measure: Measure
) -> str:
    kinds, words = list(next(iter(after.values()))), partial(score_text, measure=measure)
    head = "".join(
        f"<th>{html.escape(c)}</th>" for c in ("peer", *kinds, "mean over kinds", "alone, mean")
    )
    rows = "".join(
        f"<tr><td>{html.escape(peer)}</td>"
        + "".join(f"<td>{words(before[peer][k])} → {words(after[peer][k])}</td>" for k in kinds)
        + f"<td>{words(mean(before[peer]))} → {words(mean(after[peer]))}</td>"
        + f"<td>{words(mean(alone[peer])) if peer in alone else ''}</td></tr>"
        for peer in after
    )
    table = f"<h2>held-out {measure}</h2><table><tr>{head}</tr>{rows}</table>"
    return html_page(title, svg + table)


def html_page(title: str, body: str) -> str:
    """A page that needs no other file. `body` is HTML, the title is text."""
    cells = "td,th{padding:.3em .9em;text-align:left;border-bottom:1px solid #ccc}"
    style = f"body{{font:15px system-ui;margin:2em}}{cells}svg{{max-width:100%;height:auto}}"
    name = html.escape(title)
    return (
        f"<!doctype html><meta charset='utf-8'><title>{name}</title><style>{style}</style>"
        f"<h1>{name}</h1>{body}\n"
    )
