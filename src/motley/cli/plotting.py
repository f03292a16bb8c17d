"""motley plot: curves of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli.common import app, plain_errors, say


@app.command("plot")
def plot_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders: finished, stopped, simulated or joined.")
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "A .png, .html, .svg or .pdf; may be given again. Else plot.png and plot.html, in "
                "the run's folder, or here if there are several."
            )
        ),
    ] = None,
    keys: Annotated[
        str,
        typer.Option(
            help=(
                "Keys of metrics.jsonl separated by commas, such as reward,heldout/*,"
                "senders/*/kl_k3."
            )
        ),
    ] = "",
    smooth: Annotated[int, typer.Option(min=1, help="Draw means over N points.")] = 1,
) -> None:
    """Draw the curves of runs: a panel per key, a curve per peer."""
    with plain_errors():
        from motley.reports.plots import choose, plot, read_run, save_plot

        names = _names(runs)
        read = [read_run(folder, name) for folder, name in zip(runs, names, strict=True)]
        chosen = choose(read, [key.strip() for key in keys.split(",") if key.strip()])
        figure = plot(read, chosen.keys, smooth)
        place = runs[0] if len(runs) == 1 else Path()
        for path in out or [place / "plot.png", place / "plot.html"]:
            save_plot(figure, ", ".join(names), path)
            say(f"plot: {path}")
        for words in chosen.missing:
            say(f"not drawn: {words}")


def _names(runs: list[Path]) -> list[str]:
    """What the runs are called: the end of their paths that tells them apart."""
    paths = [run.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise ValueError("the same run is named twice; name it once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]
