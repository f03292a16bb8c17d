from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fakes import identity
from motley.clock import VirtualClock
from motley.exchange.nats import presence as module
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import (
    BEAT_S,
    MOST_BEATS_PER_S,
    SILENT_S,
    Beat,
    Heard,
    Presence,
    Voice,
    begin_session,
    create_presence,
)
from motley.records import HUB
from motley.trust import Identity, verifies

from ..nats_server import CREW, Net, eventually, open_server, settle

PEERS = ("a", "b")


def verify(peer: str, signature: bytes, message: bytes) -> bool:
    return peer in PEERS and verifies(identity(peer).public, signature, message)


def presence_of(connection: Connection, me: str = "") -> Presence:
    made = Presence(connection, CREW, verify, Voice(me, identity(me).sign) if me else None)
    connection.call(settle)
    return made


def heard_in(listener: Presence, peer: str, state: str) -> Heard:
    """What is known of a peer as soon as it is in a state."""
    return eventually(
        lambda: heard if (heard := listener.heard.get(peer)) and heard.state == state else None
    )


@pytest.mark.slow
def test_what_a_peer_says_is_heard_by_peers_and_hub(net: Net) -> None:
    a, b, hub = (
        presence_of(net.connect(name), name if name in PEERS else "") for name in (*PEERS, HUB)
    )
    a.say(Beat("sampling", 3, 2))
    for listener in (b, hub):
        eventually(
            lambda listener=listener: (
                "a" in listener.heard and listener.heard["a"].state != "starting"
            )
        )
        heard = listener.heard["a"]
        assert (heard.beat.state, heard.beat.round, heard.beat.buffered) == ("sampling", 3, 2)
        assert (heard.state, heard.gone) == ("sampling", False)
    b.say(Beat("learning", 4))
    for listener in (a, hub):
        eventually(
            lambda listener=listener: (
                "b" in listener.heard and listener.heard["b"].state == "learning"
            )
        )
    a.close(Beat("left", 3))
    b.close(Beat("finished", 9))
    eventually(lambda: hub.heard["a"].state == "left" and hub.heard["b"].state == "finished")
    assert hub.heard["a"].gone
    assert hub.heard["b"].gone
    assert hub.heard["b"].beat.round == 9
    hub.stop()


def test_a_peer_is_heard_again_and_again_with_what_it_said_last(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    hub, a = presence_of(net.connect(HUB)), presence_of(net.connect("a"), "a")
    eventually(lambda: "a" in hub.heard)
    assert hub.heard["a"].state == "starting"
    a.say(Beat("sampling", 1))
    a.say(Beat("sampling", 2))  # not a new state: with the next beat
    first = eventually(lambda: hub.heard["a"] if hub.heard["a"].beat.round == 2 else None)
    eventually(lambda: hub.heard["a"].at_s > first.at_s)
    assert hub.heard["a"].beat.number > first.beat.number
    a.close(Beat("left", 2))


@pytest.mark.slow
def test_the_last_word_is_heard_though_the_connection_is_closed_behind_it(net: Net) -> None:
    hub, connection = presence_of(net.connect(HUB)), net.connect("a")
    a = presence_of(connection, "a")
    a.close(Beat("left", 1))
    connection.close()
    assert heard_in(hub, "a", "left").gone


def test_saying_something_without_a_connection_is_no_error(net: Net) -> None:
    connection = net.connect("a")
    a = presence_of(connection, "a")
    net.kill()
    a.say(Beat("sampling", 1))
    a.close(Beat("left", 1))
    connection.close()
    a._send()


@pytest.mark.parametrize("state", ["starting", "sampling", "learning", "waiting"])
def test_a_peer_not_heard_for_long_is_silent_and_gone(state: module.State) -> None:
    clock = VirtualClock()
    heard = Heard(Beat(state, 1), 0.0, clock)
    for now_s in (0.0, SILENT_S / 2, SILENT_S):
        clock.advance(now_s)
        assert (heard.state, heard.gone, heard.ago_s) == (state, False, now_s)
    clock.advance(SILENT_S + 0.1)
    assert (heard.state, heard.gone) == ("silent", True)


@pytest.mark.parametrize("state", ["left", "finished"])
def test_who_left_or_finished_is_gone_and_never_silent(state: module.State) -> None:
    clock = VirtualClock()
    heard = Heard(Beat(state, 1), 0.0, clock)
    for now_s in (0.0, 100 * SILENT_S):
        clock.advance(now_s)
        assert (heard.state, heard.gone) == (state, True)


@pytest.mark.slow
def test_who_could_not_be_heard_while_we_were_away_was_not_silent(net: Net) -> None:
    hub, a = presence_of(net.connect(HUB)), presence_of(net.connect("a"), "a")
    heard = eventually(lambda: hub.heard.get("a"))
    a.stop()
    hub.heard["a"] = replace(heard, at_s=heard.at_s - SILENT_S - 1)
    assert hub.heard["a"].gone
    net.kill()
    net.restart()
    eventually(lambda: hub.heard["a"].state == "starting")
    assert hub.heard["a"].beat == heard.beat


# What is not believed: a server where everybody may send everything


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_server(tmp_path_factory.mktemp("open")) as found:
        yield found


class Stage:
    """A listener, and somebody who sends what they like."""

    def __init__(self, url: str) -> None:
        self.connections = [Connection(Login(url, name)) for name in ("listener", "sender")]
        create_presence(self.connections[0], CREW)
        self.presence = presence_of(self.connections[0])
        self.presence.stop()  # it looks when it is told to

    def send(self, peer: str, content: bytes) -> None:
        """Have it looked at, too: the server keeps only the last."""
        self.connections[1].publish(Names(CREW).presence(peer), content)
        self.heard_after(peer)

    def heard_after(self, peer: str) -> Heard | None:
        """What is known of a peer when everything sent before was looked at."""
        self.connections[1].call(settle)
        self.presence._look()
        return self.presence.heard.get(peer)


@pytest.fixture
def stage(url: str) -> Iterator[Stage]:
    made = Stage(url)
    yield made
    for connection in made.connections:
        connection.close()


def signed(peer: str, key: Identity, beat: Beat | bytes, crew: str = CREW) -> bytes:
    content = beat if isinstance(beat, bytes) else msgspec.json.encode(beat)
    return key.sign(f"motley presence\n{Names(crew).presence(peer)}\n".encode() + content) + content


TRUE = Beat("sampling", 5, session=7, number=50)
LATER = Beat("left", 6, session=7, number=60)


def test_a_signed_beat_is_believed(stage: Stage) -> None:
    stage.send("a", signed("a", identity("a"), TRUE))
    heard = stage.heard_after("a")
    assert heard
    assert heard.beat == TRUE


LIES = {
    "unsigned": bytes(64) + msgspec.json.encode(LATER),
    "no signature": msgspec.json.encode(LATER),
    "empty": b"",
    "signature only": identity("a").sign(b""),
    "signed by another": signed("a", identity("b"), LATER),
    "signed by a stranger": signed("a", identity("stranger"), LATER),
    "signed for another name": signed("b", identity("a"), LATER),
    "signed for another crew": signed("a", identity("a"), LATER, crew="other"),
    "changed": signed("a", identity("a"), TRUE)[:64] + msgspec.json.encode(LATER),
    "no beat": signed("a", identity("a"), b'{"state": "left"}'),
    "no such state": signed("a", identity("a"), b'{"state": "asleep", "round": 6, "session": 8}'),
    "no json": signed("a", identity("a"), b"\xff\xfe"),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_nothing_else_is_believed(stage: Stage, content: bytes) -> None:
    stage.send("a", content)
    assert stage.heard_after("a") is None
    stage.send("a", signed("a", identity("a"), TRUE))
    stage.send("a", content)
    heard = stage.heard_after("a")
    assert heard
    assert heard.beat == TRUE


@pytest.mark.parametrize("place", [(0, 0), (6, 99), (7, 49), (7, 50)])
def test_a_beat_that_is_not_newer_than_the_last_is_ignored(
    stage: Stage, place: tuple[int, int]
) -> None:
    stage.send("a", signed("a", identity("a"), TRUE))
    stage.send("a", signed("a", identity("a"), Beat("left", 6, 0, *place)))
    heard = stage.heard_after("a")
    assert heard
    assert heard.beat == TRUE
    stage.send("a", signed("a", identity("a"), LATER))
    heard = stage.heard_after("a")
    assert heard
    assert heard.beat == LATER


def test_a_beat_sent_again_by_somebody_else_does_not_count_as_being_heard(stage: Stage) -> None:
    stage.send("a", signed("a", identity("a"), TRUE))
    first = stage.heard_after("a")
    stage.send("a", signed("a", identity("a"), TRUE))
    assert stage.heard_after("a") is first


def test_strangers_are_not_heard_however_well_they_sign(stage: Stage) -> None:
    for name in ("stranger", HUB, "b"):
        stage.send(name, signed(name, identity(name), TRUE))
    assert set(stage.presence.heard) - {"a"} == {"b"}  # an earlier test was a


# Large crews


def test_who_was_not_known_yet_is_heard_once_it_is_waited_for(stage: Stage) -> None:
    stage.presence._verify = lambda peer, *said: False  # before the first roster
    stage.send("b", signed("b", identity("b"), Beat("left", 3, session=10**18 + 1)))
    stage.presence._verify = verify
    stage.presence.heard.pop("b", None)  # of an earlier test
    assert stage.heard_after("b") is None
    stage.presence.await_beats(["b"])
    heard = stage.heard_after("b")
    assert heard
    assert heard.gone


def test_in_a_large_crew_a_speaker_looks_between_times_at_whom_it_waits_for(stage: Stage) -> None:
    listener = stage.presence
    listener._me = Voice("a", identity("a").sign)
    before = Beat("waiting", 1, session=10**18 + 2)
    for number in range(int(BEAT_S) * MOST_BEATS_PER_S):
        stage.connections[1].publish(Names(CREW).presence(f"p{number}"), b"of a stranger")
    stage.send("b", signed("b", identity("b"), before))  # this look was at everyone
    stage.send("b", signed("b", identity("b"), Beat("learning", 2, session=10**18 + 3)))
    assert listener.heard["b"].beat == before
    listener.await_beats(["b"])
    heard = stage.heard_after("b")
    assert heard
    assert heard.beat.round == 2


# Clocks


class WrongClock(VirtualClock):
    """Shows another time than it is."""

    shown_s = 1e9

    def now_s(self) -> float:
        return self.shown_s


def test_a_peer_whose_clock_was_set_back_or_was_far_ahead_once_is_heard_all_the_same(
    stage: Stage, tmp_path: Path
) -> None:
    clock = WrongClock()
    for number, shown_s in enumerate((1e9, 1e9 - 3600, 1e18, 1e9, 0.0)):
        clock.shown_s = shown_s
        voice = Voice("a", identity("a").sign, begin_session(tmp_path / "session", clock))
        speaker = Presence(stage.connections[1], CREW, verify, voice)
        speaker.close(Beat("learning", number))
        heard = stage.heard_after("a")
        assert heard
        assert heard.beat.round == number


def test_a_damaged_session_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "session").write_bytes(b"\xffnonsense")
    clock = VirtualClock()
    clock.advance(5.0)
    assert begin_session(tmp_path / "session", clock) == 5000
    assert begin_session(tmp_path / "session", clock) == 5001


def test_who_is_invited_anew_is_heard_whatever_the_name_said_before_with_another_key(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.send("a", signed("a", identity("a"), Beat("left", 6, session=10**18)))
    keys = {"a": identity("new"), "b": identity("b")}
    stage.presence._verify = lambda peer, *said: verifies(keys[peer].public, *said)
    stage.send("a", signed("a", keys["a"], TRUE))
    heard = stage.heard_after("a")
    assert heard
    assert heard.beat == TRUE


# Floods


@pytest.mark.slow
def test_a_beat_of_megabytes_is_not_kept_and_disturbs_nobody(net: Net) -> None:
    flooder, b = net.connect("a"), net.connect("b")
    listener = presence_of(b)
    flooder.publish(Names(CREW).presence("a"), bytes(2**22))
    flooder.call(settle)
    flooder.publish(
        Names(CREW).presence("a"), signed("a", identity("a"), Beat("learning", 1, session=1))
    )
    assert heard_in(listener, "a", "learning")
    assert b._client.stats["reconnects"] == 0
    assert b._client.stats["in_bytes"] < 2**16
    listener.stop()
