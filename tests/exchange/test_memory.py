from __future__ import annotations

from pathlib import Path

import pytest

from motley.exchange import Entry, MemoryLog, cut_log

from .contract import LogContract, LogFactory


class TestMemoryLog(LogContract):
    durable = False

    @pytest.fixture
    def make_log(self) -> LogFactory:
        log = MemoryLog()
        return lambda: log


class TestMemoryLogWithFile(LogContract):
    @pytest.fixture
    def make_log(self, tmp_path: Path) -> LogFactory:
        return lambda: MemoryLog(tmp_path / "log.bin")


RECORDS = [("a", b"first"), ("b", b""), ("cc", b"third record")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    MemoryLog(tmp_path / "log.bin").append(RECORDS)
    return tmp_path / "log.bin"


def contents(log: MemoryLog) -> list[tuple[str, bytes]]:
    return [(entry.id, entry.record) for entry in log.read(0)]


def test_positions_count_from_one_and_the_last_is_the_length(path: Path) -> None:
    log = MemoryLog(path)
    assert [entry.position for entry in log.read(0)] == [1, 2, 3]
    assert len(log) == 3


def test_a_torn_last_entry_is_cut_off_wherever_it_was_torn(path: Path) -> None:
    whole = path.read_bytes()
    last = 8 + 2 + 12
    for kept in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:kept])
        log = MemoryLog(path)
        assert contents(log) == RECORDS[:2]
        log.append(RECORDS)
        assert path.read_bytes() == whole


def test_a_log_is_cut_to_its_first_records(path: Path) -> None:
    for kept in (3, 2, 1, 0):
        cut_log(path, kept)
        log = MemoryLog(path)
        assert len(log) == kept
        assert contents(log) == RECORDS[:kept]


def test_a_record_that_was_cut_can_be_appended_again(path: Path) -> None:
    cut_log(path, 1)
    log = MemoryLog(path)
    log.append([("b", b"other")])
    assert log.read(1) == [Entry(2, "b", b"other")]


def test_cutting_a_log_shorter_than_asked_is_an_error_with_a_remedy(path: Path) -> None:
    with pytest.raises(ValueError, match="3 records"):
        cut_log(path, 4)


def test_a_log_without_a_file_is_cut_to_nothing_only(tmp_path: Path) -> None:
    cut_log(tmp_path / "none.bin", 0)
    with pytest.raises(ValueError, match="0 records"):
        cut_log(tmp_path / "none.bin", 1)
