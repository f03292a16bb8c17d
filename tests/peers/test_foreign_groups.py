"""Peers of three vocabularies that learn from each other over one log."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import UNSET

from fakes import spread_crew, write_task
from motley.config import CrewConfig
from motley.exchange import MemoryLog
from motley.learning.learner import StepReport
from motley.learning.readings import Reading
from motley.peers.peer import Peer
from motley.peers.scrutiny import Scrutiny

from .test_peer import learn, peers_of, share

MODELS = ("tiny:0.3m", "tiny:0.3m/bytes", "tiny:0.3m/pairs")


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CrewConfig:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = spread_crew(tmp_path, ("full",) * 3, rounds=9, group_size=6)
    peers = [
        msgspec.structs.replace(peer, name=model.partition("/")[2] or "words", model=model)
        for peer, model in zip(config.peer, MODELS, strict=True)
    ]
    return msgspec.structs.replace(config, peer=peers)


def weights(peer: Peer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in peer.learner.policy.trained()])


@pytest.mark.slow
def test_every_peer_learns_from_every_other(crew: CrewConfig) -> None:
    log = MemoryLog()
    peers = peers_of(crew, log, mixed=True)
    for _ in range(2):
        share(*peers)
        for peer in peers:
            before = weights(peer)
            report = learn(peer)
            assert isinstance(report, StepReport)
            assert set(report.senders) == {"words", "bytes", "pairs"}
            for name, sender in report.senders.items():
                assert (sender.span_tokens is UNSET) == (name == peer.me.name)
                assert sender.groups == 2
            assert {len(letters) for letters in report.fates.values()} == {6}
            assert bool((weights(peer) != before).any())
            assert peer.admission.refused == {}
            assert peer.scrutiny.suspicions() == {}


@pytest.mark.slow
def test_what_waits_and_what_was_heard_is_read_again_as_it_was(crew: CrewConfig) -> None:
    log = MemoryLog()
    peers = peers_of(crew, log, mixed=True)
    share(*peers)
    for peer in peers:
        learn(peer)
    share(*peers)
    peers[0].receive()
    state = peers[0].state()
    (again, *_) = peers_of(crew, MemoryLog(), mixed=True)
    again.log = log
    for (_, new), (_, old) in zip(
        again.learner.policy.trained(), peers[0].learner.policy.trained(), strict=True
    ):
        new.data.copy_(old.data)
    again.learner.optimiser.load_state_dict(deepcopy(peers[0].learner.optimiser.state_dict()))
    again.load_state(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state)))
    assert [c.group for c in again.waiting] == [c.group for c in peers[0].waiting]
    assert sum(isinstance(c.reading, Reading) for c in again.waiting) == 4
    assert again.scrutiny.habits == peers[0].scrutiny.habits
    first, second = learn(peers[0]), learn(again)
    assert first == second
    assert torch.equal(weights(peers[0]), weights(again))
    assert again.state() == peers[0].state()


def test_what_comes_of_a_muted_sender_is_let_go_though_it_came_together(
    crew: CrewConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are read together, and yet a sender that is muted meanwhile has none waiting."""
    log = MemoryLog()
    peers = peers_of(crew, log, mixed=True)
    share(*peers)
    reader = peers[0]
    # what the others sent is followed by a refusal for which one of them is muted
    monkeypatch.setattr(Scrutiny, "refused", lambda scrutiny, refused, now: ["bytes"])
    log.append([("bytes.7.0", b"no record")])
    reader.receive()
    assert {c.group.origin.peer for c in reader.waiting} == {"words", "pairs"}
    assert reader.waiting.dropped["bytes", "muted"] == 2
