"""A participant's turns, with a role and a station that are made up: no hub, no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import group, identity
from motley.clock import VirtualClock
from motley.distributed.enrolment import RETRY_S, SAID_AGAIN_S, Joining
from motley.distributed.participant import WAIT_S, Participant, Station, Witness, apart_s
from motley.exchange import LogError, MemoryLog, Outbox, Signer
from motley.exchange.log import tagged
from motley.exchange.nats.connection import NotAdmittedError
from motley.exchange.nats.presence import Beat
from motley.links import Link, Weather
from motley.trust import stamp_of


class FakeStation:
    """Everything a participant asks of its station, and what was asked."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.config = SimpleNamespace(peer=["a", "b"])
        self.outbox: list[str] = []
        self.told: list[tuple[str, int]] = []
        self.waits: list[float] = []
        self.trouble, self.shut_out, self.last_word = "", False, Beat("starting", 0)
        self.events: list[str] = []
        self.log = self.connection = self.courier = self.presence = self
        self.me, self.witness = SimpleNamespace(name="a"), Witness()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def tell(self, state: Any, rounds: int) -> None:
        self.told.append((state, rounds))

    def beat(self, state: Any, rounds: int) -> Beat:
        return Beat(state, rounds, len(self.outbox))

    def close(self, beat: Beat | None = None) -> None:
        self.events.append("the courier" if beat is None else f"said {beat.state}")


class FakeRole:
    """Takes the turns of a list: a line, nothing, or an error of the log."""

    def __init__(self, turns: list[int | LogError | None]) -> None:
        self.turns, self.finished_rounds = turns, 0

    @property
    def finished(self) -> bool:
        return not self.turns

    def turn(self) -> dict[str, int] | None:
        made = self.turns.pop(0)
        if isinstance(made, LogError):
            raise made
        if made is None:
            return None
        self.finished_rounds = made
        return {"round": made}

    def waits_for(self) -> str:
        return "waiting for others"

    def last_lines(self) -> Iterator[dict[str, int]]:
        yield {"round": -1}

    def save(self) -> None: ...


def participant(*turns: int | LogError | None) -> tuple[Participant, FakeStation, ExitStack]:
    station, held = FakeStation(), ExitStack()
    held.callback(station.events.append, "gave back")
    return Participant(station, FakeRole(list(turns)), held), station, held  # type: ignore[arg-type]


def test_it_yields_lines_and_words_and_waits_between_them() -> None:
    one, station, _ = participant(1, None, LogError("no answer"), None, 2)
    assert list(one.rounds()) == [
        {"round": 1},
        "waiting for others",
        "no answer",
        "waiting for others",
        {"round": 2},
        {"round": -1},
    ]
    assert station.told == [("waiting", 1)] * 3
    assert station.waits == [WAIT_S] * 3


def test_words_say_what_is_wrong_first_and_what_is_kept_last() -> None:
    one, station, _ = participant(None)
    station.outbox = ["a", "b"]
    station.trouble = "no connection"
    assert one.status == "no connection; 2 records wait to be sent"
    station.shut_out = True
    with pytest.raises(ValueError, match="the hub has shut this peer out"):
        one.status  # noqa: B018


def test_a_roster_that_shuts_it_out_ends_it_once_the_log_can_be_read() -> None:
    one, station, _ = participant(None)
    station.witness.rely_on(SimpleNamespace(revoked={"b"}))
    assert one.status == "waiting for others"
    station.witness.rely_on(SimpleNamespace(revoked={"a"}))
    station.trouble = "no connection"  # what it has read may not be the last word
    assert one.status == "no connection"
    station.trouble = ""
    with pytest.raises(ValueError, match="the hub has shut this peer out"):
        one.status  # noqa: B018


def test_it_stays_until_all_it_made_is_sent() -> None:
    one, station, _ = participant(1)
    station.outbox = ["a"]
    rounds = one.rounds()
    assert [next(rounds), next(rounds)] == [{"round": 1}, {"round": -1}]
    for _ in range(3):
        assert next(rounds) == "waiting for others; 1 records wait to be sent"
    assert station.clock.now_s() == 2 * WAIT_S
    station.outbox.clear()
    assert next(rounds, "over") == "over"


@pytest.mark.parametrize(("turns", "word"), [((), "finished"), ((1,), "left")])
def test_it_leaves_with_a_last_word_and_gives_back_what_it_holds(
    turns: tuple[int, ...], word: str
) -> None:
    one, station, _ = participant(*turns)
    one.close()
    assert station.events == ["the courier", f"said {word}", "gave back"]


# Going on behind what the log has


def station_of(log: MemoryLog, outbox: Outbox, delay: float = 0.0) -> Station:
    link = Link(delay=delay)
    return Station(
        joining=SimpleNamespace(patiently=lambda work: work(), say=lambda text: None),
        config=SimpleNamespace(weather=lambda name: Weather(link, name)),
        me=SimpleNamespace(name="a"),
        log=SimpleNamespace(
            records_of=lambda name: log.read(0, sender=name),
            last_of=lambda name: max(log.read(0, sender=name), default=None),
        ),
        outbox=outbox,
        **dict.fromkeys(("run", "witness", "presence", "blobs", "courier")),
    )  # type: ignore[arg-type]


def outbox_of_a(num_records: int) -> Outbox:
    """Of a peer that has made so many records of one chain, wherever it is copied to."""
    outbox = Outbox(None, Signer(identity("a").public, identity("a").sign))
    outbox.put([group(round=number) for number in range(num_records)])
    return outbox


def made_by_a(num_records: int) -> list[tuple[str, bytes]]:
    log = MemoryLog()
    outbox_of_a(num_records).deliver(log)
    return [(one.id, one.record) for one in log.read(0)]


def counters(log: MemoryLog) -> list[int]:
    return [stamp_of(one)[0].counter for one in log.read(0) if one.id != "a.junk"]


@pytest.mark.parametrize("kept", range(6))
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 3, 4, 1, 2), (4, 3, 2, 1, 0)])
def test_an_older_outbox_goes_on_behind_all_that_is_on_the_log(
    order: tuple[int, ...], kept: int
) -> None:
    log, made, outbox = MemoryLog(), made_by_a(5), outbox_of_a(kept)
    log.append([made[number] for number in order])
    mended = station_of(log, outbox, delay=1.0).mend_outbox()
    assert mended
    assert stamp_of(mended.last)[0].counter == 4
    assert len(mended.forgotten) == (5 if kept < 5 else 0)
    outbox.put([group(round=7)])
    outbox.deliver(log)
    assert sorted(counters(log)) == [0, 1, 2, 3, 4, 5]


def test_what_others_wrote_under_its_name_does_not_hide_what_it_sent() -> None:
    log, outbox = MemoryLog(), outbox_of_a(0)
    log.append([*made_by_a(5), ("a.junk", b"junk")])
    mended = station_of(log, outbox).mend_outbox()
    assert mended
    assert outbox.head.counter == 5
    alone = MemoryLog()
    alone.append([("a.junk", b"junk")])
    assert station_of(alone, outbox_of_a(0)).mend_outbox() is None


@pytest.mark.parametrize("kept", range(6))
def test_a_copy_of_what_it_sent_long_ago_does_not_hide_what_it_sent_since(kept: int) -> None:
    log, made, outbox = MemoryLog(), made_by_a(5), outbox_of_a(kept)
    log.append(made)
    id, record = made[1]
    log.append([(tagged(id, record), record)])
    assert station_of(log, outbox).mend_outbox()
    outbox.put([group(round=7)])
    outbox.deliver(log)
    assert sorted(counters(log)) == [0, 1, 1, 2, 3, 4, 5]


# Waiting for a hub that is away


def joining(tmp_path: Path, said: list[str], clock: VirtualClock) -> Joining:
    return Joining(None, None, identity("a"), tmp_path, said.append, clock)  # type: ignore[arg-type]


def test_what_needs_the_hub_is_tried_again_and_again_and_said_once_a_minute(
    tmp_path: Path,
) -> None:
    said, clock = list[str](), VirtualClock()

    def work() -> str:
        if clock.now_s() < 2.5 * SAID_AGAIN_S:
            raise LogError(f"away at {clock.now_s():.0f}")
        return "there"

    assert joining(tmp_path, said, clock).patiently(work) == "there"
    times = [0, SAID_AGAIN_S + RETRY_S, 2 * (SAID_AGAIN_S + RETRY_S)]
    assert said == [f"away at {at_s:.0f}; trying again" for at_s in times]


def test_who_is_not_admitted_is_not_patient(tmp_path: Path) -> None:
    def work() -> None:
        raise NotAdmittedError("unknown key")

    clock = VirtualClock()
    with pytest.raises(NotAdmittedError):
        joining(tmp_path, [], clock).patiently(work)
    assert clock.now_s() == 0.0


def test_in_a_large_crew_who_waits_looks_less_often() -> None:
    assert apart_s(3) == 0.0
    assert apart_s(200) == 2 * apart_s(100) == 0.5
