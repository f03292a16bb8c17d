from __future__ import annotations

import itertools
import math
import random

import pytest

from motley.clock import VirtualClock
from motley.exchange import MemoryLog
from motley.exchange.arriving import ArrivingLog
from motley.links import Delay, Link, Weather

LOGNORMAL = Delay(shape="lognormal", low_s=60, high_s=1920)


class Far:
    """A log, and a reader at the end of a link, which reads on from its cursor."""

    def __init__(self, link: Link, seed: str = "0/reader") -> None:
        self.clock, self.log, self.cursor = VirtualClock(), MemoryLog(), 0
        self.weather = Weather(link, seed)
        self.seen = ArrivingLog(self.log, self.weather, self.clock)
        self.arrived: dict[str, float] = {}

    def append(self, *ids: str) -> None:
        self.log.append([(id, id.encode()) for id in ids])

    def read(self, sender: str = "") -> list[str]:
        """What a peer's `receive` would take in at this moment."""
        found = []
        while entries := self.seen.read(self.cursor, sender=sender):
            assert [e.record for e in entries] == [e.id.encode() for e in entries]
            self.cursor = entries[-1].position
            found += [e.id for e in entries]
        self.arrived |= dict.fromkeys(found, self.clock.now_s())
        return found

    def until(self, to_s: float) -> None:
        """Let time pass, and read whenever something arrives."""
        while self.seen.next_s <= to_s:
            self.clock.advance(self.seen.next_s)
            self.read()
        self.clock.advance(to_s)


def test_a_record_is_there_when_its_delay_is_over_and_not_before() -> None:
    far = Far(Link(delay=10.0))
    far.append("a.0.0")
    assert (far.read(), far.seen.next_s) == ([], 10.0)
    far.clock.advance(9.999)
    assert (far.read(), far.seen.next_s) == ([], 10.0)
    far.clock.advance(10.0)
    assert (far.read(), far.seen.next_s) == (["a.0.0"], math.inf)
    assert far.read() == []


def test_looking_again_does_not_begin_the_delay_again() -> None:
    far = Far(Link(delay=10.0))
    far.append("a.0.0")
    for at_s in range(10):
        far.clock.advance(float(at_s))
        assert far.read() == []
    far.clock.advance(10.0)
    assert far.read() == ["a.0.0"]


def test_a_delay_begins_when_the_record_could_first_be_seen() -> None:
    far = Far(Link(delay=10.0))
    far.append("a.0.0")
    far.clock.advance(50.0)
    assert (far.read(), far.seen.next_s) == ([], 60.0)
    far.append("a.0.1")
    far.clock.advance(55.0)
    assert (far.read(), far.seen.next_s) == ([], 60.0)
    far.until(100.0)
    assert far.arrived == {"a.0.0": 60.0, "a.0.1": 65.0}


def test_each_record_takes_the_delay_that_its_name_gets_and_the_order_stays() -> None:
    far = Far(Link(delay=LOGNORMAL))
    ids = [f"a.{number}.0" for number in range(30)]
    for number, id in enumerate(ids):
        far.append(id)
        far.until(20.0 * number)
        far.read()
    far.until(1e6)
    assert list(far.arrived) == ids
    began_s = [20.0 * number for number in range(30)]
    alone_s = [far.weather.fetched(id, at_s) for id, at_s in zip(ids, began_s, strict=True)]
    assert list(far.arrived.values()) == pytest.approx([max(alone_s[: n + 1]) for n in range(30)])
    # the order was at stake
    assert any(later < earlier for earlier, later in itertools.pairwise(alone_s))


def test_two_readers_have_two_links() -> None:
    ids = [f"a.{number}.0" for number in range(5)]
    found = []
    for seed in ("0/reader", "0/other", "0/reader"):
        far = Far(Link(delay=LOGNORMAL), seed)
        far.append(*ids)
        far.read()
        far.until(1e6)
        found.append(far.arrived)
    assert found[0] == found[2] != found[1]


def test_records_are_lost_and_come_again_and_wait_for_an_outage_to_end() -> None:
    far = Far(Link(delay=10.0, loss=0.5, outages=((25.0, 100.0),)))
    far.append(*(f"a.{number}.0" for number in range(12)))
    far.read()
    far.until(1e4)
    assert len(far.arrived) == 12
    assert set(far.arrived.values()) <= {10.0, 20.0, 100.0, 110.0, 120.0, 130.0, 140.0}
    assert max(far.arrived.values()) >= 100.0


def test_a_link_that_is_instant_shows_the_log_as_it_is() -> None:
    far = Far(Link())
    far.append("a.0.0", "a.0.1")
    assert far.read() == ["a.0.0", "a.0.1"]
    assert far.seen.next_s == math.inf


def test_what_had_arrived_before_a_restart_is_there_at_once() -> None:
    far = Far(Link(delay=10.0))
    far.append("a.0.0", "a.0.1", "a.0.2")
    far.seen.here = 2
    far.clock.advance(1000.0)
    assert (far.read(), far.seen.next_s) == (["a.0.0", "a.0.1"], 1010.0)
    far.until(2000.0)
    assert far.arrived["a.0.2"] == 1010.0


def test_one_senders_records_have_their_delays_too() -> None:
    far = Far(Link(delay=10.0))
    far.append("a.0.0", "b.0.0", "a.0.1")
    assert far.read(sender="a") == []
    far.clock.advance(10.0)
    assert far.read(sender="a") == ["a.0.0", "a.0.1"]


def test_as_many_are_read_as_are_asked_for() -> None:
    far = Far(Link())
    far.append(*(f"a.{number}.0" for number in range(5)))
    assert [e.id for e in far.seen.read(1, limit=2)] == ["a.1.0", "a.2.0"]


def test_nothing_arrives_twice_is_skipped_or_comes_early_whatever_is_read_when() -> None:
    rng = random.Random(0)
    far = Far(Link(delay=Delay(shape="exponential", mean_s=5), loss=0.2))
    appended_s: dict[str, float] = {}
    for number in range(200):
        far.until(far.clock.now_s() + rng.choice([0.0, 0.1, 3.0]))
        if rng.random() < 0.7:
            far.append(f"a.{number}.0")
            appended_s[f"a.{number}.0"] = far.clock.now_s()
        far.read()
    far.until(1e6)
    assert list(far.arrived) == list(appended_s)
    assert all(far.arrived[id] >= far.weather.fetched(id, at_s) for id, at_s in appended_s.items())


def test_more_records_than_one_read_shows_are_on_their_way_at_once() -> None:
    far = Far(Link(delay=10.0))
    far.append(*(f"a.{number}.0" for number in range(1500)))
    far.read()
    far.until(100.0)
    assert set(far.arrived.values()) == {10.0}
