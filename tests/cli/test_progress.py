from __future__ import annotations

import io

import pytest
from rich.console import Console

from motley.cli import progress
from motley.cli.progress import counted_runs


def test_the_time_left_is_told_of_runs_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, text = [0.0], io.StringIO()
    shown = Console(file=text, force_terminal=True, width=120, get_time=lambda: now_s[0])
    monkeypatch.setattr(progress, "stderr", lambda: shown)
    with counted_runs() as count:
        count(2, 12)  # made before
        for done in (3, 4):
            now_s[0] += 600
            count(done, 12)
    assert "1:20:00" in text.getvalue()
