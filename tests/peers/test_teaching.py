"""What a peer takes from meetings, with real peers on a log in memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fakes import spread_crew
from motley.config import CrewConfig, Teach
from motley.exchange import MemoryLog
from motley.models.policy import Policy
from motley.peers.peer import Peer

from .test_peer import groups_on, learn, peers_of, share


def branching(folder: Path, **crew: object) -> CrewConfig:
    config = spread_crew(folder, group_size=2, problems_per_round=4, meet=1.0, **crew)
    return msgspec.structs.replace(config, teach=Teach(branch="drawn", success=1.5))


def about_to_branch(folder: Path) -> Peer:
    """A peer of a crew, at the first round in which it has something to continue."""
    peers = peers_of(branching(folder, rounds=12), MemoryLog(None))
    for _ in range(10):
        share(*peers)
        for peer in peers:
            learn(peer)
        for peer in peers:
            if peer.half.prefixes and peer.half.prefixes.due():
                return peer
    raise AssertionError("nobody failed what another solved")


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
    peer = about_to_branch(folder)
    asked = peer.half.ask()
    assert asked.branches
    with_them = peer.half.answered(asked).answers
    plain = asked._replace(problems=asked.problems[:2], prompts=asked.prompts[:2], branches=())
    without = peer.half.answered(plain).answers
    tokens = lambda answers: [[c.tokens for c in row] for row in answers[:2]]
    assert tokens(with_them) == tokens(without)


def test_asking_for_a_round_takes_nothing_until_it_is_kept(folder: Path) -> None:
    """So a round whose sampling was broken off is sampled again, the same."""
    peer = about_to_branch(folder)
    first, second = peer.half.ask(), peer.half.ask()
    assert first == second
    assert first.branches
    peer.half.keep(peer.half.draw())
    assert peer.half.prefixes is not None
    assert peer.half.prefixes.due() == []
