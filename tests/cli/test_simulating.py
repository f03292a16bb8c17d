from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from motley.cli import app
from motley.reports.display import duration
from motley.runs.metrics import read_metrics
from sim.crews import crew_text


@pytest.fixture
def crew_file(folder: Path) -> Path:
    (folder / "crew.toml").write_text(
        crew_text(folder, rounds=2, network="delay = 0.05", learning="max_age = 99")
    )
    return folder / "crew.toml"


def motley(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.mark.slow
def test_sim_prints_a_table_and_where_the_run_is(crew_file: Path) -> None:
    out = crew_file.parent / "run"
    shown = motley("sim", crew_file, "--out", out, "--rounds", 1).stdout
    assert "far: ftis, 0 s simulated" in shown
    for name in ("l", "s0", "s1"):
        assert any(line.split()[:2] == ["│", name] for line in shown.splitlines())
    assert shown.replace("\n", "").endswith(f"run folder: {out}")
    assert max(line.round for line in read_metrics(out) if line.peer == "l") == 1


@pytest.mark.slow
def test_with_json_sim_prints_one_object_and_nothing_else(crew_file: Path) -> None:
    out = crew_file.parent / "run"
    result = motley("sim", crew_file, "--out", out, "--seed", 3, "--objective", "gepo", "--json")
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["title"].startswith("far: gepo, ")
    assert [row["peer"] for row in found["rows"]] == ["l", "s0", "s1"]
    learner = found["rows"][0]
    assert (learner["rounds"], learner["groups"], learner["behind"]) == (2, 8, None)
    assert learner["hours"] * 3600 == read_metrics(out)[-1].time_s > 0.2
    assert "seed = 3" in (out / "config.toml").read_text()


@pytest.mark.slow
def test_what_is_wrong_is_one_line(crew_file: Path) -> None:
    text = crew_file.read_text()
    crew_file.write_text(text.replace("delay = 0.05", "dealy = 0.05"))
    result = motley("sim", crew_file, code=2)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "did you mean delay?" in result.stderr
    crew_file.write_text(
        text.replace('follows = "l"\n', 'follows = "l"\nchurn = { leave_s = 0.01 }\n')
    )
    result = motley("sim", crew_file, "--out", crew_file.parent / "left", code=2)
    assert "nothing more can happen after 0 s" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_simulated_run_is_not_resumed_and_that_is_said(crew_file: Path) -> None:
    out = crew_file.parent / "run"
    motley("sim", crew_file, "--out", out, "--rounds", 1)
    result = motley("train", "--resume", out, code=2)
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.6, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_simulated_time_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.slow
def test_a_simulation_reports_too(crew_file: Path) -> None:
    crew_file.write_text(
        crew_file.read_text().replace("[crew]", '[crew]\nreport = ["tensorboard"]', 1)
    )
    motley("sim", crew_file, "--out", crew_file.parent / "run")
    assert list((crew_file.parent / "run" / "tensorboard").rglob("events.out.*"))
