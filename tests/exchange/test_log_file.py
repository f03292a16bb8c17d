"""The file of a log as it is read beside the run that writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.exchange import LogFile, MemoryLog, cut_log, log_file

RECORDS = [(f"a.{n}.0", bytes([n]) * (n * 7 % 50)) for n in range(40)]


def written(path: Path, records: list[tuple[str, bytes]] = RECORDS) -> MemoryLog:
    log = MemoryLog(path)
    log.append(records)
    return log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.bin"


@pytest.mark.slow
@given(
    after=st.integers(0, 45), limit=st.integers(1, 45), block=st.sampled_from([8, 40, 97, 2**20])
)
def test_a_file_reads_as_its_log_does_whatever_is_read_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, after: int, limit: int, block: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.bin"
    log = written(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_file, "BLOCK_BYTES", max(block, 40))
        patch.setattr(log_file, "STEP", 3)
        file = LogFile(path)
        entries = log.read(after, limit)
        assert file.read(after, limit) == entries
        expected = [(entry.position, entry.id, len(entry.record)) for entry in entries]
        assert file.heads(after, limit) == expected
        assert LogFile(path).heads(after, limit) == expected  # of a file that nobody walked over
        assert file.last() == 40


def test_what_is_appended_is_found(path: Path) -> None:
    log = written(path, RECORDS[:3])
    file = LogFile(path, kept="a")
    assert file.last() == 3
    assert not file.has_changed()
    log.append(RECORDS[3:5])
    assert file.has_changed()
    assert [head.id for head in file.heads(3)] == ["a.3.0", "a.4.0"]
    assert (file.cuts, file.kept) == (0, [1, 2, 3, 4, 5])


def test_a_torn_entry_does_not_count_until_it_is_whole(path: Path) -> None:
    written(path, RECORDS[:5])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    file = LogFile(path)
    assert file.last() == 4
    with path.open("ab") as writing:
        writing.write(whole[-1:])
    assert file.last() == 5
    assert file.cuts == 0


@pytest.mark.parametrize("appended", [0, 1, 5, 30])
def test_a_file_that_was_cut_and_written_on_is_begun_anew(path: Path, appended: int) -> None:
    written(path, RECORDS[:20])
    file = LogFile(path, kept="b")
    assert file.last() == 20
    cut_log(path, 12)
    log = written(path, [(f"b.{n}.0", bytes([200 + n]) * 9) for n in range(appended)])
    assert file.last() == 12 + appended
    assert file.cuts == 1
    assert file.read(0, 99) == log.read(0)
    assert file.kept == [*range(13, 13 + appended)]


def test_the_same_records_in_the_same_place_are_no_cut(path: Path) -> None:
    written(path, RECORDS[:20])
    file = LogFile(path)
    assert file.last() == 20
    cut_log(path, 12)
    written(path, RECORDS[12:25])
    assert (file.last(), file.cuts) == (25, 0)


def test_no_record_is_held(path: Path) -> None:
    written(path, [(f"a.{n}.0", bytes(10**5)) for n in range(100)])
    file = LogFile(path)
    assert file.last() == 100
    held = sum(len(one) for one in vars(file).values() if isinstance(one, bytes | bytearray))
    assert held < 100
    assert len(file._starts) == 100
