from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from fakes import group, identity, rollout
from marks import slow
from motley.exchange import Entry, Head, LogError, Mark, MemoryLog, Outbox, Signer, decode, unpack
from motley.exchange.blobs import MemoryBlobs
from motley.exchange.outbox import BATCH, WORTH_THREADS
from motley.exchange.sections import STEPS_PER_NAT
from motley.records import FIRST_PREVIOUS, Group, Roster
from motley.trust import verifies
from motley.trust.chain import Chain

AUTHOR = identity("author")
SIGNER = Signer(AUTHOR.public, AUTHOR.sign)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.sqlite"


def groups(start: int, stop: int) -> list[Group]:
    return [group(round=number) for number in range(start, stop)]


def contents_of(log: MemoryLog) -> list[Group]:
    """Everything in a log, which must be one whole chain, signed."""
    chain, found = Chain(), []
    for entry in everything(log):
        sealed = unpack(entry.record)
        stamp, content = decode(sealed.body)
        assert verifies(stamp.key, sealed.signature, sealed.signed)
        assert (stamp.key, content.id) == (AUTHOR.public, entry.id)
        assert chain.add(stamp, sealed.hash) == ""
        assert isinstance(content, Group)
        found.append(content)
    assert chain.next == len(found)
    assert not chain.missing
    return found


def everything(log: MemoryLog) -> list[Entry]:
    return log.read(0, limit=10**6)


class FailingLog:
    """Takes in so many records, then fails, in the middle of a batch; `heal` makes it whole."""

    def __init__(self, log: MemoryLog, takes: int) -> None:
        self.log, self.takes = log, takes

    def heal(self) -> None:
        self.takes = 10**9

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for record in records:
            if not self.takes:
                raise LogError("the line is dead")
            self.takes -= 1
            self.log.append([record])

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        return self.log.read(after, limit)


class SilentLog(FailingLog):
    """Takes in everything and never says so."""

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        self.log.append(records)
        raise LogError("no answer")


def test_what_is_put_is_delivered_in_its_order_once() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 3))
    outbox.put(groups(3, 5))
    assert len(outbox) == 5
    outbox.deliver(log)
    assert len(outbox) == 0
    assert contents_of(log) == groups(0, 5)
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 5)


def test_nothing_put_is_nothing_delivered() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.deliver(log)
    outbox.put([])
    outbox.deliver(log)
    assert everything(log) == []
    assert outbox.head == Head(0, FIRST_PREVIOUS)


def test_records_sealed_by_many_hands_are_those_of_one() -> None:
    together, singly = (Outbox(None, SIGNER) for _ in range(2))
    logs = [MemoryLog() for _ in range(2)]
    together.put(groups(0, 2 * WORTH_THREADS))
    for each in groups(0, 2 * WORTH_THREADS):
        singly.put([each])
    for outbox, log in zip((together, singly), logs, strict=True):
        outbox.deliver(log)
    assert everything(logs[0]) == everything(logs[1])
    assert together.head == singly.head


@pytest.mark.slow
def test_more_than_a_batch_is_delivered_whole() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 2 * BATCH + 3))
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 2 * BATCH + 3)


def test_the_chain_goes_on_over_deliveries_and_reopening(path: Path) -> None:
    log = MemoryLog()
    for number in range(4):
        outbox = Outbox(path, SIGNER)
        outbox.put(groups(2 * number, 2 * number + 2))
        if number != 1:
            outbox.deliver(log)
        outbox.close()
    assert contents_of(log) == groups(0, 8)
    assert outbox_head(path) == Head(8, unpack(everything(log)[-1].record).hash)


def outbox_head(path: Path) -> Head:
    outbox = Outbox(path, SIGNER)
    head = outbox.head
    outbox.close()
    return head


def test_a_crash_between_putting_and_delivering_loses_nothing(path: Path) -> None:
    before, log = Outbox(path, SIGNER), MemoryLog()
    before.put(groups(0, 3), Mark("round", 0), note=b"noted")
    after = Outbox(path, SIGNER)  # the one before was not closed: its process is dead
    assert (len(after), after.note_of(Mark("round", 0))) == (3, b"noted")
    after.deliver(log)
    assert contents_of(log) == groups(0, 3)


def test_a_crash_between_the_logs_answer_and_the_forgetting_sends_again_and_doubles_nothing(
    path: Path,
) -> None:
    outbox, log = Outbox(path, SIGNER), MemoryLog()
    outbox.put(groups(0, 3))
    with pytest.raises(LogError, match="no answer"):
        outbox.deliver(SilentLog(log, 0))
    again = Outbox(path, SIGNER)
    assert (len(log), len(again)) == (3, 3)
    again.put(groups(3, 4))
    again.deliver(log)
    assert contents_of(log) == groups(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("takes", [0, 4, BATCH, BATCH + 1, *map(slow, [1, BATCH - 1, 2 * BATCH])])
def test_a_log_that_fails_in_the_middle_gets_the_rest_later_and_nothing_twice(
    path: Path, takes: int
) -> None:
    count = 2 * BATCH + 5
    log = MemoryLog()
    failing = FailingLog(log, takes)
    outbox = Outbox(path, SIGNER)
    outbox.put(groups(0, count))
    for _ in range(2):
        with pytest.raises(LogError, match="dead"):
            outbox.deliver(failing)
    assert contents_of(log) == groups(0, takes)
    assert len(outbox) == count - takes // BATCH * BATCH  # a batch is forgotten as one
    outbox.close()
    reopened = Outbox(path, SIGNER)
    reopened.put(groups(count, count + 2))
    failing.heal()
    reopened.deliver(failing)
    assert len(reopened) == 0
    assert contents_of(log) == groups(0, count + 2)


def test_putting_is_all_or_nothing(path: Path) -> None:
    outbox, log = Outbox(path, SIGNER), MemoryLog()
    outbox.put(groups(0, 1))
    head = outbox.head
    unwritable = group(round=2, rollouts=[rollout([-1])])
    with pytest.raises(ValueError, match="numbers of a record"):
        outbox.put([group(round=1), unwritable, group(round=3)], Mark("round", 1), note=b"noted")
    assert (len(outbox), outbox.head, outbox.note_of(Mark("round", 1))) == (1, head, None)
    outbox.put(groups(1, 3), Mark("round", 1))
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 3)


def test_the_same_record_cannot_wait_twice() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 2))
    with pytest.raises(sqlite3.IntegrityError):
        outbox.put([group(round=2), group(round=0)])
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 2)


def test_a_round_has_the_note_it_was_put_with(path: Path) -> None:
    outbox = Outbox(path, SIGNER)
    outbox.put(groups(0, 1), Mark("round", 0), note=b"first\x00")
    outbox.put([], Mark("round", 1))
    outbox.put(groups(1, 2))
    assert [outbox.note_of(Mark("round", round)) for round in range(3)] == [b"first\x00", b"", None]
    outbox.deliver(MemoryLog())
    assert Outbox(path, SIGNER).note_of(Mark("round", 0)) == b"first\x00"


def test_a_round_is_put_once() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 1), Mark("round", 0), note=b"first")
    with pytest.raises(sqlite3.IntegrityError):
        outbox.put(groups(1, 2), Mark("round", 0), note=b"second")
    assert (len(outbox), outbox.note_of(Mark("round", 0))) == (1, b"first")
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 1)


def test_a_chain_begun_elsewhere_is_gone_on_with(path: Path) -> None:
    log = MemoryLog()
    first = Outbox(None, SIGNER)
    first.put(groups(0, 3))
    first.deliver(log)
    second = Outbox(path, SIGNER)
    second.head = first.head
    assert outbox_head(path) == first.head
    second.put(groups(3, 5))
    second.deliver(log)
    assert contents_of(log) == groups(0, 5)


@pytest.mark.parametrize("lossless", [False, True])
def test_records_are_lossless_where_asked(lossless: bool) -> None:
    outbox, log = Outbox(None, SIGNER, lossless=lossless), MemoryLog()
    outbox.put([group(rollouts=[rollout(logprob=-0.12345)])])
    outbox.deliver(log)
    found = contents_of(log)[0].rollouts[0].logprobs[0]
    assert abs(found + 0.12345) < (1e-8 if lossless else 0.5 / STEPS_PER_NAT)
    assert (abs(found + 0.12345) > 1e-8) != lossless


def test_a_hubs_records_go_the_same_way() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    roster = Roster(crew="crew", number=2, keys={"a": bytes(32)})
    outbox.put([roster])
    outbox.deliver(log)
    (entry,) = log.read(0)
    assert entry.id == "hub.roster.2"
    assert decode(unpack(entry.record).body)[1] == roster


# What is due later


def ids_on(log: MemoryLog) -> list[str]:
    """In the order of the log, in which a chain may have holes that are filled later."""
    chain = Chain()
    for entry in everything(log):
        sealed = unpack(entry.record)
        assert chain.add(decode(sealed.body)[0], sealed.hash) == ""
    return [entry.id for entry in everything(log)]


def test_only_what_is_due_is_sent() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    assert outbox.due_s == math.inf
    outbox.put(groups(0, 2), due_s=10.0)
    outbox.put(groups(2, 3), due_s=20.0)
    assert outbox.due_s == 10.0
    outbox.deliver(log, 9.999)
    assert (len(log), len(outbox), outbox.due_s) == (0, 3, 10.0)
    outbox.deliver(log, 10.0)
    assert (ids_on(log), len(outbox), outbox.due_s) == (["a.0.0", "a.1.0"], 1, 20.0)
    outbox.deliver(log, 1e9)
    assert (len(outbox), outbox.due_s) == (0, math.inf)
    assert contents_of(log) == groups(0, 3)


def test_without_a_moment_everything_is_sent_and_without_a_due_time_it_is_due_at_once() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 1), due_s=1e12)
    outbox.put(groups(1, 2))
    assert outbox.due_s == 0.0
    outbox.deliver(log, 0.0)
    assert ids_on(log) == ["a.1.0"]
    outbox.deliver(log)
    assert ids_on(log) == ["a.1.0", "a.0.0"]


def test_a_later_record_that_is_due_sooner_goes_first_and_the_chain_is_whole_in_the_end() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    for number, due_s in enumerate([30.0, 10.0, 20.0, 10.0]):
        outbox.put(groups(number, number + 1), due_s=due_s)
    for now_s in (10.0, 20.0, 30.0):
        assert outbox.due_s == now_s
        outbox.deliver(log, now_s)
    assert ids_on(log) == ["a.1.0", "a.3.0", "a.2.0", "a.0.0"]
    chain = Chain()
    for entry in everything(log):
        sealed = unpack(entry.record)
        chain.add(decode(sealed.body)[0], sealed.hash)
    assert (chain.next, chain.missing) == (4, {})


@pytest.mark.slow
def test_more_than_a_batch_is_due_at_its_own_times() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, BATCH + 5), due_s=2.0)
    outbox.put(groups(BATCH + 5, 2 * BATCH), due_s=1.0)
    outbox.deliver(log, 1.0)
    assert (len(log), len(outbox)) == (BATCH - 5, BATCH + 5)
    outbox.deliver(log, 2.0)
    assert (len(log), len(outbox)) == (2 * BATCH, 0)
    assert len(ids_on(log)) == 2 * BATCH


def test_when_a_record_is_due_survives_reopening(path: Path) -> None:
    outbox, log = Outbox(path, SIGNER), MemoryLog()
    outbox.put(groups(0, 1), due_s=10.0)
    again = Outbox(path, SIGNER)
    again.deliver(log, 5.0)
    assert (len(log), again.due_s) == (0, 10.0)
    again.deliver(log, 10.0)
    assert contents_of(log) == groups(0, 1)


@pytest.mark.parametrize("marked", [[], [0], [3, 1, 2], [0, 1000]])
def test_the_last_round_is_the_highest_that_was_marked(path: Path, marked: list[int]) -> None:
    outbox = Outbox(path, SIGNER)
    for number in marked:
        outbox.put(groups(number, number + 1), Mark("round", number))
    outbox.put(groups(2000, 2001))
    outbox.deliver(MemoryLog())
    assert outbox.last_round == Outbox(path, SIGNER).last_round == max(marked, default=-1)


# Blobs


def blob(text: str) -> tuple[str, bytes]:
    return hashlib.sha256(text.encode()).hexdigest(), text.encode()


class WatchedBlobs(MemoryBlobs):
    """Takes in so many blobs, then fails; notes how long the log was at each."""

    def __init__(self, log: MemoryLog, takes: int = 10**9) -> None:
        super().__init__()
        self.log, self.takes = log, takes
        self.put_at: list[tuple[bytes, int]] = []

    def put(self, name: str, content: bytes) -> None:
        if not self.takes:
            raise LogError("the store is full")
        self.takes -= 1
        self.put_at.append((content, len(self.log)))
        super().put(name, content)


def waiting_blobs(path: Path) -> int:
    database = sqlite3.connect(path)
    (count,) = database.execute("SELECT count(*) FROM blobs").fetchone()
    database.close()
    return int(count)


def test_blobs_are_in_the_store_before_their_record_is_on_the_log(path: Path) -> None:
    log = MemoryLog()
    outbox, store = Outbox(path, SIGNER), WatchedBlobs(log)
    outbox.put(groups(0, 1), blobs=dict([blob("one"), blob("two")]))
    outbox.put(groups(1, 2), due_s=10.0, blobs=dict([blob("three")]))
    assert waiting_blobs(path) == 3
    outbox.deliver(log, 5.0, store)
    assert sorted(store.put_at) == [(b"one", 0), (b"two", 0)]
    assert contents_of(log) == groups(0, 1)
    assert waiting_blobs(path) == 1
    outbox.deliver(log, 10.0, store)
    assert store.put_at[2:] == [(b"three", 1)]
    assert (len(log), waiting_blobs(path)) == (2, 0)
    assert store.get(*named(b"three")) == b"three"


def named(content: bytes) -> tuple[str, int]:
    return hashlib.sha256(content).hexdigest(), len(content)


@pytest.mark.parametrize("takes", [0, 1])
def test_a_store_that_fails_keeps_the_record_and_all_its_blobs(path: Path, takes: int) -> None:
    log = MemoryLog()
    outbox, store = Outbox(path, SIGNER), WatchedBlobs(log, takes)
    outbox.put(groups(0, 1), blobs=dict([blob("one"), blob("two")]))
    for _ in range(2):
        with pytest.raises(LogError, match="full"):
            outbox.deliver(log, 0.0, store)
    assert (len(log), len(outbox), waiting_blobs(path)) == (0, 1, 2)
    again = Outbox(path, SIGNER)  # after a crash
    store.takes = 10
    again.deliver(log, 0.0, store)
    assert contents_of(log) == groups(0, 1)
    assert [store.get(*named(content)) for content in (b"one", b"two")] == [b"one", b"two"]
    assert (len(again), waiting_blobs(path)) == (0, 0)


def test_a_log_that_fails_after_the_store_gets_the_record_later_and_the_blobs_are_passed_over(
    path: Path,
) -> None:
    log = MemoryLog()
    outbox, store = Outbox(path, SIGNER), WatchedBlobs(log)
    outbox.put(groups(0, 1), blobs=dict([blob("one")]))
    with pytest.raises(LogError, match="dead"):
        outbox.deliver(FailingLog(log, 0), 0.0, store)
    assert (len(log), len(outbox), waiting_blobs(path)) == (0, 1, 1)
    outbox.deliver(log, 0.0, store)
    assert contents_of(log) == groups(0, 1)
    assert store.get(*named(b"one")) == b"one"


def test_two_records_may_need_the_same_blob(path: Path) -> None:
    log = MemoryLog()
    outbox, store = Outbox(path, SIGNER), WatchedBlobs(log)
    outbox.put(groups(0, 1), due_s=10.0, blobs=dict([blob("same")]))
    outbox.put(groups(1, 2), due_s=5.0, blobs=dict([blob("same"), blob("other")]))
    outbox.deliver(log, 5.0, store)
    assert ids_on(log) == ["a.1.0"]
    assert waiting_blobs(path) == 1
    outbox.deliver(log, 10.0, store)
    assert (len(log), waiting_blobs(path)) == (2, 0)


def test_putting_blobs_is_all_or_nothing_too(path: Path) -> None:
    outbox = Outbox(path, SIGNER)
    outbox.put(groups(0, 1), Mark("round", 0))
    with pytest.raises(sqlite3.IntegrityError):
        outbox.put(groups(1, 2), Mark("round", 0), blobs=dict([blob("one")]))
    assert (len(outbox), waiting_blobs(path), outbox.head.counter) == (1, 0, 1)


def test_records_without_blobs_need_no_store() -> None:
    outbox, log = Outbox(None, SIGNER), MemoryLog()
    outbox.put(groups(0, 1), blobs={})
    outbox.deliver(log, 0.0)
    assert contents_of(log) == groups(0, 1)


def test_an_outbox_of_the_release_before_is_gone_on_with(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute(
        "CREATE TABLE unsent (counter INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, record BLOB "
        "NOT NULL)"
    )
    database.commit()
    database.close()
    outbox, log = Outbox(path, SIGNER), MemoryLog()
    outbox.put(groups(0, 1))
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 1)


# Files of version 0.5

OLD_TABLES = """
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1), counter INTEGER NOT NULL, previous BLOB NOT NULL
);
CREATE TABLE unsent (
    counter INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, record BLOB NOT NULL, due_s REAL NOT NULL
);
CREATE TABLE blobs (
    counter INTEGER NOT NULL, name TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (counter, name)
);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, note BLOB NOT NULL);
"""
KINDS = ("round", "version", "roster", "charter")


def write_old(path: Path, numbers: dict[int, bytes]) -> None:
    """The file of an outbox that has put one record, and noted these numbers."""
    first = Outbox(None, SIGNER)
    first.put(groups(0, 1))
    unsent = first._database.execute("SELECT * FROM unsent").fetchall()
    database = sqlite3.connect(path)
    database.executescript(OLD_TABLES)
    database.executemany("INSERT INTO unsent VALUES (?, ?, ?, ?)", unsent)
    database.execute("INSERT INTO head VALUES (1, ?, ?)", first.head)
    database.executemany("INSERT INTO rounds VALUES (?, ?)", numbers.items())
    database.commit()
    database.close()


def marks_in(outbox: Outbox) -> dict[Mark, bytes]:
    marks = [Mark(kind, number) for kind in KINDS for number in range(10)]
    return {mark: note for mark in marks if (note := outbox.note_of(mark)) is not None}


@pytest.mark.parametrize(
    ("numbers", "marks", "last_round"),
    [
        ({}, {}, -1),
        (
            {0: b"noted", 3: b"too"},
            {Mark("round", 0): b"noted", Mark("round", 3): b"too"},
            3,
        ),
        ({0: b"", 4: b""}, {Mark("version", 0): b"", Mark("version", 4): b""}, -1),
        (
            {-1: b"", 0: b"", 1: b""},
            {Mark("roster", 0): b"", Mark("roster", 1): b"", Mark("charter"): b""},
            -1,
        ),
    ],
    ids=["nobody", "a peer", "a learner", "a hub"],
)
def test_what_a_number_of_version_0_5_was_is_known_by_who_made_the_file(
    path: Path, numbers: dict[int, bytes], marks: dict[Mark, bytes], last_round: int
) -> None:
    write_old(path, numbers)
    for _ in range(2):  # the second time there is nothing left to name
        outbox = Outbox(path, SIGNER)
        assert marks_in(outbox) == marks
        assert outbox.last_round == last_round
        outbox.close()
    outbox, log = Outbox(path, SIGNER), MemoryLog()
    outbox.put(groups(1, 2), Mark("round", 9))
    outbox.deliver(log)
    assert contents_of(log) == groups(0, 2)
    assert outbox.last_round == 9


def test_marks_of_different_kinds_have_numbers_of_their_own(path: Path) -> None:
    outbox = Outbox(path, SIGNER)
    for number, kind in enumerate(KINDS):
        outbox.put(groups(number, number + 1), Mark(kind, 1), note=kind.encode())
    assert marks_in(outbox) == {Mark(kind, 1): kind.encode() for kind in KINDS}
    assert outbox.last_round == 1


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(OSError, match=r"outbox\.sqlite: file is not a database; .*move it"):
        Outbox(path, Signer(identity("a").public, identity("a").sign))


def test_a_file_without_room_is_named_with_what_to_do(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite", Signer(identity("a").public, identity("a").sign))
    outbox._database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(OSError, match=r"outbox\.sqlite: .*full; make room on that disk"):
        outbox.put([group(round=number) for number in range(200)])
    outbox.close()
