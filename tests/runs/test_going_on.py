"""What a run notes of its changes, when a crash or a full disk has spoilt the notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import spread_crew
from motley.config import CrewConfig, write_config
from motley.runs.resuming import CHANGES, go_on_with, read_changes


@pytest.fixture
def crews(folder: Path) -> list[CrewConfig]:
    """The same crew as it began, and longer and longer."""
    made = [spread_crew(folder, rounds=rounds) for rounds in (2, 3, 4)]
    write_config(made[0], folder / "config.toml")
    return made


def test_a_note_that_a_full_disk_cut_short_is_written_anew(
    crews: list[CrewConfig], folder: Path
) -> None:
    began, longer, longest = crews
    go_on_with(folder, began, longer, 2)
    whole = (folder / CHANGES).read_bytes()
    go_on_with(folder, began, longest, 3)
    (folder / CHANGES).write_bytes(whole + (folder / CHANGES).read_bytes()[len(whole) :][:20])
    go_on_with(folder, began, longest, 3)
    noted = [(one.after_round, one.before, one.after) for one in read_changes(folder)]
    assert noted == [(2, 2, 3), (3, 3, 4)]


def test_a_note_that_cannot_be_read_is_named_with_the_remedy(
    crews: list[CrewConfig], folder: Path
) -> None:
    began, longer, _ = crews
    (folder / CHANGES).write_bytes(b"\x00\x00\n")
    with pytest.raises(ValueError, match=r"changes\.jsonl, line 1 cannot be read .*delete that"):
        go_on_with(folder, began, longer, 2)
