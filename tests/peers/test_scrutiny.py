"""What a peer makes of senders that lie, plant or break, in a crew of three."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from fakes import entry, identity, spread_crew, write_task
from motley.config import CrewConfig
from motley.exchange import Entry, Head, MemoryLog, unpack
from motley.exchange.log import tagged
from motley.learning.learner import StepReport
from motley.learning.waiting import Wait
from motley.peers.peer import Peer
from motley.peers.sampling import DrawnRound
from motley.records import Group, Rollout
from motley.trust.chain import MAX_MISSING
from motley.trust.standing import Suspicion

from .test_peer import learn, peers_of, share

Forge = Callable[[Group], Group]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def crew_of_three(folder: Path, **trust: object) -> CrewConfig:
    config = spread_crew(folder, ("full", "full", "full"), rounds=30, group_size=8)
    return msgspec.structs.replace(config, trust=msgspec.structs.replace(config.trust, **trust))


def publish_forged(peer: Peer, forge: Forge) -> None:
    drawn: DrawnRound = peer.half.draw()
    peer.half.keep(drawn._replace(groups=[forge(group) for group in drawn.groups]))
    peer.publish()


def with_rollouts(group: Group, change: Callable[[Rollout], Rollout]) -> Group:
    return msgspec.structs.replace(group, rollouts=tuple(map(change, group.rollouts)))


def shifted(nats: float) -> Forge:
    """Log-probs that are off by so much at every token."""

    def change(rollout: Rollout) -> Rollout:
        moved = tuple(min(0.0, q + nats) for q in rollout.logprobs)
        return msgspec.structs.replace(rollout, logprobs=moved)

    return lambda group: with_rollouts(group, change)


def rounds(peers: list[Peer], forge: Forge, count: int) -> list[StepReport | Wait]:
    """The last peer is hostile; what became of the first one's steps."""
    first, second, hostile = peers
    reports = []
    for _ in range(count):
        share(first, second)
        publish_forged(hostile, forge)
        reports.append(learn(first))
        learn(second)
    return reports


@pytest.mark.slow
def test_honest_senders_are_not_suspected(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder), MemoryLog())
    for _ in range(4):
        share(*peers)
        assert all(isinstance(learn(peer), StepReport) for peer in peers)
    assert [peer.scrutiny.suspicions() for peer in peers] == [{}, {}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("nats", [-1.0, 3.0])
def test_who_reports_false_log_probs_is_muted_and_no_longer_waited_for(
    nats: float, folder: Path
) -> None:
    peers = peers_of(crew_of_three(folder), MemoryLog())
    reports = rounds(peers, shifted(nats), 4)
    assert all(isinstance(report, StepReport) for report in reports)
    first, hostile = peers[0], peers[2].me.name
    word = "under-reported" if nats < 0 else "over-reported"
    assert first.scrutiny.suspicions()[hostile].muted == f"log-probs {word}"
    assert first.crewmates == [peers[0].me.name, peers[1].me.name]
    assert isinstance(reports[-1], StepReport)
    assert hostile not in reports[-1].senders
    share(*peers[:2])
    assert isinstance(learn(first), StepReport)  # it says nothing at all, and nobody waits


@pytest.mark.slow
def test_without_an_audit_every_log_prob_is_believed(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder, alpha=0.0), MemoryLog())
    rounds(peers, shifted(-1.0), 4)
    assert peers[0].scrutiny.suspicions() == {}


def test_three_forged_rewards_mute_a_sender(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder), MemoryLog())
    turned = lambda r: msgspec.structs.replace(r, reward=1.0 - r.reward)
    reports = rounds(peers, lambda group: with_rollouts(group, turned), 2)
    assert isinstance(reports[0], Wait)  # two were refused
    assert isinstance(reports[1], StepReport)
    assert peers[0].scrutiny.suspicions()[peers[2].me.name].muted == "reward"


# Chains that contradict themselves


def after_a_round(folder: Path) -> tuple[Peer, Peer, Head]:
    """The first of three peers, another one, and where that one began its chain."""
    peers = peers_of(crew_of_three(folder), MemoryLog())
    begun = peers[2].half.outbox.head
    share(*peers)
    assert isinstance(learn(peers[0]), StepReport)
    return peers[0], peers[2], begun


def in_place(head: Head, peer: Peer, rounds: range) -> list[Entry]:
    """Groups of some rounds, each signed for the same place of their sender's chain."""
    author, drawn = identity(peer.me.name), peer.half.draw().groups
    groups = [msgspec.structs.replace(g, round=round) for round in rounds for g in drawn]
    return [entry(group, author, head.counter, head.previous) for group in groups]


def copy_of(made: Entry, level: int) -> Entry:
    """The same record as anybody can write it: compressed in another way, under its tag."""
    sealed = unpack(made.record)
    frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(sealed.body)
    record = made.record[:1] + sealed.signature + frame
    return Entry(0, tagged(made.id, record), record)


def show(peer: Peer, *entries: Entry) -> None:
    peer.log.append([(one.id, one.record) for one in entries])
    peer.receive()


def test_three_records_in_one_place_of_its_chain_mute_a_sender(folder: Path) -> None:
    first, last, begun = after_a_round(folder)
    name = last.me.name
    show(first, *in_place(begun, last, range(1, 2)))
    assert first.scrutiny.suspicions()[name] == Suspicion(evidence=0.0, strikes=2.0)
    assert first.forgone() == [name]  # what was refused does not come again
    show(first, *in_place(begun, last, range(2, 3)))
    assert first.admission.refused == {(name, "fork"): 4}
    assert first.scrutiny.suspicions()[name].muted == "fork"
    assert name not in first.crewmates


def test_what_others_can_do_to_a_chain_mutes_nobody(folder: Path) -> None:
    first, last, begun = after_a_round(folder)
    name = last.me.name
    sent = [one for one in first.log.read(0) if one.id.startswith(name)]
    fork = in_place(begun, last, range(1, 2))[0]
    late = in_place(Head(begun.counter + 2 * MAX_MISSING, bytes(32)), last, range(3, 5))
    copies = {copy_of(one, level) for one in (fork, *sent) for level in (-5, -1, 1, 3, 19)}
    assert len(copies) >= 3 * len([fork, *sent])
    show(first, fork, *late, *copies)
    assert first.admission.refused == {
        (name, "fork"): 1,
        (name, "gap"): 4,
        (name, "replay"): len(copies),
    }
    assert first.scrutiny.suspicions()[name] == Suspicion(evidence=0.0, strikes=1.0)
    assert name in first.crewmates


@pytest.mark.slow
def test_a_sender_is_heard_again_when_its_time_is_over_and_judged_anew(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder, mute_rounds=2), MemoryLog())
    first, hostile = peers[0], peers[2].me.name
    rounds(peers, shifted(-1.0), 1)
    assert first.scrutiny.is_muted(hostile)
    honest = lambda group: group
    reports = rounds(peers, honest, 4)
    assert not first.scrutiny.is_muted(hostile)
    assert isinstance(reports[-1], StepReport)
    assert hostile in reports[-1].senders


@pytest.mark.slow
def test_a_pardon_makes_a_sender_awaited_again(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder), MemoryLog())
    rounds(peers, shifted(-1.0), 1)
    first, hostile = peers[0], peers[2].me.name
    assert hostile not in first.crewmates
    first.scrutiny.pardon(hostile)
    assert hostile in first.crewmates
    assert first.scrutiny.suspicions() == {}


@pytest.mark.slow
def test_a_phrase_that_one_sender_keeps_saying_is_withheld(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder, alpha=0.0), MemoryLog())  # its log-probs are not true
    first, hostile = peers[0], peers[2].me.name

    def planted(group: Group) -> Group:
        change = lambda r: msgspec.structs.replace(r, tokens=(7, 7, *r.tokens[2:]))
        return with_rollouts(group, change)

    for peer in peers[:2]:  # rewards are not the point here
        peer.admission.score = None
    reports = rounds(peers, planted, 5)
    seen = [r.senders for r in reports if isinstance(r, StepReport)]
    shares = [senders[hostile].number("withheld") for senders in seen if hostile in senders]
    assert shares, first.admission.refused
    assert max(share or 0.0 for share in shares) > 0.2


@pytest.mark.slow
def test_a_peer_goes_on_judging_from_its_state(folder: Path) -> None:
    log = MemoryLog()
    peers = peers_of(crew_of_three(folder), log)
    rounds(peers, shifted(-0.05), 3)
    first = peers[0]
    again = peers_of(crew_of_three(folder), log)[0]
    state = first.state()
    again.load_state(msgspec.json.decode(msgspec.json.encode(state), type=type(state)))
    assert again.scrutiny.state() == first.scrutiny.state()
    for sender in (peers[1].me.name, peers[2].me.name):
        assert again.scrutiny.habits.of(sender) == first.scrutiny.habits.of(sender)


@pytest.mark.slow
def test_which_group_is_audited_hangs_on_the_receivers_key(folder: Path) -> None:
    peers = peers_of(crew_of_three(folder), MemoryLog())
    first, second, third = peers
    chosen: set[frozenset[int]] = set()
    for _ in range(4):
        share(*peers)
        for peer in (first, second):
            peer.receive()
        waiting = [c for c in first.waiting if c.group.origin.peer == third.me.name]
        picked = [peer.scrutiny.audited(waiting) for peer in (first, second)]
        assert all(len(one) == 1 for one in picked)
        chosen.add(picked[0] | picked[1])
        for peer in peers:
            learn(peer)
    assert any(len(one) == 2 for one in chosen)
