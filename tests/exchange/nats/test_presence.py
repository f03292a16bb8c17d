from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from fakes import identity
from motley.clock import VirtualClock
from motley.exchange.nats import presence as module
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import Names
from motley.exchange.nats.presence import SILENT_S, Beat, Heard, Presence, Voice
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
    assert hub.heard["a"].beat.at_s > first.beat.at_s
    a.close(Beat("left", 2))


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


def test_who_could_not_be_heard_while_we_were_away_was_not_silent(net: Net) -> None:
    hub, a = presence_of(net.connect(HUB)), presence_of(net.connect("a"), "a")
    heard = eventually(lambda: hub.heard.get("a"))
    a.stop()
    hub.heard["a"] = replace(heard, at_s=heard.at_s - SILENT_S - 1)
    assert hub.heard["a"].gone
    net.kill()
    net.restart()
    assert (hub.heard["a"].state, hub.heard["a"].beat) == ("starting", heard.beat)


# What is not believed: a server where everybody may send everything


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_server(tmp_path_factory.mktemp("open")) as found:
        yield found


class Stage:
    """A listener, and somebody who sends what they like."""

    def __init__(self, url: str) -> None:
        self.connections = [Connection(Login(url, name)) for name in ("listener", "sender")]
        self.presence = presence_of(self.connections[0])
        self._time = 100.0

    def send(self, peer: str, content: bytes) -> None:
        self.connections[1].publish(Names(CREW).presence(peer), content)

    def heard_after(self, peer: str) -> Heard | None:
        """What is known of a peer when everything sent before has arrived: a true beat of b comes
        last.
        """
        self._time += 1
        self.send("b", signed("b", identity("b"), Beat("waiting", 0, at_s=self._time)))
        eventually(
            lambda: (
                self.presence.heard["b"].beat.at_s == self._time
                if "b" in self.presence.heard
                else False
            )
        )
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


TRUE = Beat("sampling", 5, at_s=50.0)
LATER = Beat("left", 6, at_s=60.0)


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
    "no such state": signed("a", identity("a"), b'{"state": "asleep", "round": 6, "at_s": 60.0}'),
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


@pytest.mark.parametrize("at_s", [0.0, 49.9, 50.0])
def test_a_beat_that_is_not_newer_than_the_last_is_ignored(stage: Stage, at_s: float) -> None:
    stage.send("a", signed("a", identity("a"), TRUE))
    stage.send("a", signed("a", identity("a"), Beat("left", 6, at_s=at_s)))
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
    for name in ("stranger", HUB):
        stage.send(name, signed(name, identity(name), TRUE))
    stage.heard_after("b")
    assert set(stage.presence.heard) == {"b"}
