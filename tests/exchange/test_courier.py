from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fakes import group, identity
from hubs import PATIENCE_S
from motley.clock import VirtualClock
from motley.exchange import LogError, MemoryLog, Outbox, Signer, decode, unpack
from motley.exchange import courier as module
from motley.exchange.courier import Courier
from motley.exchange.outbox import OutboxError

from .contract import Fault, FaultyLog
from .nats_server import eventually

A = identity("a")
APPENDING = [fault for fault in Fault if fault not in (Fault.DELAY, Fault.CORRUPT)]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.005)


class Stand:
    """A log that can be out of reach, an outbox, and couriers between them."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, MemoryLog()
        self.broken = ""
        self.num_attempts = 0
        self.outbox = self.open_outbox()
        self.couriers: list[Courier] = []

    def open_outbox(self) -> Outbox:
        return Outbox(self.path, Signer(A.public, A.sign))

    def courier(self) -> Courier:
        made = Courier(self.open_outbox, self)
        made.start()
        self.couriers.append(made)
        return made

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        self.num_attempts += 1
        if self.broken:
            raise LogError(self.broken)
        self.log.append(records)

    def read(self, after: int, limit: int = 1024) -> list:
        raise AssertionError("a courier does not read")

    def put(self, rounds: range) -> None:
        self.outbox.put([group(round=round) for round in rounds])

    @property
    def rounds(self) -> list[int]:
        """What is on the log, in its order; every chain counter in its place."""
        found = [decode(unpack(entry.record).body) for entry in self.log.read(0)]
        assert [stamp.counter for stamp, _ in found] == list(range(len(found)))
        return [content.round for _, content in found]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path / "outbox.sqlite")
    yield made
    made.broken = ""
    for courier in made.couriers:
        courier.close()
    made.outbox.close()


def test_what_is_put_is_delivered_when_the_courier_is_woken(stand: Stand) -> None:
    courier = stand.courier()
    for start in (0, 3, 6):
        stand.put(range(start, start + 3))
        courier.wake()
        eventually(lambda start=start: stand.rounds == list(range(start + 3)))
    eventually(lambda: len(stand.outbox) == 0)
    assert courier.trouble == ""


def test_what_a_run_before_left_is_delivered_unasked(stand: Stand) -> None:
    stand.put(range(5))
    stand.courier()
    eventually(lambda: stand.rounds == list(range(5)))


def test_it_keeps_trying_says_why_and_delivers_when_the_log_is_back(stand: Stand) -> None:
    stand.broken = "no connection for 3 s"
    courier = stand.courier()
    stand.put(range(4))
    courier.wake()
    eventually(lambda: courier.trouble == "no connection for 3 s")
    before = stand.num_attempts
    eventually(lambda: stand.num_attempts > before + 2)
    stand.broken = "no connection for 4 s"
    eventually(lambda: courier.trouble == "no connection for 4 s")
    assert stand.rounds == []
    stand.put(range(4, 6))  # what comes meanwhile needs no waking
    stand.broken = ""
    eventually(lambda: stand.rounds == list(range(6)))
    eventually(lambda: courier.trouble == "")
    eventually(lambda: len(stand.outbox) == 0)


def test_closing_sends_what_can_be_sent(stand: Stand) -> None:
    courier = stand.courier()
    stand.put(range(50))
    courier.close()
    assert stand.rounds == list(range(50))
    assert len(stand.outbox) == 0


def test_closing_leaves_in_the_file_what_cannot_be_sent(stand: Stand) -> None:
    stand.broken = "no connection"
    courier = stand.courier()
    stand.put(range(3))
    courier.wake()
    eventually(lambda: courier.trouble)
    courier.close(PATIENCE_S)
    assert not courier._thread.is_alive()  # it does not go on trying
    stand.broken = ""
    assert stand.rounds == []
    assert len(stand.outbox) == 3
    stand.courier()
    eventually(lambda: stand.rounds == [0, 1, 2])


def test_closing_waits_no_longer_than_its_patience_for_a_log_that_hangs(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()

    def hang(records: Sequence[tuple[str, bytes]]) -> None:
        entered.set()
        assert released.wait(PATIENCE_S)
        raise LogError("at last")

    monkeypatch.setattr(stand, "append", hang)
    stand.put(range(1))
    courier = stand.courier()
    assert entered.wait(PATIENCE_S)
    courier.close(patience_s=0.1)
    assert courier._thread.is_alive()
    released.set()
    courier._thread.join(PATIENCE_S)
    assert not courier._thread.is_alive()
    assert len(stand.outbox) == 1


@pytest.mark.parametrize("fault", APPENDING, ids=lambda fault: fault.name.lower())
def test_through_any_fault_everything_is_delivered_once_and_in_order_of_the_chain(
    stand: Stand, fault: Fault
) -> None:
    faulty = FaultyLog(stand.log, fault, random.Random(0))
    courier = Courier(stand.open_outbox, faulty)
    courier.start()
    for start in range(0, 40, 4):
        stand.put(range(start, start + 4))
        courier.wake()
        eventually(lambda: len(stand.outbox) == 0)
    courier.close()
    assert faulty.num_faults > 0
    found = [decode(unpack(entry.record).body)[1].round for entry in stand.log.read(0)]
    assert sorted(found) == list(range(40))
    assert fault is Fault.REORDER or found == sorted(found)


def test_what_is_due_later_is_sent_when_the_clock_says_so(stand: Stand) -> None:
    clock = VirtualClock()
    courier = Courier(stand.open_outbox, stand, clock=clock)
    stand.couriers.append(courier)
    stand.outbox.put([group(round=0)], due_s=1800.0)
    clock.advance(1799.0)
    assert courier._until_s(stand.outbox.due_s) == 1.0
    stand.outbox.deliver(stand, clock.now_s())
    assert stand.rounds == []
    clock.advance(1800.0)
    courier.start()
    eventually(lambda: stand.rounds == [0])
    eventually(lambda: courier._until_s(stand.outbox.due_s) is None)


def test_no_error_ends_a_courier(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[Exception] = [
        OSError(28, "No space left on device"),
        sqlite3.OperationalError("database is locked"),
        ValueError("anything"),
        AssertionError(),
    ]
    usual = Outbox.deliver

    def deliver(self: Outbox, *arguments: object) -> None:
        if faults:
            raise faults[0]
        usual(self, *arguments)

    monkeypatch.setattr(Outbox, "deliver", deliver)
    courier = stand.courier()
    stand.put(range(3))
    courier.wake()
    while faults:
        words = str(faults[0]) or type(faults[0]).__name__
        eventually(lambda words=words: words in courier.trouble)
        faults.pop(0)
    eventually(lambda: stand.rounds == [0, 1, 2])
    eventually(lambda: courier.trouble == "")


def test_a_courier_whose_file_cannot_be_opened_says_so_and_goes_on_when_it_can(
    stand: Stand,
) -> None:
    stand.put(range(2))
    refused = [True]

    def open_outbox() -> Outbox:
        if refused:
            raise OutboxError("outbox.sqlite: disk is full")
        return stand.open_outbox()

    courier = Courier(open_outbox, stand)
    courier.start()
    stand.couriers.append(courier)
    eventually(lambda: "outbox.sqlite: disk is full" in courier.trouble)
    refused.clear()
    eventually(lambda: stand.rounds == [0, 1])


def test_a_courier_that_was_never_started_can_be_closed(stand: Stand) -> None:
    stand.put(range(3))
    Courier(stand.open_outbox, stand).close()
    assert (stand.rounds, len(stand.outbox)) == ([], 3)
