"""Plots of any run's numbers, one panel per key, several runs in one picture. Reads curves only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from motley.files import whole
from motley.reports.display import html_page, show_shares, svg_of
from motley.runs.curves import CurvePoint, numbers_of, run_lines
from motley.runs.metrics import measure_of
from motley.tasks import Measure

DEFAULT_KEYS = ("heldout", "ood", "reward", "grad_norm")
MOST_PANELS = 24
MOST_IN_A_LEGEND = 12
SUFFIXES = (".png", ".html", ".svg", ".pdf")
# what is a share where answers are right or wrong
SHARES = ("heldout", "heldout/*", "ood", "ood/*", "reward", "senders/*/reward")


@dataclass(frozen=True, slots=True)
class PlottedRun:
    name: str
    measure: Measure
    series: dict[tuple[str, str], list[CurvePoint]]  # of a peer and a key

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for _, key in self.series))

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(peer for peer, _ in self.series))


def read_run(folder: Path, name: str = "") -> PlottedRun:
    lines = run_lines(folder)
    if not lines:
        raise ValueError(
            f"{folder / 'metrics.jsonl'} has no line yet; wait for the first round to end"
        )
    series: dict[tuple[str, str], list[CurvePoint]] = {}
    for line in lines:
        for key, value in numbers_of(line):
            point = CurvePoint(line.round, line.peer, key, value)
            series.setdefault((line.peer, key), []).append(point)
    return PlottedRun(name or folder.resolve().name, measure_of(lines), series)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The keys that are drawn, and which of those asked for a run does not have."""

    keys: list[str]
    missing: list[str]  # in words


def choose(runs: Sequence[PlottedRun], asked: Sequence[str]) -> Chosen:
    """Find the keys that patterns mean, such as "senders/*/ess"; by default those that most ask
    for.
    """
    there = list(dict.fromkeys(key for run in runs for key in run.keys))
    matching = lambda pattern, keys: [key for key in keys if fnmatchcase(key, pattern)]
    keys = [key for pattern in asked or DEFAULT_KEYS for key in matching(pattern, there)]
    missing = [
        f"{run.name} has no {pattern}"
        for run in runs
        for pattern in asked
        if not matching(pattern, run.keys)
    ]
    if asked and not keys:
        plain = [key for key in there if "/" not in key]
        raise ValueError(
            f"no run has {', '.join(asked)}; there are {', '.join(plain)}, and with a path such as "
            f"{next((key for key in there if '/' in key), 'senders/*/ess')}"
        )
    keys = list(dict.fromkeys(keys))
    if len(keys) > MOST_PANELS:
        missing.append(f"only the first {MOST_PANELS} of {len(keys)} keys are drawn")
    return Chosen(keys[:MOST_PANELS], missing)


def plot(runs: Sequence[PlottedRun], keys: Sequence[str], smooth: int = 1) -> Figure:
    """A panel per key, a curve per run and peer. `smooth`: means over so many points."""
    columns = min(3, len(keys))
    rows = math.ceil(len(keys) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    colours = _colours(runs)
    for axis, key in zip(axes, keys, strict=False):
        for run in runs:
            _draw(axis, run, key, colours, smooth, alone=len(runs) == 1)
        axis.set(title=key, xlabel="round")
        if all(run.measure == "accuracy" for run in runs) and _is_share(key):
            show_shares(axis)
    for axis in axes[len(keys) :]:
        axis.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    if 0 < len(labels) <= MOST_IN_A_LEGEND:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _is_share(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in SHARES)


def _colours(runs: Sequence[PlottedRun]) -> dict[tuple[str, str], str]:
    """One for each peer of each run."""
    lines = [(run.name, peer) for run in runs for peer in run.peers]
    return {line: f"C{number % 10}" for number, line in enumerate(lines)}


def _draw(
    axis: Axes,
    run: PlottedRun,
    key: str,
    colours: dict[tuple[str, str], str],
    smooth: int,
    alone: bool,
) -> None:
    for peer in run.peers:
        own = [point for point in run.series.get((peer, key), []) if math.isfinite(point.value)]
        values = smoothed([point.value for point in own], smooth)
        # every peer has a place in the legend, whether or not it has this key
        axis.plot(
            [point.round for point in own],
            values,
            color=colours[run.name, peer],
            label=peer if alone else f"{run.name}: {peer}",
            marker="." if len(own) < 30 else None,
            linewidth=1.2,
        )


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those before it, `width` of them at most."""
    return [
        sum(part) / len(part)
        for end in range(1, len(values) + 1)
        if (part := values[max(0, end - width) : end])
    ]


def save_plot(figure: Figure, title: str, path: Path) -> None:
    """As a picture, or as a page that needs no other file; there only when it is whole."""
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"cannot draw to {path}: the name ends in {path.suffix or 'nothing'}; expected "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    with whole(path) as partial:
        if path.suffix == ".html":
            partial.write_text(html_page(title, svg_of(figure)), encoding="utf-8")
        else:
            figure.savefig(partial, dpi=120)
