"""What a peer with a valid key can do to the others on the hub's server: nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from nats.aio.client import Client

from motley.exchange import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Presence

from ..nats_server import CREW, Net, eventually, refused, settle
from .test_server import publish, subscribe

NAMES = Names(CREW)


def received(connection: Connection) -> int:
    """Bytes that the server has sent to somebody."""
    connection.call(settle)
    return int(connection._client.stats["in_bytes"])


def ask_for(connection: Connection, wanted: dict[str, object], reply: str, times: int) -> None:
    async def work(client: Client) -> None:
        for _ in range(times):
            await client.publish(NAMES.direct_get, json.dumps(wanted).encode(), reply)
        await settle(client)

    connection.call(work)


def test_an_answer_reaches_only_who_asked_for_it(net: Net) -> None:
    log, victim = net.log("a"), net.connect("b")
    assert subscribe(victim, "_INBOX.b.>") == ""
    log.append([("a.0.0", bytes(2**20))])
    before = received(victim)
    ask_for(log.connection, {"seq": 1}, "_INBOX.b.1", 20)
    assert [entry.id for entry in log.read(0)] == ["a.0.0"]  # those before it were answered, too
    assert received(victim) == before
    assert victim._client.stats["reconnects"] == 0


@pytest.mark.slow
def test_beats_of_megabytes_reach_nobody(net: Net) -> None:
    flooder, victim = net.connect("a"), net.connect("b")
    listening = Presence(victim, CREW, lambda peer, signature, message: True)
    before = received(victim)
    for _ in range(20):
        publish(flooder, NAMES.presence("a"), bytes(2**22))
    assert received(victim) - before < 2**16
    listening.stop()


@pytest.mark.usefixtures("endless")
def test_records_of_a_peer_reach_nobody_who_does_not_ask(net: Net) -> None:
    log, victim = net.log("a"), net.log("b").connection
    received(victim)
    before = victim._client.stats["in_msgs"]
    log.append([(f"a.0.{number}", b"x") for number in range(500)])
    received(victim)
    assert victim._client.stats["in_msgs"] == before


def test_a_key_has_a_few_connections_and_others_have_theirs(net: Net) -> None:
    for _ in range(4):
        net.connect("a")
    with pytest.raises(LogError, match="maximum account active connections exceeded"):
        net.connect("a", patience_s=0)
    net.log("b").append([("b.0.0", b"x")])


def test_a_connection_has_a_few_subscriptions(net: Net) -> None:
    a = net.connect("a")
    subscribe_to_many = lambda: [subscribe(a, f"_INBOX.a.{number}") for number in range(100)]
    with pytest.raises(LogError, match="closed"):
        subscribe_to_many()
    net.log("b").append([("b.0.0", b"x")])


@pytest.mark.slow
def test_who_does_not_read_what_it_asked_for_is_cut_off_alone(net: Net) -> None:
    log, other = net.log("a"), net.log("b")
    log.append([(f"a.0.{number}", bytes(2**20)) for number in range(8)])
    greedy = net.connect("a")
    assert subscribe(greedy, "_INBOX.a.>") == ""

    async def ask_and_stop_reading(client: Client) -> None:
        wanted = json.dumps({"seq": 1, "batch": 8, "next_by_subj": NAMES.everything}).encode()
        client._reading_task.cancel()
        for number in range(40):
            await client.publish(NAMES.direct_get, wanted, f"_INBOX.a.{number}")
        await client._flush_pending()

    greedy.call(ask_and_stop_reading)
    for number in range(5):
        other.append([(f"b.0.{number}", b"x")])
        assert len(other.read(8)) == number + 1
    assert other.connection._client.stats["reconnects"] == 0


def test_a_peer_whose_right_to_write_is_taken_keeps_its_connection_and_reads(net: Net) -> None:
    log = net.log("a")
    log.append([("a.0.0", b"x")])
    net.admit(replace(net.users[0], writes=()))
    net.server.reload()
    eventually(lambda: refused(log, "a.0.1"))
    assert "a.0.0" in [entry.id for entry in log.read(0)]
    assert log.connection._client.stats["reconnects"] == 0
