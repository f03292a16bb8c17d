"""What `motley watch` is given, and what the page shows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.dashboard.targets import find_targets


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    return folder


def shown(*named: Path | str, runs: Path = Path("runs")) -> list[tuple[str, str]]:
    return [(one.id, one.kind) for one in find_targets([str(name) for name in named], runs=runs)]


def test_runs_of_one_name_get_ids_of_their_own(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "a" / "demo-001"), a_run(tmp_path / "b" / "demo-001")
    assert shown(first, second, first) == [("demo-001", "run"), ("demo-001-2", "run")]


def test_ids_have_no_letter_that_an_address_would_read_otherwise(tmp_path: Path) -> None:
    assert shown(a_run(tmp_path / "my run? #1%2f<b>")) == [("my-run-1-2f-b", "run")]
    assert shown(a_run(tmp_path / "../…".replace("/", ""))) == [("run", "run")]


def test_a_study_is_its_report_and_its_runs(tmp_path: Path) -> None:
    study = tmp_path / "study"
    for name in ("x-ftis-0-aa11", "x-ftis-1-bb22"):
        a_run(study / "runs" / name)
    (study / "report.html").touch()
    expected = [("study-report", "report"), ("x-ftis-0-aa11", "run"), ("x-ftis-1-bb22", "run")]
    assert shown(study) == expected


def test_a_study_that_shares_its_runs_shows_those_of_its_own(tmp_path: Path) -> None:
    for name in ("x-ftis-0-aa11", "x-ftis-1-bb22"):
        a_run(tmp_path / "runs" / name)
    (tmp_path / "plan" / "x").mkdir(parents=True)
    (tmp_path / "plan" / "report.html").touch()
    lines = '{"arm":"ftis","key":"aa11ffff"}\n{"arm":"old"}\n{"cut sh'
    (tmp_path / "plan" / "x" / "outcomes.jsonl").write_text(lines)
    assert shown(tmp_path / "plan") == [("plan-report", "report"), ("x-ftis-0-aa11", "run")]


def test_a_sweep_is_its_report(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "report.html").touch()
    assert shown(tmp_path / "sweep") == [("sweep-report", "report")]


def test_the_name_of_a_crew_is_its_newest_run(tmp_path: Path) -> None:
    for number in (1, 2):
        log = a_run(tmp_path / f"demo-00{number}") / "groups" / "log.bin"
        log.parent.mkdir()
        log.touch()
    assert shown("demo", runs=tmp_path) == [("demo-002", "run")]


def test_a_folder_that_shows_nothing_is_refused_unless_it_may_come(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(ValueError, match=f"nothing to watch at '.*{name}'; give a run folder"):
            shown(tmp_path / name)
        assert [one.id for one in find_targets([str(tmp_path / name)], may_come=True)] == [name]
