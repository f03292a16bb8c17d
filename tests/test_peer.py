"""One peer against a log it shares with others, without a crew around it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from fakes import FixedClock, spread_crew, write_task
from motley.config import CrewConfig
from motley.engines import TorchEngine
from motley.exchange import Log, MemoryLog, decode, encode
from motley.learning.learner import Learner
from motley.objectives import objective
from motley.peer import Peer
from motley.policies import initial_policy
from motley.tasks import load_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def peers_of(config: CrewConfig, log: Log) -> list[Peer]:
    task = load_task(config.crew.task, config.task)
    found = []
    for me in config.peer:
        policy = initial_policy(me, config.crew.seed)
        learner = Learner(policy, objective(config.crew.objective), config.learning, config.learning.lr)
        found.append(Peer(config=config, me=me, task=task, learner=learner, engine=TorchEngine(policy), log=log, clock=FixedClock()))
    return found


def test_a_published_group_says_who_made_it_how_and_when(folder: Path) -> None:
    log = MemoryLog()
    first, _ = peers_of(spread_crew(folder, sampling="temperature = 0.8"), log)
    sampled = first.sample()
    groups = [decode(record) for _, record in log.read(0)]
    assert [g.id for g in groups] == ["full0.0.0", "full0.0.1"]
    assert [g.problem for g in groups] == [p.id for p in first.problems("full0", 0)]
    for made in groups:
        assert (made.crew, made.created_s, made.origin.version) == ("spread", 1000.0, 0)
        assert made.origin.sampling == first.config.sampling
        assert made.origin.model == first.learner.policy.fingerprint
        assert [r.reward for r in made.rollouts] == first.task.score(
            [first.problems("full0", 0)[made.slot]] * 4, [first.learner.policy.vocabulary.decode(r.tokens) for r in made.rollouts]
        )
    assert sampled.num_rollouts == 8
    assert sampled.num_tokens == sum(len(r.tokens) for g in groups for r in g.rollouts)
    assert sampled.reward == pytest.approx(sum(r.reward for g in groups for r in g.rollouts) / 8)


def test_lockstep_waits_for_every_peers_groups(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    first.sample()
    assert first.receive_and_learn() is None
    second.sample()
    report = first.receive_and_learn()
    assert report is not None
    assert report.num_sequences == 16
    assert first.learner.policy.version == 1


def test_lockstep_leaves_the_next_rounds_groups_for_the_next_round(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    for peer in (second, second, first):
        peer.sample()
    assert first.receive_and_learn() is not None
    assert {c.group.round for c in first.waiting} == {1}
    assert first.receive_and_learn() is None


def test_parts_of_a_horizontal_group_wait_for_each_other(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, layout="horizontal"), MemoryLog())
    first.sample()
    assert first.receive_and_learn() is None
    second.sample()
    report = first.receive_and_learn()
    assert report is not None
    assert {name: m["groups"] for name, m in report.senders.items()} == {"full0": 4, "full1": 4}


def test_the_order_of_arrival_does_not_change_the_step(folder: Path) -> None:
    config = spread_crew(folder)
    reports = []
    for turns in ((0, 1), (1, 0)):
        peers = peers_of(config, MemoryLog())
        for turn in turns:
            peers[turn].sample()
        reports.append(peers[0].receive_and_learn())
    assert reports[0] == reports[1]


def test_with_pace_the_sampler_waits_while_too_much_is_waiting(folder: Path) -> None:
    log = MemoryLog()
    first, second = peers_of(spread_crew(folder, pace="async", learning='stale = "pace"\nmax_age = 1'), log)
    assert first.may_sample()
    for _ in range(3):
        second.sample()
    first.receive()
    assert len(first.waiting) == 6
    assert not first.may_sample()
    assert first.learn() is not None
    assert first.may_sample()


def test_with_drop_what_is_too_old_is_dropped_and_counted(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, pace="async", learning="max_age = 0"), MemoryLog())
    for _ in range(3):
        second.sample()
    first.receive()
    assert first.learn() is not None  # takes 4 of the 6 that wait
    for _ in range(2):
        first.sample()
    assert first.receive_and_learn() is not None
    assert first.dropped == Counter({("full1", "stale"): 2})
    assert first.waiting == []


def test_foreign_noise_on_the_log_is_counted_and_learning_goes_on(folder: Path) -> None:
    log = MemoryLog()
    first, second = peers_of(spread_crew(folder), log)
    log.append("noise", b"\x01noise")
    second.sample()
    forged = decode(log.read(1)[0][1])
    log.append("forged", encode(msgspec.structs.replace(forged, problem="another")))
    first.sample()
    assert first.receive_and_learn() is not None
    assert first.admission.refused == Counter({("unknown", "malformed"): 1, ("full1", "assignment"): 1})


def test_state_that_is_loaded_goes_on_as_the_peer_did(folder: Path) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, second = peers_of(config, log)
    log.append("noise", b"noise")
    for peer in (second, first, second):
        peer.sample()
    first.receive_and_learn()
    again = peers_of(config, log)[0]
    again.learner.policy.model.load_state_dict(first.learner.policy.model.state_dict())
    again.load_state(msgspec.json.decode(msgspec.json.encode(first.state())))
    assert again.state() == first.state()
    assert again.waiting == first.waiting
    assert [c.group.round for c in again.waiting] == [1, 1]


@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_group_that_stands_twice_on_the_log_does_not_stop_the_crew(layout: str, folder: Path) -> None:
    log = MemoryLog()
    first, second = peers_of(spread_crew(folder, layout=layout), log)
    second.sample()
    log.append("again", log.read(0)[0][1])
    first.sample()
    assert first.receive_and_learn() is not None


def test_a_peer_that_may_take_nothing_yet_waits(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, pace="async", learning="own_share = 1.0"), MemoryLog())
    for _ in range(2):
        second.sample()
    assert first.receive_and_learn() is None


def test_an_own_reward_that_is_not_a_number_is_an_error_at_once(folder: Path) -> None:
    (folder / "nan_reward.py").write_text("def nan(prompts, completions, **columns):\n    return [float('nan')] * len(completions)\n")
    first, _ = peers_of(spread_crew(folder, task="nan_reward:nan"), MemoryLog())
    with pytest.raises(ValueError, match="reward"):
        first.sample()
