"""What every log must do, and what must come through one that fails.

A backend's tests derive from `LogContract` and say how to make and to reopen one. `FaultyLog`
stands between a log and those who use it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from enum import Enum

import pytest

from fakes import PROBLEM, group, identity
from motley.exchange import Entry, Log, LogError, Outbox, Signer
from motley.models.tiny import tiny_vocabulary
from motley.records import HUB, Group, Roster, Sampling
from motley.trust import Admission, Admitted, Rules

LogFactory = Callable[[], Log]


class Fault(Enum):
    DROP = "append fails before anything is written"
    LOSE_ACK = "append writes, then fails"
    DELAY = "read shows only the first of what is there"
    DUPLICATE = "append sends everything twice"
    STALL = "for some calls nothing can be appended, and nothing is there to read"
    CORRUPT = "read shows a record with one bit changed"
    REORDER = "append writes its records in another order"


class FaultyLog:
    """A log with one fault, which comes and goes as `rng` has it: half of all calls are as they
    should be.
    """

    def __init__(self, log: Log, fault: Fault, rng: random.Random) -> None:
        self._log, self._fault, self._rng = log, fault, rng
        self._stalled_calls = 0
        self.num_faults = 0

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        if self._fault in (Fault.DELAY, Fault.CORRUPT) or not self._strikes():
            self._log.append(records)
        elif self._fault is Fault.DROP:
            raise LogError("not sent")
        elif self._fault is Fault.STALL:
            raise LogError("out of reach")
        elif self._fault is Fault.LOSE_ACK:
            self._log.append(records[: self._rng.randint(1, len(records))])
            raise LogError("no answer")
        elif self._fault is Fault.DUPLICATE:
            self._log.append([*records, *records])
            self._log.append(records)
        else:
            self._log.append(self._rng.sample(records, len(records)))

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        entries = self._log.read(after, limit)
        if (
            not entries
            or self._fault not in (Fault.DELAY, Fault.STALL, Fault.CORRUPT)
            or not self._strikes()
        ):
            return entries
        if self._fault is Fault.CORRUPT:
            place = self._rng.randrange(len(entries))
            entries[place] = self._corrupted(entries[place])
            return entries
        return entries[: self._rng.randrange(len(entries))] if self._fault is Fault.DELAY else []

    def _strikes(self) -> bool:
        if self._stalled_calls:
            self._stalled_calls -= 1
        elif self._rng.random() < 0.5:
            return False
        elif self._fault is Fault.STALL:
            self._stalled_calls = self._rng.randrange(5)
        self.num_faults += 1
        return True

    def _corrupted(self, entry: Entry) -> Entry:
        record = bytearray(entry.record)
        record[self._rng.randrange(len(record))] ^= 1 << self._rng.randrange(8)
        return entry._replace(record=bytes(record))


PEERS = ("a", "b")
ROUNDS = 12
FAULTS = pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
SEEDS = pytest.mark.parametrize("seed", range(3))


def rounds_of(peer: str) -> list[Group]:
    return [group(peer=peer, round=round) for round in range(ROUNDS)]


def roster() -> Roster:
    return Roster(crew="crew", number=0, keys={peer: identity(peer).public for peer in PEERS})


def outbox_of(name: str) -> Outbox:
    author = identity(name)
    return Outbox(None, Signer(author.public, author.sign))


def admission() -> Admission:
    vocabulary = tiny_vocabulary()
    rules = Rules(
        crew="crew",
        vocabulary=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        end_ids=vocabulary.end_ids,
        rollouts_per_group=2,
        sampling=Sampling(),
        slots=1,
        rounds=ROUNDS,
    )
    return Admission(rules, identity(HUB).public, lambda peer, round: [PROBLEM], None)


def deliver_all(outboxes: Sequence[Outbox], log: Log, rng: random.Random) -> None:
    """Try until everything is confirmed, each whenever its turn comes."""
    for _ in range(1000):
        waiting = [outbox for outbox in outboxes if len(outbox)]
        if not waiting:
            return
        try:
            rng.choice(waiting).deliver(log)
        except LogError:
            continue
    raise AssertionError("not delivered after 1000 attempts")


def publish(log: Log, rng: random.Random) -> None:
    """A roster, then every peer's groups, some of them put while others are on their way."""
    hub = outbox_of(HUB)
    hub.put([roster()])
    deliver_all([hub], log, rng)
    outboxes = [outbox_of(peer) for peer in PEERS]
    for start in range(0, ROUNDS, 4):
        for peer, outbox in zip(PEERS, outboxes, strict=True):
            outbox.put(rounds_of(peer)[start : start + 4])
        deliver_all(outboxes, log, rng)


def admit_all(log: Log, gate: Admission, last: int) -> list[str]:
    """Ids of what is admitted, reading until the last position came by.

    What is refused is read again from where it stands.
    """
    admitted, cursor = [], 0
    for _ in range(1000):
        for entry in log.read(cursor, limit=3):
            refused = gate.refused.total()
            verdict = gate.admit(entry)
            if gate.refused.total() > refused:
                break
            admitted += [verdict.group.id] if isinstance(verdict, Admitted) else []
            cursor = entry.position
        if cursor == last:
            return admitted
    raise AssertionError("not read after 1000 attempts")


EVERY_ID = sorted(group.id for peer in PEERS for group in rounds_of(peer))


def untagged(log: Log) -> list[tuple[str, bytes]]:
    """What stands under its very id, in the log's order."""
    return [(e.id, e.record) for e in log.read(0) if not re.search(r"\.[0-9a-f]{16}$", e.id)]


class LogContract:
    """`make_log` is a fixture: a function that opens the same log each time it is called.

    `durable`: it survives its reopening.
    """

    durable = True

    @pytest.fixture
    def make_log(self) -> LogFactory:
        raise NotImplementedError

    def test_an_empty_log_has_nothing_to_read(self, make_log: LogFactory) -> None:
        assert make_log().read(0) == []

    def test_records_come_back_in_the_order_of_appending_with_their_ids(
        self, make_log: LogFactory
    ) -> None:
        log = make_log()
        for number in range(20):
            log.append([(f"id{number}", f"record {number}".encode())])
        entries = log.read(0)
        assert [(e.id, e.record) for e in entries] == [
            (f"id{number}", f"record {number}".encode()) for number in range(20)
        ]
        positions = [e.position for e in entries]
        assert positions[0] > 0
        assert positions == sorted(set(positions))

    def test_records_appended_together_keep_their_order(self, make_log: LogFactory) -> None:
        log = make_log()
        first = [(f"x{number}", bytes([number])) for number in range(40)]
        second = [(f"a{number}", bytes([number])) for number in reversed(range(40))]
        log.append(first)
        log.append(second)
        assert [(e.id, e.record) for e in log.read(0)] == first + second

    def test_appending_nothing_changes_nothing(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([])
        assert log.read(0) == []
        log.append([("a", b"1")])
        log.append([])
        assert [e.id for e in log.read(0)] == ["a"]

    def test_the_same_id_again_changes_nothing(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([("a", b"first")])
        log.append([("b", b"second")])
        log.append([("a", b"first")])
        log.append([("a", b"something else")])
        assert untagged(log) == [("a", b"first"), ("b", b"second")]

    def test_of_records_appended_together_only_those_already_there_are_passed_over(
        self, make_log: LogFactory
    ) -> None:
        log = make_log()
        log.append([("b", b"old b"), ("d", b"old d")])
        log.append([(id, f"new {id}".encode()) for id in "abcde"])
        expected = [
            ("b", b"old b"),
            ("d", b"old d"),
            ("a", b"new a"),
            ("c", b"new c"),
            ("e", b"new e"),
        ]
        assert untagged(log) == expected

    def test_an_id_twice_among_records_appended_together_counts_once(
        self, make_log: LogFactory
    ) -> None:
        log = make_log()
        log.append([("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")])
        assert untagged(log) == [("a", b"1"), ("b", b"2"), ("c", b"4")]

    def test_equal_records_under_different_ids_are_two(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([("a", b"same"), ("b", b"same")])
        assert [e.record for e in log.read(0)] == [b"same", b"same"]

    def test_reading_starts_behind_any_position(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([(str(number), bytes([number])) for number in range(10)])
        everything = log.read(0)
        for index, entry in enumerate(everything):
            assert log.read(entry.position) == everything[index + 1 :]

    def test_a_limit_gives_the_oldest_and_paging_gives_them_all(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([(str(number), bytes([number])) for number in range(10)])
        found: list[Entry] = []
        while page := log.read(found[-1].position if found else 0, limit=3):
            assert len(page) <= 3
            found += page
        assert found == log.read(0)
        assert len(found) == 10

    def test_what_comes_later_is_behind_what_was_read(self, make_log: LogFactory) -> None:
        log = make_log()
        log.append([("a", b"1")])
        cursor = log.read(0)[-1].position
        assert log.read(cursor) == []
        log.append([("b", b"2")])
        assert [e.record for e in log.read(cursor)] == [b"2"]

    def test_any_bytes_are_kept_as_they_are(self, make_log: LogFactory) -> None:
        log = make_log()
        records = [b"", bytes(9), bytes(range(256)), b"\r\n\r\n", bytes(100_000)]
        log.append([(str(number), record) for number, record in enumerate(records)])
        assert [e.record for e in log.read(0)] == records

    def test_ids_of_any_characters_come_back_exactly_and_are_told_apart(
        self, make_log: LogFactory
    ) -> None:
        log = make_log()
        ids = [
            "a b",
            "a.b",
            "a..b",
            "a...b",
            ".a",
            "a.",
            ".",
            "*",
            "a.*",
            ">",
            "a.>",
            "%",
            "%20",
            "a%2Eb",
            "a%20b",
            "größe.0.1",
            "日本.0",
        ]
        ids += [
            "A.B",
            "a\tb",
            "a\nb",
            "$JS.API",
            "a/b",
            "a\\b",
            "'",
            '"',
            "a_b",
            "a-b",
            "_",
            "\u00e9",
            "e\u0301",
        ]
        records = [(id, id.encode()) for id in ids]
        log.append(records)
        for record in records:
            log.append([record])
        assert [(e.id, e.record) for e in log.read(0)] == records

    def test_a_reopened_log_has_the_same_records_positions_and_ids(
        self, make_log: LogFactory
    ) -> None:
        if not self.durable:
            pytest.skip("this log does not outlive its process")
        log = make_log()
        log.append([(f"größe..{number}", bytes([number])) for number in range(5)])
        again = make_log()
        assert again.read(0) == log.read(0)
        again.append([("größe..3", b"other")])
        assert untagged(again)[3] == ("größe..3", b"\x03")
        again.append([("new", b"x")])
        assert untagged(make_log())[-2:] == [
            ("größe..4", b"\x04"),
            ("new", b"x"),
        ]

    @SEEDS
    @FAULTS
    def test_outboxes_deliver_everything_exactly_once_through_any_fault(
        self, make_log: LogFactory, fault: Fault, seed: int
    ) -> None:
        log, rng = make_log(), random.Random(seed)
        faulty = FaultyLog(log, fault, rng)
        publish(faulty, rng)
        assert sorted(e.id for e in log.read(0)) == sorted([*EVERY_ID, roster().id])

    @SEEDS
    @FAULTS
    def test_everything_is_admitted_exactly_once_through_any_fault(
        self, make_log: LogFactory, fault: Fault, seed: int
    ) -> None:
        log, rng = make_log(), random.Random(seed)
        faulty, gate = FaultyLog(log, fault, rng), admission()
        publish(faulty, rng)
        assert sorted(admit_all(faulty, gate, log.read(0)[-1].position)) == EVERY_ID
        assert gate.missing == {}
        assert faulty.num_faults > 0
        assert set(gate.chains) == {identity(name).public for name in (*PEERS, HUB)}
        assert (gate.refused.total() > 0) == (fault is Fault.CORRUPT)
        assert not {reason for _, reason in gate.refused} & {"fork", "gap", "replay"}
