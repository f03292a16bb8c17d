"""One peer against a log it shares with others, without a crew around it."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes import FixedClock, identity, spread_crew
from motley.config import CrewConfig, config_text, parse_config
from motley.engines import Engine, TorchEngine
from motley.engines.engine import Completion
from motley.exchange import Entry, Log, LogError, Mark, MemoryLog, Outbox, Signer, decode, unpack
from motley.exchange.sections import STEPS_PER_NAT
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate
from motley.learning.waiting import Take, Wait
from motley.models.opening import initial_policy
from motley.objectives import objective
from motley.peers.peer import Peer
from motley.peers.reading import MOST_BYTES, MOST_ENTRIES
from motley.peers.sampling import Answered, SamplerHalf
from motley.peers.scrutiny import ScrutinyState
from motley.peers.state import PeerState
from motley.records import HUB, Charter, Content, Group, Problem, Rollout, Roster, Sampling
from motley.tasks import Scorer, Task, load_task
from motley.trust.steadiness import UnsteadyRewardError


class NotingEngine:
    """Keeps what it sampled, call by call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.made: list[list[list[Completion]]] = []

    def refresh(self) -> None:
        self.engine.refresh()

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        self.made.append(self.engine.sample(prompts, num_samples, sampling, seed))
        return self.made[-1]


def outbox_of(name: str, folder: Path | None = None, lossless: bool = False) -> Outbox:
    return Outbox(
        folder and folder / f"{name}.db",
        Signer(identity(name).public, identity(name).sign),
        lossless,
    )


def peers_of(
    config: CrewConfig, log: Log, outboxes: Path | None = None, mixed: bool = False
) -> list[Peer]:
    """The peers of a crew whose hub has begun the log."""
    begin(config, log)
    task = load_task(config.crew.task, config.task)
    peers = []
    for me in config.peer:
        policy = initial_policy(me, config.crew.seed)
        row, rules = objective(config.crew.objective), config.learning
        half = SamplerHalf(
            config=config,
            me=me,
            task=task,
            policy=policy,
            engine=NotingEngine(TorchEngine(policy)),
            outbox=outbox_of(me.name, outboxes, config.crew.lossless),
            clock=FixedClock(),
            weather=config.weather(me.name),
            mixed=mixed,
        )
        peers.append(Peer(half, Learner(policy, row, rules, rules.lr), log, identity(HUB).public))
    return peers


def begin(config: CrewConfig, log: Log, *revoked: str) -> None:
    """What the hub publishes: a charter, a roster, and another roster where peers are shut out."""
    name, keys = config.crew.name, {p.name: identity(p.name).public for p in config.peer}
    said: list[Content] = [
        Charter(crew=name, config=config_text(config), task=""),
        Roster(crew=name, number=0, keys=keys),
    ]
    if revoked:
        said.append(
            Roster(
                crew=name,
                number=1,
                keys={k: v for k, v in keys.items() if k not in revoked},
                revoked=revoked,
            )
        )
    outbox = outbox_of(HUB)
    outbox.put(said)
    outbox.deliver(log)


def share(*peers: Peer) -> None:
    """Every peer's next round, in turn."""
    for peer in peers:
        peer.half.sample()
        peer.publish()


def learn(peer: Peer, closed: bool = False) -> StepReport | Wait:
    peer.receive()
    result = peer.learn(closed)
    if isinstance(result, Wait):
        return result
    assert result.report is not None
    return result.report


def taken(chosen: Take | Wait) -> tuple[Candidate, ...]:
    assert isinstance(chosen, Take)
    return chosen.groups


def groups_on(log: Log) -> list[Group]:
    contents = [decode(unpack(entry.record).body)[1] for entry in log.read(0)]
    return [content for content in contents if isinstance(content, Group)]


def carry(side: Log, log: Log, *ids: str) -> None:
    """Bring some of the records of one log to another."""
    records = {entry.id: entry.record for entry in side.read(0)}
    log.append([(id, records[id]) for id in ids])


def ids(candidates: Iterable[Candidate]) -> list[str]:
    return sorted(c.group.id for c in candidates)


# Sampling


def test_a_published_group_says_who_made_it_how_and_when(folder: Path) -> None:
    log = MemoryLog()
    first, _ = peers_of(spread_crew(folder, sampling="temperature = 0.8"), log)
    sampled = first.half.sample()
    assert groups_on(log) == []
    first.publish()
    groups = groups_on(log)
    assert (
        [g.id for g in groups]
        == ["full0.0.0", "full0.0.1"]
        == [entry.id for entry in log.read(0)[2:]]
    )
    assert [g.problem for g in groups] == [p.id for p in first.half.problems("full0", 0)]
    for made in groups:
        assert (made.crew, made.created_s, made.origin.version) == ("spread", 1000.0, 0)
        assert made.origin.sampling == first.config.sampling
        assert made.origin.model == first.learner.policy.fingerprint
        assert [r.reward for r in made.rollouts] == pytest.approx(
            first.half.task.score(
                [first.half.problems("full0", 0)[made.slot]] * 4,
                [first.learner.policy.vocabulary.decode(r.tokens) for r in made.rollouts],
            ),
            rel=1e-6,  # float32
        )
    assert sum(len(g.rollouts) for g in groups) == 8
    assert sampled.fresh
    assert sampled.num_tokens == sum(len(r.tokens) for g in groups for r in g.rollouts)
    assert sampled.reward == pytest.approx(sum(r.reward for g in groups for r in g.rollouts) / 8)


def test_an_own_reward_that_is_not_a_number_is_an_error_at_once(folder: Path) -> None:
    (folder / "nan_reward.py").write_text(
        "def nan(prompts, completions, **columns):\n    return [float('nan')] * len(completions)\n"
    )
    first, _ = peers_of(spread_crew(folder, task="nan_reward:nan"), MemoryLog())
    with pytest.raises(ValueError, match="reward"):
        first.half.sample()
    assert len(first.half.outbox) == 0


def test_with_pace_the_sampler_waits_while_too_much_is_waiting(folder: Path) -> None:
    first, second = peers_of(
        spread_crew(folder, pace="async", learning='stale = "pace"\nmax_age = 1'), MemoryLog()
    )
    assert first.may_sample()
    share(second, second, second)
    first.receive()
    assert len(first.waiting) == 6
    assert first.may_sample()  # it is not the one who floods
    share(first, first)
    first.receive()
    assert not first.may_sample()
    assert isinstance(learn(first), StepReport)
    assert first.may_sample()


@pytest.mark.parametrize("lossless", [False, True])
def test_log_probs_arrive_rounded_or_to_the_last_bit(lossless: bool, folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, lossless=lossless), MemoryLog())
    share(second)
    first.receive()
    arrived = [x for c in first.waiting for r in c.group.rollouts for x in r.logprobs]
    made = [
        x
        for call in second.half.engine.made
        for completions in call
        for c in completions
        for x in c.logprobs
    ]
    assert len(arrived) == len(made) > 8
    if lossless:
        assert arrived == made
    else:
        assert all(
            abs(there - here) <= 0.5 / STEPS_PER_NAT + 1e-12
            for there, here in zip(arrived, made, strict=True)
        )
        assert all(round(x * STEPS_PER_NAT) / STEPS_PER_NAT == x for x in arrived)
        assert arrived != made


# Learning in lockstep


def test_lockstep_waits_for_every_peers_groups(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    share(first)
    assert isinstance(learn(first), Wait)
    share(second)
    report = learn(first)
    assert isinstance(report, StepReport)
    assert report.num_sequences == 16
    assert first.learner.policy.version == 1


def test_lockstep_leaves_the_next_rounds_groups_for_the_next_round(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    share(second, second, first)
    assert isinstance(learn(first), StepReport)
    assert {c.group.round for c in first.waiting} == {1}
    assert isinstance(learn(first), Wait)
    assert first.awaited() == ["full0"]


def test_groups_of_the_next_round_do_not_stand_for_those_of_this(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second = peers_of(spread_crew(folder), log)
    for _ in range(2):
        second.half.sample()
        second.half.outbox.deliver(side)
    share(first)
    carry(side, log, "full1.1.0", "full1.1.1")
    first.receive()
    assert first.awaited() == ["full1"]
    assert (first.choose(), first.choose(closed=True)) == (Wait(), Wait())
    carry(side, log, "full1.0.0", "full1.0.1")
    assert isinstance(learn(first), StepReport)
    assert first.admission.refused == Counter()


def test_parts_of_a_horizontal_group_wait_for_each_other(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, layout="horizontal"), MemoryLog())
    share(first)
    assert isinstance(learn(first), Wait)
    share(second)
    report = learn(first)
    assert isinstance(report, StepReport)
    assert {name: m.groups for name, m in report.senders.items()} == {"full0": 4, "full1": 4}


def test_the_order_of_arrival_does_not_change_the_step(folder: Path) -> None:
    config = spread_crew(folder)
    reports = []
    for turns in ((0, 1), (1, 0)):
        peers = peers_of(config, MemoryLog())
        share(*(peers[turn] for turn in turns))
        reports.append(learn(peers[0]))
    assert reports[0] == reports[1]


THREE = ("full", "full", "full")


def test_an_open_round_waits_and_says_for_whom(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second, third = peers_of(spread_crew(folder, THREE), log)
    assert first.awaited() == ["full0", "full1", "full2"]
    share(first, second)
    first.receive()
    assert (first.choose(), first.awaited()) == (Wait(), ["full2"])
    third.half.sample()
    third.half.outbox.deliver(side)
    carry(side, log, "full2.0.0")  # the first of two
    first.receive()
    assert (first.choose(), first.awaited()) == (Wait(), ["full2"])
    carry(side, log, "full2.0.1")
    first.receive()
    assert first.awaited() == []
    assert len(taken(first.choose())) == 6


@pytest.mark.parametrize(("quorum", "needed"), [(0, 2), (1, 1), (2, 2), (3, 3)])
def test_a_closed_round_goes_on_with_a_quorum_and_not_with_fewer(
    quorum: int, needed: int, folder: Path
) -> None:
    peers = peers_of(spread_crew(folder, THREE, quorum=quorum), MemoryLog())
    first = peers[0]
    for there in range(4):
        first.receive()
        assert len(first.waiting) == 2 * there  # what was there is still there
        assert first.awaited() == [p.me.name for p in peers[there:]]
        assert there == 3 or first.choose() == Wait()
        chosen = first.choose(closed=True)
        if there == needed:
            assert ids(taken(chosen)) == [
                f"full{peer}.0.{slot}" for peer in range(there) for slot in range(2)
            ]
            return
        assert chosen == Wait()
        share(peers[there])


@pytest.mark.slow
def test_a_closed_round_is_learned_with_what_is_there_of_it(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second, third = peers_of(spread_crew(folder, THREE), log)
    share(first, second, second)
    third.half.sample()
    third.half.outbox.deliver(side)
    carry(side, log, "full2.0.1")
    report = learn(first, closed=True)
    assert isinstance(report, StepReport)
    assert {name: m.groups for name, m in report.senders.items()} == {
        "full0": 2,
        "full1": 2,
        "full2": 1,
    }
    assert (first.learned_rounds, first.learner.policy.version) == (1, 1)
    assert ids(first.waiting) == ["full1.1.0", "full1.1.1"]
    assert first.choose(closed=True) == Wait()  # of round 1 there is one peer's


@pytest.mark.slow
def test_groups_of_a_round_that_is_over_are_late(folder: Path) -> None:
    first, second, third = peers_of(spread_crew(folder, THREE), MemoryLog())
    share(first, second)
    assert isinstance(learn(first, closed=True), StepReport)
    share(first, second, third)
    first.receive()
    assert first.waiting.dropped == Counter({("full2", "late"): 2})
    assert first.admission.refused == Counter()
    assert first.awaited() == ["full2"]
    assert {c.group.round for c in first.waiting} == {1}
    share(third)  # is with the others again
    assert isinstance(learn(first), StepReport)
    assert first.waiting.dropped == Counter({("full2", "late"): 2})
    # Those who waited for it learned from it.
    assert isinstance(learn(second), StepReport)
    assert second.waiting.dropped == Counter()


def test_who_was_shut_out_is_not_awaited(folder: Path) -> None:
    config, log = spread_crew(folder, THREE), MemoryLog()
    first, second, third = peers_of(config, log)
    share(first, second)
    first.receive()
    assert (first.choose(), first.awaited()) == (Wait(), ["full2"])
    begin(config, log, "full2")
    share(third)
    first.receive()
    assert first.crewmates == ["full0", "full1"]
    assert first.awaited() == []
    assert ids(taken(first.choose())) == ["full0.0.0", "full0.0.1", "full1.0.0", "full1.0.1"]
    assert first.admission.refused == Counter({("full2", "revoked"): 2})
    again = peers_of(config, log)[0]
    again.load_state(json_copy(first.state()))
    assert again.crewmates == ["full0", "full1"]


def test_only_the_hub_can_shut_a_peer_out(folder: Path) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, second = peers_of(config, log)
    second.half.outbox.put([Roster(crew="spread", number=1, keys={}, revoked=("full0",))])
    second.publish()
    first.receive()
    assert first.crewmates == ["full0", "full1"]
    assert first.admission.refused == Counter({("hub", "key"): 1})


def test_a_horizontal_crew_goes_on_without_who_was_shut_out(folder: Path) -> None:
    config, log = spread_crew(folder, THREE, layout="horizontal", group_size=6), MemoryLog()
    first, second, _ = peers_of(config, log)
    share(first, second)
    assert isinstance(learn(first), Wait)
    begin(config, log, "full2")
    report = learn(first)
    assert isinstance(report, StepReport)
    assert {name: m.groups for name, m in report.senders.items()} == {"full0": 6, "full1": 6}


def test_a_closed_horizontal_round_is_learned_without_the_parts_that_are_missing(
    folder: Path,
) -> None:
    config = spread_crew(folder, THREE, layout="horizontal", group_size=6, problems_per_round=2)
    log, side = MemoryLog(), MemoryLog()
    first, second, third = peers_of(config, log)
    share(first)
    assert isinstance(learn(first, closed=True), Wait)
    share(second)
    third.half.sample()
    third.half.outbox.deliver(side)
    carry(side, log, "full2.0.1")
    first.receive()
    assert (first.choose(), first.awaited()) == (Wait(), ["full2"])
    chosen = first.choose(closed=True)
    assert Counter(c.family for c in taken(chosen)) == Counter({"0.0": 2, "0.1": 3})
    report = first.step(chosen)
    assert report is not None
    assert report.num_sequences == 5 * 2
    assert list(first.waiting) == []
    carry(side, log, "full2.0.0")
    first.receive()
    assert first.waiting.dropped == Counter({("full2", "late"): 1})


@pytest.mark.slow
def test_a_closed_horizontal_round_needs_its_quorum_too(folder: Path) -> None:
    config = spread_crew(folder, THREE, layout="horizontal", group_size=6, quorum=3)
    first, second, third = peers_of(config, MemoryLog())
    share(first, second)
    assert isinstance(learn(first, closed=True), Wait)
    share(third)
    assert isinstance(learn(first, closed=True), StepReport)


# Learning in async


def test_with_drop_what_is_too_old_is_dropped_and_counted(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, pace="async", learning="max_age = 0"), MemoryLog())
    share(second, second, first)
    first.receive()
    assert isinstance(learn(first), StepReport)  # takes 4 of the 6 that wait
    share(first)
    assert isinstance(learn(first), StepReport)
    assert first.waiting.dropped == Counter({("full1", "stale"): 2})
    assert list(first.waiting) == []


def test_nobody_waits_for_another_and_what_it_does_not_sample_itself_makes_no_step(
    folder: Path,
) -> None:
    first, second = peers_of(spread_crew(folder, pace="async", rounds=9), MemoryLog())
    share(second, second, second)
    assert isinstance(learn(first), Wait)
    reports = []
    for _ in range(4):
        share(first)
        reports.append(learn(first))
    found = [
        {n: s.groups for n, s in r.senders.items()} for r in reports if not isinstance(r, Wait)
    ]
    assert found == [{"full0": 2, "full1": 2}] * 3 + [{"full0": 2}]


def test_a_peer_that_may_take_nothing_yet_waits(folder: Path) -> None:
    first, second = peers_of(
        spread_crew(folder, pace="async", learning="own_share = 1.0"), MemoryLog()
    )
    share(second, second)
    assert isinstance(learn(first), Wait)


def async_horizontal(
    folder: Path, trains: Sequence[str] = ("full", "full"), max_age: int = 2, problems: int = 1
) -> CrewConfig:
    """Every peer makes two rollouts of each problem."""
    crew = {
        "rounds": 9,
        "pace": "async",
        "layout": "horizontal",
        "problems_per_round": problems,
        "group_size": 2 * len(trains),
    }
    return spread_crew(folder, trains, f"max_age = {max_age}", **crew)


@pytest.mark.slow
def test_a_horizontal_group_that_stays_incomplete_is_dropped_after_the_staleness_window(
    folder: Path,
) -> None:
    first, second = peers_of(async_horizontal(folder, max_age=2), MemoryLog())
    share(first)
    second.half.sample()
    second.half.outbox.deliver(MemoryLog())  # lost on the way
    for version in (1, 2, 3):
        assert ("full0", "incomplete") not in first.waiting.dropped
        share(first, second)
        assert isinstance(learn(first), StepReport)
        assert first.learner.policy.version == version
        assert ids(first.waiting) == (["full0.0.0"] if version <= 2 else [])
    assert first.waiting.dropped == Counter({("full0", "incomplete"): 1})
    assert first.admission.missing == {"full1": 1}


def test_a_horizontal_group_made_whole_within_the_window_is_learned(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second = peers_of(async_horizontal(folder, max_age=2), log)
    share(first)
    for round in range(3):
        second.half.sample()
        second.half.outbox.deliver(side)
        if round:
            share(first)
            carry(side, log, f"full1.{round}.0")
            assert isinstance(learn(first), StepReport)
    carry(side, log, "full1.0.0")
    assert first.learner.policy.version == 2
    first.receive()
    assert ids(taken(first.choose())) == ["full0.0.0", "full1.0.0"]
    assert first.waiting.dropped == Counter()
    assert first.admission.missing == {}


@pytest.mark.slow
def test_an_incomplete_group_is_as_old_as_its_newest_part(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second, third = peers_of(async_horizontal(folder, THREE, max_age=1), log)
    share(first)
    for peer in (second, third):
        peer.half.sample()
        peer.half.outbox.deliver(side)
    for version in (1, 2, 3):
        share(first, second, third)
        assert isinstance(learn(first), StepReport)
        assert first.learner.policy.version == version
        if version == 1:
            carry(side, log, "full1.0.0")
        assert first.waiting.dropped == (
            Counter()
            if version < 3
            else Counter({("full0", "incomplete"): 1, ("full1", "incomplete"): 1})
        )
    assert list(first.waiting) == []


def test_closing_an_async_horizontal_crew_takes_what_a_quorum_has_made(folder: Path) -> None:
    first, second, _ = peers_of(async_horizontal(folder, THREE, problems=2), MemoryLog())
    share(first)
    first.receive()
    assert first.choose(closed=True) == Wait()
    share(second, first)
    first.receive()
    assert first.choose() == Wait()
    chosen = first.choose(closed=True)
    assert Counter(c.family for c in taken(chosen)) == Counter({"0.0": 2, "0.1": 2})
    assert ids(first.waiting) == ["full0.1.0", "full0.1.1"]


# Nothing is lost, torn apart or decided by timing


def test_parts_of_a_closed_horizontal_round_do_not_wait_for_ever(folder: Path) -> None:
    log, side = MemoryLog(), MemoryLog()
    first, second, _ = peers_of(
        spread_crew(folder, THREE, layout="horizontal", group_size=6, problems_per_round=2), log
    )
    share(first)
    second.half.sample()
    second.half.outbox.deliver(side)
    carry(side, log, "full1.0.0")
    assert isinstance(
        learn(first, closed=True), StepReport
    )  # slot 0 has a quorum, slot 1 only the own part
    assert first.learned_rounds == 1
    assert list(first.waiting) == []


def test_closing_is_never_stricter_than_waiting(folder: Path) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, _ = peers_of(config, log)
    share(first)
    begin(config, log, "full1")
    first.receive()
    assert first.awaited() == []
    assert len(taken(first.choose(closed=True))) == 2


@pytest.mark.parametrize("revoke", [False, True])
def test_parts_of_one_group_are_never_torn_apart(revoke: bool, folder: Path) -> None:
    config, log = async_horizontal(folder, THREE), MemoryLog()
    first, second, _ = peers_of(config, log)
    share(first, second, first, second)
    if revoke:
        begin(config, log, "full2")
    first.receive()
    chosen = taken(first.choose(closed=not revoke))
    assert set(Counter(c.family for c in chosen).values()) == {2}, ids(chosen)


def test_lockstep_does_not_depend_on_when_groups_came(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, learning="max_age = 0"), MemoryLog())
    # the other is a round ahead, as in processes of their own it may be
    share(second, second, first)
    assert isinstance(learn(first), StepReport)
    share(first)
    report = learn(first)
    assert isinstance(report, StepReport)
    assert (report.num_sequences, first.waiting.dropped) == (16, Counter())


@pytest.mark.slow
def test_lockstep_that_catches_up_learns_from_every_round(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, rounds=4, learning="max_age = 2"), MemoryLog())
    share(*[first, second] * 4)
    assert all(isinstance(learn(first), StepReport) for _ in range(4))


def test_with_pace_no_part_is_dropped(folder: Path) -> None:
    crew = {"rounds": 9, "pace": "async", "layout": "horizontal", "problems_per_round": 1}
    first, second = peers_of(
        spread_crew(folder, ("full", "full"), 'stale = "pace"\nmax_age = 1', **crew), MemoryLog()
    )
    while first.may_sample():
        share(first)
        first.receive()
    for _ in range(2):  # the other is only slow
        share(second)
        assert isinstance(learn(first), StepReport)
    assert first.waiting.dropped == Counter()


def test_parts_of_who_was_shut_out_do_not_stand_for_those_of_others(folder: Path) -> None:
    config, log = async_horizontal(folder, THREE), MemoryLog()
    first, _, third = peers_of(config, log)
    share(first, third, first, third)
    begin(config, log, "full2")
    first.receive()
    assert first.choose() == Wait()


def test_another_log_is_an_error_in_words(folder: Path) -> None:
    config, log, other = spread_crew(folder), MemoryLog(), MemoryLog()
    first, second = peers_of(config, log)
    share(second)
    first.receive()
    begin(config, other)
    begin(config, other, "full1")  # position 3 holds a roster there
    again = peers_of(config, other)[0]
    with pytest.raises(ValueError, match="is it another log"):
        again.load_state(json_copy(first.state()))


# What others publish


class Generous:
    """A task that gives more than it should."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [reward + 0.5 for reward in self.task.score(problems, completions)]


def test_a_reward_that_is_claimed_and_not_earned_is_refused(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    second.half.scorer = Scorer(Generous(second.half.task))
    share(first, second)
    assert isinstance(learn(first), Wait)
    assert first.admission.refused == Counter({("full1", "reward"): 2})
    assert first.awaited() == ["full1"]
    assert "computed here it is" in first.admission.kept[0].detail
    assert isinstance(learn(second), Wait)
    # to the liar, the others lie
    assert second.admission.refused == Counter({("full0", "reward"): 2})


def test_what_was_refused_as_signed_is_not_awaited_any_more(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    second.half.scorer = Scorer(Generous(second.half.task))
    share(first)
    first.receive()
    assert (first.awaited(), first.forgone()) == (["full1"], [])
    share(second)
    first.receive()
    assert (first.awaited(), first.forgone()) == (["full1"], ["full1"])


class Moody(Generous):
    """Gives more each time."""

    calls = 0

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(completions)


@pytest.mark.parametrize("own_first", [True, False])
def test_a_peer_whose_own_reward_is_never_the_same_says_so_before_it_blames_others(
    own_first: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    first.half.scorer = Scorer(Moody(first.half.task))
    share(*((first, second) if own_first else (second, first)))
    with pytest.raises(
        UnsteadyRewardError, match=r"1\.0, then \d\.0, for '.*check_rewards = false"
    ):
        first.receive()
    assert not caplog.records


@pytest.mark.parametrize("own_first", [True, False])
def test_others_are_blamed_once_own_rewards_were_found_steady(
    own_first: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    second.half.scorer = Scorer(Generous(second.half.task))
    share(*((first, second) if own_first else (second, first)))
    first.receive()
    (said,) = caplog.records
    assert "otherwise full1 lies, or scores with another program" in said.getMessage()


def test_a_round_that_was_refused_for_its_rewards_goes_on_once_they_are_taken_on_trust(
    folder: Path,
) -> None:
    config, log = spread_crew(folder, problems_per_round=6), MemoryLog()
    first, second = peers_of(config, log)
    second.half.scorer = Scorer(Generous(second.half.task))
    share(first, second)
    first.receive()
    assert first.scrutiny.is_muted("full1")
    state = first.state()
    crew = msgspec.structs.replace(config.crew, check_rewards=False)
    again, _ = peers_of(msgspec.structs.replace(config, crew=crew), log)
    again.load_state(state)
    assert ids(taken(again.choose())) == [f"full{n}.0.{slot}" for n in (0, 1) for slot in (0, 1, 2)]
    assert not again.scrutiny.is_muted("full1")


def test_rewards_that_are_not_checked_are_taken_on_trust(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, check_rewards=False), MemoryLog())
    second.half.scorer = Scorer(Generous(second.half.task))
    share(first, second)
    first.receive()
    chosen = taken(first.choose())
    assert len(chosen) == 4
    assert min(r.reward for c in chosen if not c.own for r in c.group.rollouts) >= 0.5
    assert first.admission.refused == Counter()


def test_a_round_the_crew_does_not_have_is_refused(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder, rounds=3), MemoryLog())
    second.half.sampled_rounds = 2
    share(second, second)
    first.receive()
    assert [early.place for early in first.early] == [("full1", 2, 0), ("full1", 2, 1)]
    assert first.admission.refused == Counter({("full1", "assignment"): 2})


def test_foreign_noise_on_the_log_is_counted_and_learning_goes_on(folder: Path) -> None:
    log = MemoryLog()
    first, second = peers_of(spread_crew(folder), log)
    log.append([("noise", b"\x01noise"), ("full1.2.1", b"\x02" + bytes(64) + b"noise")])
    share(second)
    forged = decode(unpack(log.read(4)[0].record).body)[1]
    assert isinstance(forged, Group)
    second.half.outbox.put([msgspec.structs.replace(forged, round=1, problem="another")])
    second.publish()
    log.append([("full1.2.0", log.read(4)[0].record)])
    share(first)
    assert isinstance(learn(first), StepReport)
    assert first.admission.refused == Counter(
        {
            ("unknown", "sender"): 1,
            ("full1", "corrupt"): 1,
            ("full1", "assignment"): 1,
            ("full1", "subject"): 1,
        }
    )


class ForgetfulLog:
    """Does not see that an id is there already."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for id, record in records:
            self.entries.append(Entry(len(self.entries) + 1, id, record))

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        return self.entries[after : after + limit]


@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_group_that_stands_twice_on_the_log_does_not_stop_the_crew(
    layout: str, folder: Path
) -> None:
    log = ForgetfulLog()
    first, second = peers_of(spread_crew(folder, layout=layout), log)
    share(second)
    published = groups_on(log)
    log.append([(published[0].id, log.read(2)[0].record)])  # the same record
    second.half.outbox.put([published[0]])  # the same group, published anew
    second.publish()
    share(first)
    first.receive()
    chosen = first.choose()
    assert ids(taken(chosen)) == sorted(
        f"full{peer}.0.{slot}" for peer in range(2) for slot in range(len(published))
    )
    assert first.admission.refused == Counter({("full1", "replay"): 1, ("full1", "duplicate"): 1})
    assert first.step(chosen) is not None
    second.half.outbox.put([published[1]])
    second.publish()
    first.receive()  # also when it was learned from
    assert first.admission.refused["full1", "duplicate"] == 2
    assert list(first.waiting) == []


def test_reading_can_stop_at_a_position(folder: Path) -> None:
    log = GappyLog()
    first, second = peers_of(spread_crew(folder), log)
    share(first, second)
    positions = [entry.position for entry in everything(log)]
    first.receive(until=positions[3])
    assert (first.cursor, ids(first.waiting)) == (positions[3], ["full0.0.0", "full0.0.1"])
    first.receive(until=positions[4] + 1)  # nothing stands there
    assert (first.cursor, len(first.waiting)) == (positions[4], 3)
    first.receive()
    assert (first.cursor, len(first.waiting)) == (positions[5], 4)


DIGITS = """
[crew]
name = "digits"
task = "digits"
rounds = 2
group_size = 2
problems_per_round = 2
objective = "ftis"

[[peer]]
name = "full0"
model = "tiny:0.3m"

[[peer]]
name = "full1"
model = "tiny:0.3m"
"""


@pytest.mark.parametrize("hidden", ["pad", "unknown"])
def test_a_right_answer_with_a_special_token_inside_is_wrong(hidden: str) -> None:
    log = MemoryLog()
    first, second = peers_of(parse_config(DIGITS), log)
    vocabulary, asked = second.learner.policy.vocabulary, second.half.ask()
    right = vocabulary.encode(asked.problems[0].answer)
    special = {"pad": vocabulary.pad_id, "unknown": 2}[hidden]
    end = (vocabulary.end_id,)
    answers = [(*right, *end), (*right[:1], special, *right[1:], *end)]
    rollouts = [
        Rollout(tokens=tokens, logprobs=(-0.1,) * len(tokens), reward=1.0, ending="stop")
        for tokens in answers
    ]
    texts = vocabulary.decode_all(answers)
    drawn = second.half.drawn(
        Answered(
            asked,
            [[Completion(r.tokens, r.logprobs, r.ending) for r in rollouts]],
            second.half.scorer.begin(asked.problems, [texts]),
        )
    )
    assert [r.reward for r in drawn.groups[0].rollouts] == [1.0, 0.0]
    lie = msgspec.structs.replace(drawn.groups[0], rollouts=tuple(rollouts))
    second.half.outbox.put([lie])
    second.publish()
    first.receive()
    assert first.admission.refused == Counter({("full1", "reward"): 1})


class FloodedLog(MemoryLog):
    """Whatever is read, more stands behind it, all under the name of one peer."""

    num_read = 0

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        found = super().read(after, limit)
        if found:
            return found
        self.num_read += limit
        assert self.num_read < 10**5, "a flood keeps its reader for ever"
        return [Entry(after + n, f"full1.{after + n}.0", b"noise") for n in range(1, limit + 1)]


@pytest.mark.slow
def test_a_flood_does_not_keep_a_peer_from_learning(folder: Path) -> None:
    log = FloodedLog()
    first, second = peers_of(spread_crew(folder, rounds=10**6), log)
    share(first, second)
    assert not first.receive()
    assert (first.cursor, log.num_read) == (MOST_ENTRIES, MOST_ENTRIES)
    assert isinstance(learn(first), StepReport)
    assert first.cursor == 2 * MOST_ENTRIES
    assert not first.receive(until=first.cursor + 2 * MOST_ENTRIES)
    assert first.receive(until=first.cursor + 10)
    assert first.cursor == 3 * MOST_ENTRIES + 10


def test_a_peer_reads_so_many_bytes_at_a_time(folder: Path) -> None:
    log = MemoryLog()
    (first,) = peers_of(spread_crew(folder, ["full"]), log)
    log.append([(f"full0.{n}.0", bytes(MOST_BYTES // 4)) for n in range(10)])
    assert [first.receive() for _ in range(3)] == [False, False, True]
    assert first.cursor == len(log)


# After a crash


class GappyLog(MemoryLog):
    """Positions grow by more than one, and reading gives a few at a time."""

    lost = 0

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        entries = [
            Entry(90 + 7 * position, id, record) for position, id, record in super().read(0, 10**6)
        ]
        return [
            entry for entry in entries if entry.position > after and entry.position != self.lost
        ][: min(3, limit)]


def everything(log: Log) -> list[Entry]:
    found: list[Entry] = []
    while entries := log.read(found[-1].position if found else 0):
        found += entries
    return found


def json_copy(state: PeerState) -> PeerState:
    return msgspec.json.decode(msgspec.json.encode(state), type=PeerState)


def revived(peer: Peer, state: PeerState | None = None) -> Peer:
    """The peer in a new process: with the weights it has, and the rest from a state."""
    again = next(p for p in peers_of(peer.config, peer.log) if p.me == peer.me)
    again.learner.policy.model.load_state_dict(peer.learner.policy.model.state_dict())
    again.learner.optimiser.load_state_dict(deepcopy(peer.learner.optimiser.state_dict()))
    again.load_state(json_copy(state or peer.state()))
    return again


@pytest.mark.parametrize("make_log", [MemoryLog, GappyLog])
def test_state_that_is_loaded_goes_on_as_the_peer_did(
    make_log: type[MemoryLog], folder: Path
) -> None:
    log = make_log()
    first, second = peers_of(spread_crew(folder), log)
    log.append([("noise", b"noise")])
    share(second, first, second)
    learn(first)
    again = revived(first)
    assert again.state() == first.state()
    assert list(again.waiting) == list(first.waiting)
    assert [c.group.round for c in again.waiting] == [1, 1]
    share(first)
    report = learn(first)
    assert isinstance(report, StepReport)
    assert learn(again) == report
    assert again.state() == msgspec.structs.replace(
        first.state(), head=again.state().head, sampled_rounds=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("make_log", [MemoryLog, GappyLog])
def test_waiting_groups_come_back_with_position_hash_and_time_of_arrival(
    make_log: type[MemoryLog], folder: Path
) -> None:
    log = make_log()
    first, second = peers_of(spread_crew(folder, pace="async", rounds=9), log)
    share(second, second, first)
    assert isinstance(learn(first), StepReport)
    share(second, first)
    log.append([("noise", b"noise")])
    first.receive()
    assert [(c.group.id, c.since) for c in first.waiting] == [
        ("full1.1.0", 0), ("full1.1.1", 0), ("full1.2.0", 1), ("full1.2.1", 1),
        ("full0.1.0", 1), ("full0.1.1", 1)
    ]  # fmt: skip
    again = revived(first)
    records = {entry.position: entry.record for entry in everything(log)}
    assert list(again.waiting) == list(first.waiting)
    assert [c.hash for c in again.waiting] == [
        unpack(records[c.position]).hash for c in again.waiting
    ]
    assert [c.own for c in again.waiting] == [False] * 4 + [True] * 2
    assert again.cursor == max(records)
    assert again.admission.state() == first.admission.state()
    again.receive()
    assert list(again.waiting) == list(first.waiting)  # none comes twice
    report = learn(first)
    assert isinstance(report, StepReport)
    assert learn(again) == report


def test_a_waiting_group_that_is_gone_from_the_log_is_an_error(folder: Path) -> None:
    log = GappyLog()
    first, second = peers_of(spread_crew(folder), log)
    share(second, second)
    first.receive()
    log.lost = list(first.waiting)[1].position
    with pytest.raises(ValueError, match="is it another log"):
        revived(first)


def test_another_log_than_the_one_that_was_read_is_an_error(folder: Path) -> None:
    config = spread_crew(folder)
    first, second = peers_of(config, MemoryLog())
    share(second)
    first.receive()
    again = peers_of(config, MemoryLog())[0]
    with pytest.raises(
        ValueError,
        match=r"the log ends before position 4, which this peer had read; is it another log\?",
    ):
        again.load_state(json_copy(first.state()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_steps_repeated_up_to_the_same_positions_are_the_same_steps(
    pace: str, layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a journal holds is enough: how far the log was read, and whether the round was closed.

    However records come and get lost.
    """
    learning = "max_age = 1" + ("\nquota = 1" if layout == "vertical" else "")
    config = spread_crew(
        folder,
        THREE,
        learning,
        pace=pace,
        layout=layout,
        rounds=8,
        group_size=6,
        problems_per_round=3,
    )
    side = MemoryLog()
    for peer in peers_of(config, side):
        for _ in range(8):
            share(peer)
    records = [(entry.id, entry.record) for entry in side.read(2)]
    first, again = peers_of(config, MemoryLog())[:2]
    again.half.me = first.half.me
    start = json_copy(first.state())

    # what is learned does not matter here
    def step(learner: Learner, candidates: Sequence[Candidate], **hooks: object) -> StepReport:
        learner.policy.version += 1
        return StepReport(
            loss=0.0,
            grad_norm=0.0,
            num_sequences=0,
            num_scored=0,
            num_tokens=0,
            ages={},
            senders={},
        )

    monkeypatch.setattr(Learner, "step", step)
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng = random.Random(seed)
        first.log = again.log = log = MemoryLog()
        begin(config, log)
        first.load_state(start)
        again.load_state(start)
        journal: list[tuple[int, bool, Take]] = []
        when = {id: int(id.split(".")[1]) + 3 * rng.random() for id, _ in records}
        for id, record in sorted(records, key=lambda item: when[item[0]]):
            if rng.random() < 0.9:
                log.append([(id, record)])
            first.receive()
            closed = rng.random() < 0.2
            while isinstance(chosen := first.choose(closed), Take):
                journal.append((first.cursor, closed, chosen))
                first.step(chosen)
                seen["closed" if closed else "open"] += 1
        for cursor, closed, chosen in journal:
            again.receive(until=cursor)
            assert again.choose(closed) == chosen
            again.step(chosen)
        again.receive()
        assert again.choose() == Wait()
        # whom each of the two judges is another matter: they are not the same peer
        states = [
            msgspec.structs.replace(peer.state(), scrutiny=ScrutinyState())
            for peer in (again, first)
        ]
        assert states[0] == states[1]
        learned = Counter(c.position for _, _, chosen in journal for c in chosen.groups)
        assert max(learned.values()) == 1
        # every group is somewhere
        waiting = len(first.waiting) + len(first.early)
        assert len(learned) + waiting + first.waiting.dropped.total() == len(log) - 2
        seen += Counter(reason for _, reason in first.waiting.dropped.elements())
        assert first.admission.refused == Counter()
    expected = {"lockstep": {"open", "closed", "late"}, "async": {"open", "closed"}}[pace]
    assert expected <= set(seen), seen
    assert (pace, layout) != ("async", "horizontal") or seen["incomplete"]


def crash(folder: Path) -> Path:
    """What a machine that stops now has on its disk."""
    copy = folder.with_name(folder.name + "-after")
    shutil.copytree(folder, copy)
    return copy


@pytest.fixture
def outboxes(folder: Path) -> Path:
    (folder / "outboxes").mkdir()
    return folder / "outboxes"


def test_what_was_sampled_before_a_crash_is_not_sampled_again(outboxes: Path, folder: Path) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, _ = peers_of(config, log, outboxes)
    sampled = first.half.sample()
    assert sampled.fresh
    first.publish()
    before = log.read(0)
    again, _ = peers_of(config, log, crash(outboxes))
    found = again.half.sample()
    assert again.half.engine.made == []
    assert found == msgspec.structs.replace(sampled, fresh=False)
    assert len(again.half.outbox) == 0
    again.publish()
    assert log.read(0) == before
    assert again.half.sampled_rounds == 1
    assert again.half.sample().fresh  # the next round goes on, and so does the chain
    assert len(again.half.engine.made) == 1
    again.publish()
    assert [entry.id for entry in log.read(len(before))] == ["full0.1.0", "full0.1.1"]
    again.receive()
    assert again.admission.refused == Counter()
    assert (again.admission.missing, len(again.waiting)) == ({}, 4)


def test_what_was_not_delivered_before_a_crash_is_delivered_after_it(
    outboxes: Path, folder: Path
) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, second = peers_of(config, log, outboxes)
    share(first)
    first.half.sample()
    copy = crash(outboxes)
    published = len(log)
    again, _ = peers_of(config, log, copy)
    assert len(again.half.outbox) == 2
    again.publish()  # at once, before anything is sampled
    after = log.read(published)
    assert [entry.id for entry in after] == ["full0.1.0", "full0.1.1"]
    would_have_been = MemoryLog()
    first.half.outbox.deliver(would_have_been)
    assert [entry.record for entry in after] == [entry.record for entry in would_have_been.read(0)]
    assert [again.half.sample().fresh for _ in range(2)] == [False, False]
    again.publish()
    assert (len(log), again.half.engine.made) == (published + 2, [])
    second.receive()
    assert second.admission.refused == Counter()
    assert len(second.waiting) == 4


@pytest.mark.slow
def test_rounds_sampled_after_the_last_checkpoint_are_not_sampled_again(
    outboxes: Path, folder: Path
) -> None:
    config, log = spread_crew(folder, rounds=4), MemoryLog()
    first, second = peers_of(config, log, outboxes)
    share(first, second)
    assert isinstance(learn(first), StepReport)
    checkpoint, weights = (
        json_copy(first.state()),
        {k: v.clone() for k, v in first.learner.policy.model.state_dict().items()},
    )
    share(first, second)
    assert isinstance(learn(first), StepReport)
    first.half.sample()
    published = log.read(0)
    again, _ = peers_of(config, log, crash(outboxes))
    again.learner.policy.model.load_state_dict(weights)
    again.load_state(checkpoint)
    assert not again.half.sample().fresh
    assert isinstance(learn(again), StepReport)
    assert not again.half.sample().fresh
    assert again.half.engine.made == []
    again.publish()
    share(second)
    # its place in the chain is behind what the outbox has, not behind the checkpoint
    assert again.half.sample().fresh
    again.publish()
    assert log.read(0)[: len(published)] == published
    assert Counter(entry.id for entry in log.read(0)).most_common(1)[0][1] == 1
    for peer in (again, second):
        assert isinstance(learn(peer), StepReport)
        peer.receive()
        assert peer.admission.refused == Counter()
        assert peer.admission.missing == {}


def test_an_outbox_without_a_file_goes_on_where_the_checkpoint_was(folder: Path) -> None:
    first, second = peers_of(spread_crew(folder), MemoryLog())
    share(first)
    again = revived(first)
    share(again)
    second.receive()
    assert ids(second.waiting) == ["full0.0.0", "full0.0.1", "full0.1.0", "full0.1.1"]
    assert (second.admission.refused, second.admission.missing) == (Counter(), {})


class BreakingLog(MemoryLog):
    """Takes so many records, and then the line goes dead before any is confirmed."""

    left = 10**6

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        taken = records[: self.left]
        super().append(taken)
        self.left -= len(taken)
        if self.left == 0:
            raise LogError("no answer")


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_the_log_took_and_did_not_confirm_is_not_there_twice(
    taken: int, outboxes: Path, folder: Path
) -> None:
    config, log = spread_crew(folder), BreakingLog()
    first, second = peers_of(config, log, outboxes)
    first.half.sample()
    log.left = taken
    with pytest.raises(LogError):
        first.publish()
    assert (len(first.half.outbox), len(log)) == (2, 2 + taken)
    before = log.read(0)
    log.left = 10**6
    again, _ = peers_of(config, log, crash(outboxes))
    again.publish()
    assert len(again.half.outbox) == 0
    assert log.read(0)[: len(before)] == before
    assert [entry.id for entry in log.read(2)] == ["full0.0.0", "full0.0.1"]
    first.publish()  # the same line, if it was not a crash
    assert len(log) == 4
    second.receive()
    assert (len(second.waiting), second.admission.refused, second.admission.missing) == (
        2,
        Counter(),
        {},
    )


def test_a_round_whose_sampling_was_cut_short_is_sampled_as_a_whole(
    outboxes: Path, folder: Path
) -> None:
    config, log = spread_crew(folder), MemoryLog()
    first, second = peers_of(config, log, outboxes)
    signed: list[bytes] = []

    def sign_once(message: bytes) -> bytes:
        if signed:
            raise KeyboardInterrupt
        signed.append(message)
        return identity("full0").sign(message)

    whole = first.half.outbox
    first.half.outbox = Outbox(outboxes / "full0.db", Signer(identity("full0").public, sign_once))
    with pytest.raises(KeyboardInterrupt):
        first.half.sample()
    assert (
        len(whole),
        whole.head.counter,
        whole.note_of(Mark("round", 0)),
        first.half.sampled_rounds,
    ) == (
        0,
        0,
        None,
        0,
    )
    again, _ = peers_of(config, log, crash(outboxes))
    assert again.half.sample().fresh
    again.publish()
    second.receive()
    assert ids(second.waiting) == ["full0.0.0", "full0.0.1"]
    assert second.admission.refused == Counter()


def test_what_a_learner_remembers_of_rewards_is_in_its_checkpoint(folder: Path) -> None:
    config, log = spread_crew(folder), MemoryLog()
    peers = peers_of(config, log)
    share(*peers)
    peers[0].receive()
    assert isinstance(learn(peers[0]), StepReport)
    again = peers_of(config, log)[0]
    again.load_state(json_copy(peers[0].state()))
    assert again.learner.success == peers[0].learner.success
    assert again.learner.skills == peers[0].learner.skills
    assert set(again.learner.skills.means) == {"", "full1"}
