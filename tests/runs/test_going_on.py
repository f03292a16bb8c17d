"""How a run goes on when a crash or a full disk has spoilt what it wrote beside its checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from fakes import spread_crew
from motley.config import CrewConfig, write_config
from motley.models.policy import Policy
from motley.runs.local import LocalCrew
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


def test_a_log_that_is_spoilt_does_not_cost_the_checkpoints(folder: Path) -> None:
    crew = LocalCrew.start(
        spread_crew(folder, ("full",), rounds=2, learning="checkpoint_every = 1"), folder / "run"
    )
    log = folder / "run" / "groups" / "log.bin"
    first, second = (log.stat().st_size for _ in crew.rounds())
    whole = log.read_bytes()

    def words_for(content: bytes) -> str:
        log.write_bytes(content)
        with pytest.raises(ValueError, match=r"log\.bin has \d+ records that are whole") as error:
            LocalCrew.resume(folder / "run")
        assert log.read_bytes() == content
        return str(error.value)

    older = "put the log back from a copy, or delete .*round-000002 to go on from round-000001$"
    assert re.search(older, words_for(whole[: second - 1]))
    # the id of the first record of the second round
    spoilt = whole[: first + 8] + b"\xff" + whole[first + 9 :]
    assert re.search(older, words_for(spoilt))
    assert "Without one the run cannot go on, but its checkpoints" in words_for(whole[: first - 1])
    log.write_bytes(spoilt)
    shutil.rmtree(folder / "run" / "checkpoints" / "round-000002")
    assert LocalCrew.resume(folder / "run").finished_rounds == 1
    assert log.stat().st_size == first


def test_a_disk_that_is_full_before_the_first_round_is_said_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(policy: Policy, folder: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    config = spread_crew(folder, ("full",), rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "save", full)
        with pytest.raises(
            OSError, match=r"full0 could not be written: .*No space left.*Make room"
        ):
            LocalCrew.start(config, folder / "run")
    assert LocalCrew.start(config, folder / "run").finished_rounds == 0
