"""Peers that hear some of the others: what they wait for, take in, count and leave alone."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import identity, sealed_record, spread_crew, write_task
from motley.config import CrewConfig
from motley.exchange import Entry, MemoryLog, encode, unpack
from motley.exchange.wire import Header
from motley.learning.waiting import Take, Wait
from motley.peers.peer import Peer
from motley.records import HUB, Stamp
from peers.test_peer import ids, learn, peers_of, share


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def crew(folder: Path, peers: int = 6, **settings: Any) -> CrewConfig:
    settings = {"hear": 2, "rounds": 6, "problems_per_round": peers} | settings
    return spread_crew(folder, ("full",) * peers, **settings)


class CountingAdmission:
    """What a peer's admission was asked to judge."""

    def __init__(self, peer: Peer) -> None:
        self.senders: Counter[str] = Counter()
        self._admission = peer.admission
        peer.admission = self  # type: ignore[assignment]

    def admit(self, entry: Entry) -> Any:
        self.senders[entry.id.split(".")[0]] += 1
        return self._admission.admit(entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admission, name)


def test_a_round_waits_for_those_who_are_heard_and_for_nobody_else(folder: Path) -> None:
    log = MemoryLog()
    peers = peers_of(crew(folder), log)
    me = peers[0]
    heard = me.hearing.of(0)
    others = [peer for peer in peers if peer.me.name in heard and peer is not me]
    share(me, others[0])
    assert isinstance(learn(me), Wait)
    assert me.awaited() == [others[1].me.name]
    share(others[1])
    report = learn(me)
    assert not isinstance(report, Wait)
    assert sorted(report.senders) == sorted(heard)


def test_what_is_not_heard_is_never_judged_and_is_counted(folder: Path) -> None:
    log = MemoryLog()
    peers = peers_of(crew(folder), log)
    me = peers[0]
    judged = CountingAdmission(me)
    share(*peers)
    me.receive()
    heard = me.hearing.of(0)
    assert judged.senders == Counter({HUB: 2} | dict.fromkeys(heard, 1))
    assert me.hearing.passed_by == 6 - len(heard)
    assert me.cursor == len(log)
    assert not me.admission.refused
    assert {identity(n).public for n in heard} | {me.admission.hub} == set(me.admission.chains)


@pytest.mark.slow
def test_every_peer_hears_others_in_other_rounds_and_all_learn(folder: Path) -> None:
    peers = peers_of(crew(folder), MemoryLog())
    met: dict[str, set[str]] = {peer.me.name: set() for peer in peers}
    for round in range(6):
        share(*peers)
        for peer in peers:
            report = learn(peer)
            assert not isinstance(report, Wait)
            assert sorted(report.senders) == sorted(peer.hearing.of(round))
            assert report.num_sequences == 3 * 4
            met[peer.me.name] |= report.senders.keys()
    assert all(len(senders) > 3 for senders in met.values())
    assert not any(peer.admission.refused or peer.admission.missing for peer in peers)


@pytest.mark.slow
def test_async_takes_groups_by_the_round_they_are_of(folder: Path) -> None:
    log = MemoryLog()
    peers = peers_of(crew(folder, pace="async"), log)
    me = peers[0]
    for _ in range(3):
        share(*peers[1:])
    me.receive()
    waiting = {(c.group.origin.peer, c.group.round) for c in me.waiting}
    expected = {
        (name, round) for round in range(3) for name in me.hearing.of(round) if name != "full0"
    }
    assert waiting == expected
    assert me.hearing.passed_by == 3 * 5 - len(expected)
    assert isinstance(me.choose(), Wait)
    share(me)
    me.receive()
    chosen = me.choose()
    assert isinstance(chosen, Take)
    assert len(chosen.groups) == 3  # as many as of three peers
    assert [c.own for c in chosen.groups].count(True) == 1


@pytest.mark.slow
def test_a_peer_that_is_restored_goes_on_bit_for_bit(folder: Path) -> None:
    log = MemoryLog()
    config = crew(folder)
    peers = peers_of(config, log)
    for _ in range(2):
        share(*peers)
        for peer in peers:
            learn(peer)
    share(*peers)
    me = peers[0]
    me.receive()
    again = peers_of(config, log)[0]
    again.load_state(me.state())
    again.learner.policy.model.load_state_dict(me.learner.policy.model.state_dict())
    again.learner.optimiser.load_state_dict(deepcopy(me.learner.optimiser.state_dict()))
    again.half.refresh()
    assert again.state() == me.state()
    first, second = learn(me), learn(again)
    assert not isinstance(first, Wait)
    assert not isinstance(second, Wait)
    assert first.loss == second.loss
    pairs = zip(
        me.learner.policy.model.parameters(), again.learner.policy.model.parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert again.state() == me.state()
    assert again.hearing.passed_by == me.hearing.passed_by > 0


@pytest.mark.slow
def test_a_sender_cannot_be_heard_by_another_rounds_id(folder: Path) -> None:
    """Its record of a round that is not heard, put under the id of one that is."""
    side, log = MemoryLog(), MemoryLog()
    config = crew(folder, pace="async")
    liar = peers_of(config, side)[5]
    me = peers_of(config, log)[0]
    heard = [round for round in range(6) if me.hearing.hears("full5", round)]
    unheard = [round for round in range(6) if not me.hearing.hears("full5", round)]
    while liar.half.sampled_rounds <= unheard[0]:
        share(liar)
    record = next(e.record for e in side.read(0) if e.id == f"full5.{unheard[0]}.0")
    log.append([(f"full5.{heard[0]}.0", record)])
    me.receive()
    assert not list(me.waiting)
    assert me.admission.refused == {("full5", "subject"): 1}


def test_what_is_passed_by_may_be_anything_at_all(folder: Path) -> None:
    log = MemoryLog()
    me = peers_of(crew(folder), log)[0]
    out = next(name for name in me.config.authors if name not in me.hearing.of(0))
    log.append([(f"{out}.0.0", b"\xff" * 10_000), (f"{out}.0.0.0123456789abcdef", b"")])
    me.receive()
    assert me.hearing.passed_by == 2
    assert not me.admission.refused
    assert not me.scrutiny.standing.strikes


def test_a_fork_is_seen_where_both_sides_of_it_are_heard(folder: Path) -> None:
    """Two records that name the same counter, in rounds that are heard."""
    side, log = MemoryLog(), MemoryLog()
    config = crew(folder, peers=4, rounds=20, problems_per_round=4, pace="async", lossless=True)
    liar = peers_of(config, side)[3]
    me = peers_of(config, log)[0]
    heard = [round for round in range(20) if me.hearing.hears("full3", round)][:2]
    while liar.half.sampled_rounds <= heard[1]:
        share(liar)
    records = {e.id: e.record for e in side.read(0)}
    first, second = (f"full3.{round}.0" for round in heard)
    header = Header.of(unpack(records[second]).body)
    stamp = Stamp(key=header.stamp.key, counter=heard[0], previous=header.stamp.previous)
    forged = sealed_record(encode(header.content(), stamp, lossless=True), identity("full3"))
    log.append([(first, records[first]), (second, forged)])
    me.receive()
    assert me.admission.refused == {("full3", "fork"): 1}
    assert ids(me.waiting) == [first]


@pytest.mark.slow
def test_what_a_learner_keeps_of_habits_does_not_grow_with_the_crew(folder: Path) -> None:
    peers = peers_of(crew(folder, peers=12, hear=1), MemoryLog())
    for _ in range(6):
        share(*peers)
        for peer in peers:
            learn(peer)
    me = peers[0]
    senders = {name for round in range(6) for name in me.hearing.of(round)}
    assert len(senders) > 4
    assert len(me.scrutiny.habits._windows) == 4  # of two rounds, each with itself and another
    assert me.me.name in me.scrutiny.habits._windows
    assert me.scrutiny._heard.keys() == me.scrutiny.habits._windows.keys()
