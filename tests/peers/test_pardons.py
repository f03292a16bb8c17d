"""Senders that are heard again: by a pardon, or because a crew was told to trust rewards."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fakes import entry, identity, spread_crew
from motley.config import CrewConfig
from motley.exchange import Head, Log, MemoryLog, unpack
from motley.exchange.log import tagged
from motley.learning.journal import Journal, WrittenStep
from motley.learning.learner import StepReport
from motley.peers.peer import Peer
from motley.peers.state import PeerState
from motley.records import Group
from peers.test_peer import begin, ids, json_copy, learn, peers_of, share, taken

ALL = [f"full{peer}.0.{slot}" for peer in (0, 1, 2) for slot in (0, 1)]
HONEST = ALL[:4]


@pytest.fixture
def config(folder: Path) -> CrewConfig:
    return spread_crew(folder, ("full",) * 3, rounds=6)


def inflated(peer: Peer) -> list[Group]:
    """What it would send of its next round, with better rewards than it got."""
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(msgspec.structs.replace(r, reward=r.reward + 1) for r in group.rollouts),
        )
        for group in peer.half.draw().groups
    ]


def send(peer: Peer, groups: list[Group]) -> None:
    peer.half.outbox.put(groups)
    peer.publish()


def send_forks(log: Log, peer: Peer, group: Group) -> None:
    """Three records that its own key signs for one place."""
    for number in range(3):
        other = msgspec.structs.replace(group, round=5, slot=0, created_s=5.0 + number)
        made = entry(other, identity(peer.me.name), 0, bytes(32) if number else b"\1" * 32)
        log.append([(tagged(made.id, made.record), made.record)])


def trusting(peer: Peer, log: Log, state: PeerState | None = None) -> Peer:
    """The peer in a new process, in a crew that was told to trust rewards."""
    crew = msgspec.structs.replace(peer.config.crew, check_rewards=False)
    config = msgspec.structs.replace(peer.config, crew=crew)
    again = next(p for p in peers_of(config, MemoryLog()) if p.me == peer.me)
    again.log = log
    again.load_state(json_copy(state or peer.state()))
    again.half.sampled_rounds = 1
    return again


# Rewards that are taken on trust


def test_who_is_shut_out_is_not_let_in_with_rewards_that_are_trusted(config: CrewConfig) -> None:
    log = MemoryLog()
    first, second, liar = peers_of(config, log)
    send(liar, inflated(liar))
    share(first, second)
    begin(config, log, "full2")
    first.receive()
    assert ids(taken(trusting(first, log).choose(closed=True))) == HONEST


def test_who_is_muted_for_something_else_is_not_let_in_either(config: CrewConfig) -> None:
    log = MemoryLog()
    first, second, liar = peers_of(config, log)
    groups = inflated(liar)
    send(liar, groups)
    send_forks(log, liar, groups[0])
    share(first, second)
    first.receive()
    again = trusting(first, log)
    assert again.scrutiny.is_muted("full2")
    assert ids(taken(again.choose(closed=True))) == HONEST


@pytest.mark.parametrize("honest_first", [False, True])
def test_of_two_groups_for_one_place_one_is_learned_from(
    honest_first: bool, config: CrewConfig
) -> None:
    log = MemoryLog()
    first, second, liar = peers_of(config, log)
    lies = inflated(liar)
    if honest_first:
        share(liar)
        head = liar.half.outbox.head
    else:
        send(liar, lies)
        head = liar.half.outbox.head
    for lie in lies:
        made = entry(
            msgspec.structs.replace(lie, created_s=lie.created_s + 1),
            identity("full2"),
            head.counter,
            head.previous,
        )
        log.append([(tagged(made.id, made.record), made.record)])
        head = Head(head.counter + 1, unpack(made.record).hash)
    share(first, second)
    first.receive()
    assert ids(taken(trusting(first, log).choose(closed=True))) == ALL


def test_trusted_groups_of_far_rounds_are_left_on_the_log(config: CrewConfig) -> None:
    log = MemoryLog()
    first, _, liar = peers_of(config, log)
    for number in range(4):
        liar.half.sampled_rounds = number
        send(liar, inflated(liar))
    first.receive()
    again = trusting(first, log)
    assert sorted({c.group.round for c in again.waiting}) == [0, 1]
    assert [one.place for one in again.early] == [
        ("full2", round, slot) for round in (2, 3) for slot in (0, 1)
    ]
    twice = trusting(again, log)
    assert (len(twice.waiting), len(twice.early)) == (4, 4)


def test_a_step_before_a_crash_is_taken_again_without_what_is_trusted_since(
    config: CrewConfig, tmp_path: Path
) -> None:
    log = MemoryLog()
    first, second, liar = peers_of(config, log)
    checkpoint = first.state()
    send(liar, inflated(liar))
    share(first, second)
    first.receive()
    assert first.awaited() == first.forgone() == ["full2"]
    chosen = taken(first.choose(closed=True))
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add(WrittenStep.of(0, first.cursor, True, chosen))
    again = trusting(first, log, checkpoint)
    done = journal.of(0)
    assert done
    again.receive(until=done.cursor)
    chosen = taken(again.choose(done.closed, again=done.positions))
    journal.add(WrittenStep.of(0, again.cursor, done.closed, chosen))  # or it is an error
    assert ids(chosen) == HONEST


# Pardons


def muted_ahead(config: CrewConfig, rounds: int) -> tuple[Peer, Peer]:
    """A peer, and a crewmate whose groups of some rounds it has let go, as it had muted it."""
    log = MemoryLog()
    first, second, *_ = peers_of(config, log)
    send_forks(log, second, peers_of(config, MemoryLog())[1].half.draw().groups[0])
    share(*[second] * rounds)
    first.receive()
    assert first.scrutiny.is_muted("full1")
    return first, second


def test_a_pardoned_sender_is_awaited_when_all_it_sends_may_come(folder: Path) -> None:
    first, second = muted_ahead(spread_crew(folder, rounds=6), 3)
    for round in range(3):
        if round == 1:
            first.scrutiny.pardon("full1")
        share(first)
        assert first.crewmates == ["full0"], "its groups of these rounds were let go"
        report = learn(first)
        assert isinstance(report, StepReport)
    share(first)
    first.receive()
    assert first.awaited() == ["full1"]
    share(second)
    report = learn(first)
    assert isinstance(report, StepReport)
    assert "full1" in report.senders


def test_what_was_let_go_before_a_pardon_is_known_after_a_restart(folder: Path) -> None:
    first, _ = muted_ahead(spread_crew(folder, rounds=6), 2)
    again = next(p for p in peers_of(first.config, MemoryLog()) if p.me == first.me)
    again.log = first.log
    again.load_state(json_copy(first.state()))
    again.scrutiny.pardon("full1")
    assert (again.missed, again.crewmates) == ({"full1": 1}, ["full0"])
