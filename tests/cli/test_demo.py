"""`motley demo` shows what each peer reaches alone, where that was measured for its crew."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from motley.cli import app, training


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ([], True),
        (["--objective", "ftis"], True),  # alone is not learned from others
        (["--seed", "2"], False),
        (["--rounds", "3"], False),
        (["--alone"], False),  # then it is run
    ],
)
def test_what_was_reached_alone_is_shown_beside_the_same_crew_by_any_objective(
    changes: list[str], shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(
        training, "_train", lambda start, folder, alone, known: recorded.append(known)
    )
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run"), *changes])
    assert result.exit_code == 0, result.output
    assert [known is not None for known in recorded] == [shown]
