"""Curves of any run: the rows, which keys are drawn, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.learning.senders import SenderMetrics
from motley.reports.plots import choose, plot, read_run, smoothed
from motley.runs.curves import CurvePoint, curves, run_lines
from motley.runs.metrics import LearnerLine, SamplerLine, append_lines

SENDER = SenderMetrics(
    groups=1, reward=0.5, accuracy=0.0, tokens=3.0, truncated=1.0, age=0.0, silent_groups=1
)


def write(folder: Path, *lines: LearnerLine | SamplerLine) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    append_lines(folder / "metrics.jsonl", lines)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A learner's run of three rounds, stopped in the middle of a line."""
    lines = [LearnerLine(round=0, peer="a", heldout={"sort": 0.25, "sum": 0.75})]
    lines += [
        LearnerLine(round=n, peer="a", reward=n / 10, senders={"a": SENDER}) for n in (1, 2, 3)
    ]
    folder = write(tmp_path / "run", *lines)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round":4,"peer":"a","rew')
    return folder


def test_curves_are_rows_of_round_peer_key_and_value(run: Path) -> None:
    rows = curves(run)
    assert rows[:3] == [
        CurvePoint(0, "a", "heldout/sort", 0.25),
        CurvePoint(0, "a", "heldout/sum", 0.75),
        CurvePoint(0, "a", "heldout", 0.5),
    ]
    assert [row for row in rows if row.key == "reward"] == [
        CurvePoint(n, "a", "reward", n / 10) for n in (1, 2, 3)
    ]
    assert CurvePoint(3, "a", "senders/a/tokens", 3.0) in rows


def test_peers_of_several_processes_are_read_from_their_own_folders(tmp_path: Path) -> None:
    crew = write(tmp_path / "crew", LearnerLine(round=0, peer="l"))  # what was put together
    write(crew / "peers" / "l", *(LearnerLine(round=n, peer="l", reward=0.5) for n in (0, 1)))
    write(
        crew / "peers" / "s",
        SamplerLine(round=1, peer="s", version=0, reward=0.1, sampled_tokens=9),
    )
    assert [(line.round, line.peer) for line in run_lines(crew)] == [(0, "l"), (1, "l"), (1, "s")]


def test_patterns_choose_keys_and_what_a_run_lacks_is_named(run: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", LearnerLine(round=1, peer="b", loss=0.1))
    runs = [read_run(run), read_run(other)]
    chosen = choose(runs, ["reward", "senders/*/tokens"])
    assert chosen.keys == ["reward", "senders/a/tokens"]
    assert chosen.missing == ["other has no reward", "other has no senders/*/tokens"]
    assert choose(runs, []).keys == ["heldout", "reward"]
    with pytest.raises(ValueError, match=r"no run has nothing; there are .*reward"):
        choose(runs, ["nothing"])


def test_an_axis_is_in_per_cent_only_where_every_run_has_accuracies(
    run: Path, tmp_path: Path
) -> None:
    rewards = write(
        tmp_path / "wild", LearnerLine(round=1, peer="b", reward=-4e3, heldout={"x": -5e3})
    )
    share, mixed = read_run(run), [read_run(run), read_run(rewards)]
    assert plot([share], ["heldout", "reward"]).axes[1].get_ylim() == (0, 1.02)
    low, _ = plot(mixed, ["heldout", "reward"]).axes[0].get_ylim()
    assert low < -5e3


def test_smoothing_takes_the_mean_of_what_came_before() -> None:
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smoothed([1.0, 3.0], 1) == [1.0, 3.0]
    assert smoothed([], 5) == []


def motley(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


@pytest.mark.slow
def test_plot_draws_one_run_and_several(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "plot.png" in motley("plot", run)
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (run / "plot.html").read_text()
    monkeypatch.chdir(tmp_path)
    twin = write(tmp_path / "more" / "run", LearnerLine(round=1, peer="a", reward=0.5))
    out = motley("plot", run, twin, "--keys", "reward,heldout", "--smooth", 2, "--out", "both.html")
    assert "more/run has no heldout" in out
    assert (tmp_path / "both.html").read_text().count("more/run: a") >= 1


def test_mistakes_of_a_plot_are_one_line(run: Path, tmp_path: Path) -> None:
    assert "give the folder of a run" in motley("plot", tmp_path / "none", code=2)
    assert "expected .png, .html" in motley("plot", run, "--out", tmp_path / "x.jpeg", code=2)
    assert "the same run is named twice" in motley("plot", run, run, code=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert "has no line yet" in motley("plot", empty, code=2)
