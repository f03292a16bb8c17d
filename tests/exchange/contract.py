"""What every log must do. A backend's tests derive from `LogContract` and say how to make and to reopen one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from motley.exchange import Log

LogFactory = Callable[[], Log]


class LogContract:
    """`make_log` is a fixture: a function that opens the same log each time it is called. `durable`: it survives its reopening."""

    durable = True

    @pytest.fixture
    def make_log(self) -> LogFactory:
        raise NotImplementedError

    def test_an_empty_log_has_nothing_to_read(self, make_log: LogFactory) -> None:
        assert make_log().read(0) == []

    def test_records_come_back_in_the_order_of_appending(self, make_log: LogFactory) -> None:
        log = make_log()
        for number in range(20):
            log.append(f"id{number}", f"record {number}".encode())
        records = log.read(0)
        assert [record for _, record in records] == [f"record {number}".encode() for number in range(20)]
        positions = [position for position, _ in records]
        assert positions[0] > 0
        assert positions == sorted(set(positions))

    def test_the_same_id_again_changes_nothing(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append("a", b"first")
        log.append("b", b"second")
        log.append("a", b"first")
        log.append("a", b"something else")
        assert [record for _, record in log.read(0)] == [b"first", b"second"]

    def test_equal_records_under_different_ids_are_two(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append("a", b"same")
        log.append("b", b"same")
        assert [record for _, record in log.read(0)] == [b"same", b"same"]

    def test_reading_starts_behind_any_position(self, make_log: LogFactory) -> None:
        log = make_log()
        for number in range(10):
            log.append(str(number), bytes([number]))
        everything = log.read(0)
        for index, (position, _) in enumerate(everything):
            assert log.read(position) == everything[index + 1 :]

    def test_a_limit_gives_the_oldest_and_paging_gives_them_all(self, make_log: LogFactory) -> None:
        log = make_log()
        for number in range(10):
            log.append(str(number), bytes([number]))
        found, cursor = [], 0
        while page := log.read(cursor, limit=3):
            assert len(page) <= 3
            found += page
            cursor = page[-1][0]
        assert found == log.read(0)

    def test_what_comes_later_is_behind_what_was_read(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append("a", b"1")
        cursor = log.read(0)[-1][0]
        assert log.read(cursor) == []
        log.append("b", b"2")
        assert [record for _, record in log.read(cursor)] == [b"2"]

    def test_any_bytes_and_any_id_are_kept_as_they_are(self, make_log: LogFactory) -> None:
        log = make_log()
        content = {"empty": b"", "zeros": bytes(9), "all": bytes(range(256)), "größe.0.1": b"id"}
        for id, record in content.items():
            log.append(id, record)
        assert [record for _, record in log.read(0)] == list(content.values())

    def test_a_reopened_log_has_the_same_records_positions_and_ids(self, make_log: LogFactory) -> None:
        if not self.durable:
            pytest.skip("this log does not outlive its process")
        log = make_log()
        for number in range(5):
            log.append(f"größe{number}", bytes([number]))
        again = make_log()
        assert again.read(0) == log.read(0)
        again.append("größe3", b"other")
        assert again.read(0) == log.read(0)
        again.append("new", b"x")
        assert [record for _, record in make_log().read(0)][-2:] == [b"\x04", b"x"]
