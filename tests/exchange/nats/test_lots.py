"""Groups that stand in lots: who reads what, in which order, and who may write where."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import identity
from motley.exchange import Entry, LogError
from motley.exchange.log import tagged
from motley.exchange.nats.accounts import peer_user
from motley.exchange.nats.log import Listening, NatsLog
from motley.exchange.nats.names import Names
from motley.exchange.nats.stream import Stored, Stream
from motley.records import HUB

from ..nats_server import CREW, Net, eventually, read_all
from .test_isolation import received
from .test_server import publish

NAMES = Names(CREW)
LOTS = 3


def lot_of(id: str) -> int | None:
    sender, *place = id.split(".")
    return (ord(sender[0]) + int(place[0])) % LOTS if place and place[0].isdigit() else None


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path / "server")
    made.users = [peer_user(CREW, name, identity(name).nkey, in_lots=True) for name in "ab"]
    try:
        yield made.start()
    finally:
        made.close()


def log_of(net: Net, name: str, lot: int = 0, tables: bool = False) -> NatsLog:
    return NatsLog(net.connect(name), CREW, lot_of, Listening(name, lot, tables))


def everything(net: Net) -> list[Entry]:
    return net.log(HUB).read(0)


def test_a_reader_gets_its_lot_its_own_groups_and_what_the_hub_says(net: Net) -> None:
    writer, a = log_of(net, HUB), log_of(net, "a", lot=1)
    ids = ["hub.charter", *(f"{name}.{round}.0" for round in range(6) for name in "abc"), "b.table"]
    writer.append([(id, id.encode()) for id in [*ids, "hub.roster.1"]])
    assert [entry.id for entry in everything(net)] == [*ids, "hub.roster.1"]
    expected = [
        entry for entry in everything(net) if entry.id[:2] in ("a.", "hu") or lot_of(entry.id) == 1
    ]
    assert read_all(a) == expected
    assert 0 < len(expected) < len(ids)
    assert a.read(expected[3].position, limit=1) == [expected[4]]
    with_tables = read_all(log_of(net, "a", lot=1, tables=True))
    assert [entry.id for entry in with_tables if entry not in expected] == ["b.table"]


def test_a_sender_finds_all_that_it_wrote_wherever_it_stands(net: Net) -> None:
    a, b = log_of(net, "a"), log_of(net, "b")
    assert a.last_of("a") is None
    for round in range(5):
        a.append([(f"a.{round}.{slot}", b"of a") for slot in range(2)])
        b.append([(f"b.{round}.0", b"of b")])
    a.append([("a.table", b"of a")])
    mine = [entry for entry in everything(net) if entry.id.startswith("a.")]
    assert len(mine) == 11
    assert a.records_of("a") == mine
    assert a.last_of("a") == mine[-1]
    assert b.last_of("b") == [e for e in everything(net) if e.id.startswith("b.")][-1]


def test_a_record_that_is_there_is_passed_over_and_another_stands_beside_it(net: Net) -> None:
    a = log_of(net, "a")
    a.append([("a.0.0", b"one")])
    a.append([("a.0.0", b"one")])
    assert [entry.id for entry in everything(net)] == ["a.0.0"]
    a.append([("a.0.0", b"two")])
    assert [entry.record for entry in a.records_of("a")] == [b"one", b"two"]


def test_who_waits_hears_of_its_lot_and_sleeps_through_others(net: Net) -> None:
    a, writer = log_of(net, "a", lot=lot_of("b.0.0")), log_of(net, HUB)
    a.read(0)
    writer.append([("b.1.0", b"another lot's")])
    assert not a._has_news()
    writer.append([("b.0.0", b"its lot's")])
    assert eventually(a._has_news)


def test_a_reader_is_not_sent_what_stands_in_other_lots(net: Net) -> None:
    writer, a, all_of_it = log_of(net, HUB), log_of(net, "a"), net.log("b")
    size = 10_000
    ids = [f"c.{round}.0" for round in range(30)]
    writer.append([(id, bytes(size)) for id in ids])
    before = received(a.connection), received(all_of_it.connection)
    assert len(read_all(a)) == len(ids) / LOTS
    assert len(read_all(all_of_it)) == len(ids)
    little = received(a.connection) - before[0]
    much = received(all_of_it.connection) - before[1]
    assert little == pytest.approx(size * len(ids) / LOTS, rel=0.1)
    assert much == pytest.approx(size * len(ids), rel=0.1)


@pytest.mark.slow
def test_a_reader_beside_writers_misses_nothing_and_reads_in_order(net: Net) -> None:
    """Whatever comes between two of its questions."""
    writers = {name: log_of(net, HUB) for name in ("a", "b", "c", "hub")}
    rng = random.Random(0)
    rounds = [*range(150)]
    over = threading.Event()

    def write(name: str) -> None:
        for round in rounds:
            id = f"hub.roster.{round}" if name == "hub" else f"{name}.{round}.{rng.randrange(9)}"
            writers[name].append([(id, b"x")])

    threads = [threading.Thread(target=write, args=(name,)) for name in writers]
    a, read = log_of(net, "a", lot=2), list[Entry]()
    for thread in threads:
        thread.start()
    threading.Thread(target=lambda: [*(t.join() for t in threads), over.set()]).start()
    while True:
        is_last = over.is_set()
        page = a.read(read[-1].position if read else 0, limit=rng.choice([1, 2, 1024]))
        read += page
        if is_last and not page:
            break
    positions = [entry.position for entry in read]
    assert positions == sorted(set(positions))
    assert read == [
        entry for entry in everything(net) if entry.id[:2] in ("a.", "hu") or lot_of(entry.id) == 2
    ]


def test_what_came_between_two_questions_is_in_its_place(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub writes behind the first answer of one subject and before that of another."""
    a, writer = log_of(net, "a", lot=lot_of("b.0.0")), log_of(net, HUB)
    come = [("b.0.0", b"x"), ("a.1.0", b"x")]
    read = Stream.read

    def then_they_come(self: Stream, *asked: Any) -> list[Stored]:
        page = read(self, *asked)
        if come and self is a._stream:
            writer.append([come.pop(0), come.pop(0)])
        return page

    monkeypatch.setattr(Stream, "read", then_they_come)
    assert [entry.id for entry in read_all(a)] == ["b.0.0", "a.1.0"]


def test_a_peer_writes_its_groups_in_lots_and_under_its_own_name_only(net: Net) -> None:
    a = log_of(net, "a")
    for subject in (
        NAMES.record("b.0.0", lot=0),
        NAMES.record("hub.charter", lot=0),
        NAMES.record("a.0.0"),  # in no lot
        f"motley.{CREW}.lot.0.a.table",
        f"motley.{CREW}.lot.a.0.0",
    ):
        assert "permissions violation for publish" in publish(a.connection, subject, b"x"), subject
    for id in ("b.0.0", "hub.roster.9"):
        with pytest.raises(LogError, match="permissions violation"):
            a.append([(id, b"forged")])
    assert everything(net) == []
    a.append([("a.0.0", b"mine"), ("a.table", b"mine")])
    assert [entry.id for entry in everything(net)] == ["a.0.0", "a.table"]


def test_what_stands_in_another_lot_than_its_own_is_under_no_id_of_a_record(net: Net) -> None:
    a = log_of(net, "a", lot=lot_of("b.1.0"))
    wrong = [NAMES.record("b.0.0", lot=lot_of("b.1.0")), f"motley.{CREW}.lot.2.b.table.{'0' * 16}"]
    b = net.connect("b")
    for subject in wrong:
        assert publish(b, subject, b"x") == ""
    eventually(lambda: len(everything(net)) == 2)
    assert [entry.id for entry in everything(net)] == ["b.0.0", f"b.table.{'0' * 16}"]
    by_charter = NatsLog(net.connect(HUB), CREW, lot_of)
    assert [entry.id for entry in by_charter.read(0)] == ["=b.0.0", f"=b.table.{'0' * 16}"]
    assert {entry.id for entry in read_all(a)} <= {"=b.0.0", f"=b.table.{'0' * 16}"}


def test_a_table_can_stand_beside_another_that_took_its_place(net: Net) -> None:
    log_of(net, "a").append([("a.table", b"with the key that was lost")])
    log_of(net, "a").append([("a.table", b"with the new key")])
    ids = [entry.id for entry in read_all(log_of(net, "b", tables=True))]
    assert ids == ["a.table", tagged("a.table", b"with the new key")]


def test_where_groups_stand_in_no_lots_nobody_may_write_in_one() -> None:
    plain = peer_user(CREW, "a", identity("a").nkey)
    assert not [subject for subject in plain.writes if ".lot." in subject]


@pytest.mark.parametrize("id", ["a.3.1", "a.3.1.0123456789abcdef", "hub.charter", "a.table"])
def test_an_id_is_the_same_in_a_lot_and_in_none(id: str) -> None:
    assert NAMES.id_of(NAMES.record(id)) == NAMES.id_of(NAMES.record(id, lot=7)) == id
