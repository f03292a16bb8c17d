"""What a peer takes from meetings, with real peers on a log in memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from motley.config import CrewConfig, Teach
from motley.exchange import Log, MemoryLog
from motley.learning.learner import StepReport
from motley.learning.waiting import Wait
from motley.models.policy import Policy
from motley.peers.peer import Peer

from .test_peer import groups_on, learn, peers_of, share


def branching(folder: Path, **crew: object) -> CrewConfig:
    config = spread_crew(folder, group_size=2, problems_per_round=4, meet=1.0, **crew)
    return msgspec.structs.replace(config, teach=Teach(branch="drawn", success=1.5))


def about_to_branch(folder: Path, log: Log) -> list[Peer]:
    """The peers of a crew, at the first round in which just one has something to continue."""
    peers = peers_of(branching(folder, rounds=12), log)
    for _ in range(10):
        share(*peers)
        for peer in peers:
            learn(peer)
        if sum(len(peer.half.prefixes.due()) for peer in peers if peer.half.prefixes) == 1:
            return peers
    raise AssertionError("nobody failed what another solved")


@pytest.mark.slow
def test_what_the_model_has_no_room_for_is_not_continued_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = branching(folder, rounds=4)
    log = MemoryLog(None)
    peers = peers_of(config, log)
    # room for prompts and answers, and for no prefix between them
    longest = max(
        len(p.half.policy.prompts.ids(q)) for p in peers for q in p.half.problems("full0", 0)
    )
    monkeypatch.setattr(Policy, "max_positions", longest + config.sampling.max_tokens + 1)
    unfit = 0
    for _ in range(4):
        share(*peers)
        for peer in peers:
            report = learn(peer)
            unfit += report.met.unfit  # type: ignore[union-attr]
    assert unfit > 0
    assert not any(group.branch for group in groups_on(log))


def test_the_answers_of_a_round_are_the_same_with_and_without_branches(folder: Path) -> None:
    """Their random numbers are their own: only what was learned in between may change them."""
    peers = about_to_branch(folder, MemoryLog(None))
    peer = next(p for p in peers if p.half.prefixes and p.half.prefixes.due())
    asked = peer.half.ask()
    assert asked.branches
    with_them = peer.half.answered(asked).answers
    plain = asked._replace(problems=asked.problems[:2], prompts=asked.prompts[:2], branches=())
    without = peer.half.answered(plain).answers
    tokens = lambda answers: [[c.tokens for c in row] for row in answers[:2]]
    assert tokens(with_them) == tokens(without)


@pytest.mark.slow
def test_asking_for_a_round_takes_nothing_until_it_is_kept(folder: Path) -> None:
    """So a round whose sampling was broken off is sampled again, the same."""
    peers = about_to_branch(folder, MemoryLog(None))
    peer = next(p for p in peers if p.half.prefixes and p.half.prefixes.due())
    first, second = peer.half.ask(), peer.half.ask()
    assert first == second
    assert first.branches
    peer.half.keep(peer.half.draw())
    assert peer.half.prefixes is not None
    assert peer.half.prefixes.due() == []


def test_a_lockstep_peer_waits_for_its_own_continuations(folder: Path) -> None:
    """How fast its records come to the log must not decide what it learns from."""
    log, side = MemoryLog(None), MemoryLog(None)
    peers = about_to_branch(folder, log)
    peer = next(p for p in peers if p.half.prefixes and p.half.prefixes.due())
    for each in peers:
        each.half.sample()
        each.half.outbox.deliver(side)
    *answers, branch = [entry for entry in side.read(0) if entry.id.startswith(peer.me.name)]
    others = [entry for entry in side.read(0) if not entry.id.startswith(peer.me.name)]
    log.append([(entry.id, entry.record) for entry in [*answers, *others]])
    assert isinstance(learn(peer), Wait)
    log.append([(branch.id, branch.record)])
    report = learn(peer)
    assert isinstance(report, StepReport)
    assert report.met is not None
    assert report.met.branched == 1


@pytest.mark.slow
def test_nobody_waits_for_anothers_continuations(folder: Path) -> None:
    log, side = MemoryLog(None), MemoryLog(None)
    peers = about_to_branch(folder, log)
    peer = next(p for p in peers if p.half.prefixes and p.half.prefixes.due())
    (other,) = [p for p in peers if p is not peer]
    for each in peers:
        each.half.sample()
        each.half.outbox.deliver(side)
    *_, branch = [entry for entry in side.read(0) if entry.id.startswith(peer.me.name)]
    rest = [entry for entry in side.read(0) if entry.id != branch.id]
    log.append([(entry.id, entry.record) for entry in rest])
    assert isinstance(learn(other), StepReport)
    log.append([(branch.id, branch.record)])
    other.receive()
    assert not other.waiting.dropped
    assert not other.admission.refused
    assert len(other.waiting) == 0
