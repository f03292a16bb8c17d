from __future__ import annotations

from pathlib import Path

import pytest

from motley.exchange import MemoryLog, cut_log

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


RECORDS = {"a": b"first", "b": b"", "cc": b"third record"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = MemoryLog(tmp_path / "log.bin")
    for id, record in RECORDS.items():
        log.append(id, record)
    return tmp_path / "log.bin"


def test_a_torn_last_entry_is_cut_off_wherever_it_was_torn(path: Path) -> None:
    whole = path.read_bytes()
    last = 8 + 2 + 12
    for kept in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:kept])
        log = MemoryLog(path)
        assert [record for _, record in log.read(0)] == [b"first", b""]
        log.append("cc", RECORDS["cc"])
        assert path.read_bytes() == whole


def test_a_log_is_cut_to_its_first_records(path: Path) -> None:
    for kept in (3, 2, 1, 0):
        cut_log(path, kept)
        log = MemoryLog(path)
        assert len(log) == kept
        assert [record for _, record in log.read(0)] == list(RECORDS.values())[:kept]


def test_a_record_that_was_cut_can_be_appended_again(path: Path) -> None:
    cut_log(path, 1)
    log = MemoryLog(path)
    log.append("b", b"other")
    assert log.read(1) == [(2, b"other")]


def test_cutting_a_log_shorter_than_asked_is_an_error_with_a_remedy(path: Path) -> None:
    with pytest.raises(ValueError, match="3 records"):
        cut_log(path, 4)
