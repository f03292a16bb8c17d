from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hubs import PATIENCE_S
from motley.clock import Deadline, RealClock
from motley.exchange import Entry, LogError
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import NatsLog, create_stream
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Presence
from motley.exchange.nats.stream import HEADERS_BYTES, MAX_FETCH_BYTES
from motley.exchange.wire import MAX_RECORD_BYTES
from motley.records import HUB

from ..contract import LogContract, LogFactory
from ..nats_server import (
    CREW,
    Net,
    eventually,
    in_time,
    open_server,
    raw_message,
    read_all,
    send_raw,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """One server for tests that leave it as it is, each with a crew and so a stream of its own."""
    made = Net(tmp_path_factory.mktemp("shared") / "server")
    try:
        yield made.start()
    finally:
        made.close()


class TestNatsLog(LogContract):
    """As the hub, which may write under any id.

    Every log has a connection of its own to the same stream.
    """

    @pytest.fixture
    def make_log(self, shared: Net, request: pytest.FixtureRequest) -> LogFactory:
        crew = "crew-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:16]
        create_stream(shared.connections[0], crew)
        return lambda: NatsLog(shared.connect(HUB), crew)


def records(sender: str, numbers: range, size: int = 8) -> list[tuple[str, bytes]]:
    return [
        (f"{sender}.0.{number}", f"{sender} {number} ".encode().ljust(size, b"."))
        for number in numbers
    ]


def contents(entries: list[Entry]) -> list[tuple[str, bytes]]:
    return [(entry.id, entry.record) for entry in entries]


def stored_bytes(net: Net) -> int:
    """What the server has written of its streams so far."""
    return sum(file.stat().st_size for file in net.server.folder.rglob("*.blk"))


def append_until_confirmed(log: NatsLog, batch: list[tuple[str, bytes]]) -> None:
    """As a courier does: a busy machine may leave some records without an answer."""
    for _ in range(10):
        try:
            return log.append(batch)
        except LogError:
            continue
    raise AssertionError("not confirmed after 10 attempts")


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# A server that dies


def test_what_was_confirmed_survives_kill_9_at_the_same_positions(net: Net) -> None:
    log, reader = net.log("a"), net.log("b")
    log.append(records("a", range(50)))
    before = reader.read(0)
    for start in (50, 60):
        net.kill()
        net.restart()
        log.append(records("a", range(start, start + 10)))
        assert reader.read(0)[: len(before)] == before
        before = reader.read(0)
    assert contents(before) == records("a", range(70))
    assert [entry.position for entry in before] == list(range(1, 71))


@pytest.mark.slow
def test_a_batch_in_flight_when_the_server_is_killed_is_completed_exactly_once_by_sending_it_again(
    net: Net,
) -> None:
    log, reader = net.log("a"), net.log("b")
    batch = records("a", range(1500), size=1000)
    failed: list[LogError] = []

    def append() -> None:
        try:
            log.append(batch)
        except LogError as error:
            failed.append(error)

    sending = in_background(append)
    eventually(lambda: stored_bytes(net) > 20_000)
    net.kill()
    sending.join(PATIENCE_S)
    assert net.url in str(failed[0])
    net.restart()
    there = read_all(reader)
    assert len(there) > 0
    assert contents(there) == batch[: len(there)]
    append_until_confirmed(log, batch)
    append_until_confirmed(log, batch)
    assert contents(read_all(reader)) == batch
    assert read_all(reader)[: len(there)] == there


@pytest.mark.slow
def test_a_reader_goes_on_where_it_was_when_the_server_comes_back(net: Net) -> None:
    log, reader = net.log("a"), net.log("b")
    log.append(records("a", range(400), size=1000))
    found: list[Entry] = []
    failures: list[str] = []

    def read() -> None:
        deadline = Deadline(RealClock(), PATIENCE_S)
        while len(found) < 450 and not deadline.passed:
            try:
                found.extend(reader.read(found[-1].position if found else 0, limit=3))
            except LogError as error:
                failures.append(str(error))
                RealClock().sleep_s(0.01)

    reading = in_background(read)
    eventually(lambda: len(found) > 50)
    net.kill()
    eventually(lambda: failures)
    net.restart()
    log.append(records("a", range(400, 450), size=1000))
    reading.join(PATIENCE_S)
    assert contents(found) == records("a", range(450), size=1000), failures[-5:]
    assert [entry.position for entry in found] == list(range(1, 451))
    # the latter while it is being noticed
    assert all(net.url in failure or failure == "not connected" for failure in failures)


@pytest.mark.slow
def test_without_a_connection_calls_fail_at_once_and_say_what_and_since_when(
    net: Net, endless: None
) -> None:
    log = net.log("a")
    log.append(records("a", range(2)))
    net.kill()
    calls: list[Callable[[], object]] = [
        lambda: log.append(records("a", range(4))),
        lambda: log.read(0),
    ]
    for call in calls:
        with pytest.raises(LogError, match=rf"no connection to {net.url} for \d+ s"):
            in_time(call)
    net.restart()
    log.append(records("a", range(4)))
    assert contents(log.read(0)) == records("a", range(4))


@pytest.mark.slow
def test_the_time_without_a_connection_is_counted(net: Net) -> None:
    connection = net.connect("a")
    assert connection.trouble == ""
    net.kill()
    assert connection._lost_at_s
    connection._lost_at_s -= 60
    assert f"no connection to {net.url} for 60 s" in connection.trouble
    net.restart()
    assert connection.trouble == ""


def test_a_closed_connection_says_so(net: Net) -> None:
    log = net.log("a")
    log.connection.close()
    log.connection.close()
    with pytest.raises(LogError, match=f"the connection of a to {net.url} is closed"):
        log.append(records("a", range(1)))


# Waiting


def test_waiting_ends_when_something_is_appended(net: Net) -> None:
    log, other = net.log("a"), net.log("b")
    log.wait(0)
    waiting = in_background(lambda: log.wait(10 * PATIENCE_S))
    other.append(records("b", range(1)))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_waiting_ends_at_once_if_something_came_since_the_last_wait_and_then_not_again(
    net: Net,
) -> None:
    log = net.log("a")
    log.append(records("a", range(1)))
    in_time(lambda: log.wait(10 * PATIENCE_S))
    assert not log._has_news()


def test_who_reads_one_sender_is_not_woken_by_others(net: Net) -> None:
    log, other = net.log("a"), net.log("b")
    assert log.read(0, sender="b") == []
    log.append(records("a", range(1)))
    assert not log._has_news()
    other.append(records("b", range(1)))
    assert log._has_news()
    assert not log._has_news()
    assert contents(log.read(0, sender="b")) == records("b", range(1))


@pytest.mark.slow
def test_waiting_goes_on_over_a_restart_of_the_server_and_ends_with_the_next_record(
    net: Net,
) -> None:
    log, other = net.log("a"), net.log("b")
    net.kill()
    waiting = in_background(lambda: log.wait(10 * PATIENCE_S))
    net.restart()
    other.append(records("b", range(1)))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


# Sizes


def test_the_largest_record_passes_and_larger_ones_are_refused_by_name(net: Net) -> None:
    log = net.log("a")
    largest = bytes(range(256)) * (MAX_RECORD_BYTES // 256)
    log.append([("a.0.0", largest)])
    with pytest.raises(LogError, match=r"refuses a\.0\.1: "):
        log.append([("a.0.1", largest + bytes(HEADERS_BYTES))])
    assert contents(log.read(0)) == [("a.0.0", largest)]


def test_a_record_too_large_to_be_sent_at_all_is_refused_by_name(net: Net) -> None:
    log = net.log("a")
    with pytest.raises(LogError, match=r"refuses a\.0\.1: "):
        log.append([("a.0.1", bytes(2 * MAX_RECORD_BYTES))])


def test_a_record_that_a_server_of_somebody_elses_does_not_take_is_refused_by_name(
    tmp_path: Path,
) -> None:
    with open_server(tmp_path) as url:  # which takes a megabyte, unless told otherwise
        connection = Connection(Login(url, HUB))
        try:
            create_stream(connection, CREW)
            with pytest.raises(LogError, match=r"refuses a\.0\.0: "):
                NatsLog(connection, CREW).append([("a.0.0", bytes(MAX_RECORD_BYTES))])
        finally:
            connection.close()


@pytest.mark.slow
def test_more_than_a_read_may_take_comes_in_pages(net: Net) -> None:
    log = net.log("a")
    big = [(f"a.0.{number}", bytes([number]) * (3 * 2**20)) for number in range(6)]
    log.append(big)
    pages = []
    cursor = 0
    while page := log.read(cursor):
        assert sum(len(entry.record) for entry in page) <= MAX_FETCH_BYTES + MAX_RECORD_BYTES
        pages.append(page)
        cursor = page[-1].position
    assert len(pages) > 1
    assert contents([entry for page in pages for entry in page]) == big


# Senders


def test_the_records_of_one_sender_and_its_newest_are_found_among_others(net: Net) -> None:
    log = net.log(HUB)
    assert log.records_of("a") == []
    assert log.last_of("a") is None
    names = ["a", "ab", "b", "hub"]
    for number in range(3):
        log.append(
            [record for name in names for record in records(name, range(number, number + 1))]
        )
    for index, name in enumerate(names):
        assert contents(log.records_of(name)) == records(name, range(3))
        assert log.last_of(name) == Entry(9 + index, *records(name, range(2, 3))[0])
    assert log.newest() == log.last_of("hub")
    assert log.last_of("c") is None


@pytest.mark.slow
def test_the_records_of_a_sender_with_many_are_all_found(net: Net) -> None:
    log = net.log(HUB)
    for start in range(0, 1100, 100):
        log.append(
            [*records("b", range(start, start + 100)), *records("a", range(start, start + 1))]
        )
    assert contents(log.records_of("b")) == records("b", range(1100))


# Ids


def test_odd_ids_come_back_exactly(net: Net) -> None:
    log = net.log(HUB)
    odd = [
        "",
        "=",
        "==",
        "=41",
        "a.=",
        "a.=2E",
        ".=.",
        "\x00",
        "\x7f",
        " ",
        "\r\n",
        "a" * 1000,
        "\U0001f600",
    ]
    log.append([(id, id.encode()) for id in odd])
    log.append([(id, id.encode()) for id in odd])
    assert contents(log.read(0)) == [(id, id.encode()) for id in odd]


def test_an_id_is_a_subject_of_plain_characters() -> None:
    names = Names(CREW)
    assert names.record("a.0.12") == "motley.crew.log.a.0.12"
    assert names.record("a b..é") == "motley.crew.log.a=20b.=.=C3=A9"
    assert names.record("") == "motley.crew.log.="
    assert names.id_of("motley.crew.log.a=20b.=.=C3=A9") == "a b..é"


def test_no_other_subject_passes_for_an_id(net: Net) -> None:
    send_raw(
        net.connect("a"),
        b"PUB motley.crew.log.a.0.0 1\r\nx\r\nPUB motley.crew.log.a.=30.0 1\r\ny\r\n",
    )
    log = net.log("b")
    eventually(lambda: len(log.read(0)) == 2)
    assert [entry.id for entry in log.read(0)].count("a.0.0") == 1


# Strangers' messages


HEADERS = {
    "status": b"NATS/1.0 404 No Messages\r\n\r\n",
    "end of batch": b"NATS/1.0 204 EOB\r\n\r\n",
    "status 503": b"NATS/1.0 503\r\n\r\n",
    "status not utf-8": b"NATS/1.0 \xff\xfe\xfd\r\n\r\n",
    "status header": b"NATS/1.0\r\nStatus: 404\r\nDescription: nothing\r\n\r\n",
    "sequence": b"NATS/1.0\r\nNats-Sequence: 99999\r\n\r\n",
    "sequence in words": b"NATS/1.0\r\nNats-Sequence: many\r\n\r\n",
    "subject": (
        b"NATS/1.0\r\nNats-Subject: motley.crew.log.hub.charter\r\nNats-Stream: other\r\n\r\n"
    ),
    "not utf-8": b"NATS/1.0\r\nX: \xff\xfe\r\n\r\n",
    "first line only": b"NATS/1.0\r\n\r\n",
    "no value": b"NATS/1.0\r\nX\r\n: y\r\n\r\n",
    "too many lines": b"NATS/1.0\r\n\r\n\r\nNats-Sequence: 7\r\n\r\n",
    "long": b"NATS/1.0\r\nX: " + b"y" * 5000 + b"\r\n\r\n",
}


def test_a_record_with_any_headers_is_read_as_a_record(net: Net) -> None:
    writer, log = net.connect("a"), net.log("b")
    for number, headers in enumerate(HEADERS.values()):
        send_raw(
            writer,
            raw_message(f"motley.crew.log.a.0.{number}", headers, f"a {number}".encode()),
        )
    eventually(lambda: len(log.read(0)) == len(HEADERS))
    expected = [
        Entry(number + 1, f"a.0.{number}", f"a {number}".encode()) for number in range(len(HEADERS))
    ]
    assert log.read(0) == expected
    assert [log.read(number, limit=1) for number in range(len(HEADERS))] == [
        [entry] for entry in expected
    ]
    assert log.last_of("a") == expected[-1]
    assert log.records_of("a") == expected


DEAFENING = {
    "presence with a status not utf-8": raw_message(
        "motley.crew.presence.a", b"NATS/1.0 \xff\xfe\xfd\r\n\r\n"
    ),
    "presence without a header line": raw_message("motley.crew.presence.a", b"X"),
    "presence with a reply not utf-8": raw_message(
        "motley.crew.presence.a", b"NATS/1.0\r\n\r\n", reply=b"\xff"
    ),
    "record under a subject not utf-8": raw_message(
        b"motley.crew.log.a.0.\xff", b"NATS/1.0\r\n\r\n"
    ),
    "record with a reply not utf-8": raw_message(
        "motley.crew.log.a.0.0", b"NATS/1.0\r\n\r\n", reply=b"_INBOX.b.\xff"
    ),
}


@pytest.mark.parametrize("message", DEAFENING.values(), ids=DEAFENING)
def test_no_peer_can_deafen_others_with_a_message_that_cannot_be_decoded(
    net: Net, message: bytes
) -> None:
    log = net.log("b")
    presence = Presence(log.connection, CREW, lambda peer, signature, message: True)
    send_raw(net.connect("a"), message)
    net.log(HUB).append([("hub.0", b"after it")])
    eventually(lambda: "hub.0" in [entry.id for entry in log.read(0)])
    presence._look()
    presence.stop()
    assert log.connection._client.stats["reconnects"] == 0
