"""Groups that are sent ahead of their rounds: left on the log, and learned from as if in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import spread_crew
from motley.config import CrewConfig
from motley.exchange import Entry, LogError, MemoryLog
from motley.learning.learner import StepReport
from motley.learning.waiting import Wait
from motley.peers.arrivals import MOST_BETWEEN, Arrival, EarlyGroup, EarlyGroups, read_again
from motley.peers.peer import Peer
from motley.trust.admitted import GroupPlace
from peers.test_peer import begin, learn, peers_of, revived, share

ROUNDS = 4


class CountingLog(MemoryLog):
    """Says how much was read of it, and can be out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.down = False

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        if self.down:
            raise LogError("the log cannot be reached")
        self.asked.append((after, limit))
        return super().read(after, limit, sender)


def early(round: int, sender: str, position: int = 1) -> EarlyGroup:
    return EarlyGroup(GroupPlace(sender, round, 0), Arrival(position, 0, 0.0))


def weights(peer: Peer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in peer.learner.policy.model.parameters()]


def are_equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def lockstep(folder: Path, **crew: Any) -> CrewConfig:
    return spread_crew(folder, rounds=ROUNDS, **crew)


def sent_ahead(config: CrewConfig, log: MemoryLog) -> tuple[Peer, Peer]:
    """Two peers, of which the second has sent all its rounds before the first sent one."""
    first, second = peers_of(config, log)
    share(*[second] * ROUNDS)
    first.receive()
    return first, second


# What is held


def test_only_groups_of_the_present_round_and_the_next_are_held(folder: Path) -> None:
    first, _ = sent_ahead(lockstep(folder), MemoryLog())
    held = Counter(c.group.round for c in first.waiting)
    assert held == {0: 2, 1: 2}
    assert Counter(one.place.round for one in first.early) == {2: 2, 3: 2}
    for round in range(1, ROUNDS):
        share(first)
        assert isinstance(learn(first), StepReport)
        first.choose()
        assert {c.group.round for c in first.waiting} <= {round, round + 1}
    assert len(first.early) == 0


@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_what_was_sent_ahead_is_learned_from_as_if_it_had_come_in_time(
    layout: str, folder: Path
) -> None:
    config = lockstep(folder, layout=layout)
    first, _ = sent_ahead(config, MemoryLog())
    reports = []
    for _ in range(ROUNDS):
        share(first)
        reports.append(learn(first))
    begin_again, log = MemoryLog(), MemoryLog()
    writer = peers_of(config, begin_again)[1]
    share(*[writer] * ROUNDS)  # the same groups, of weights that never learned
    records = [e for e in begin_again.read(0) if e.id.startswith(f"{writer.me.name}.")]
    other = peers_of(config, log)[0]
    each = len(records) // ROUNDS
    for number in range(ROUNDS):
        log.append([(e.id, e.record) for e in records[number * each : (number + 1) * each]])
        share(other)
        assert learn(other) == reports[number]
        assert len(other.early) == 0
    assert are_equal(weights(first), weights(other))


def test_an_async_peer_leaves_nothing_on_the_log(folder: Path) -> None:
    first, _ = sent_ahead(spread_crew(folder, rounds=ROUNDS, pace="async"), MemoryLog())
    assert (len(first.early), len(first.waiting)) == (0, 2 * ROUNDS)


# Who is shut out


def test_who_is_shut_out_is_not_learned_from_with_what_it_sent_ahead(folder: Path) -> None:
    config, log = lockstep(folder, trains=("full",) * 3), MemoryLog()
    first, second, third = peers_of(config, log)
    share(*[second, third] * ROUNDS)
    first.receive()
    begin(config, log, "full1")
    first.receive()
    assert {one.place.sender for one in first.early} == {"full2"}
    assert first.waiting.dropped == Counter({("full1", "revoked"): 2 * ROUNDS})
    assert len(first.waiting.let_go) == 2 * ROUNDS


# Crashes


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_checkpoint_knows_what_was_sent_ahead(steps: int, folder: Path) -> None:
    first, _ = sent_ahead(lockstep(folder), MemoryLog())
    for _ in range(steps):
        share(first)
        assert isinstance(learn(first), StepReport)
    again = revived(first)
    assert again.state() == first.state()
    for _ in range(steps, ROUNDS):
        share(first)
        report = learn(first)
        assert isinstance(report, StepReport)
        assert learn(again) == report
        again.half.sampled_rounds += 1
    assert are_equal(weights(first), weights(again))


def test_a_log_that_cannot_be_reached_for_them_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CountingLog()
    first, _ = sent_ahead(lockstep(folder), log)
    share(first)
    assert isinstance(learn(first), StepReport)
    share(first)
    first.receive()
    log.down = True
    with pytest.raises(LogError):
        first.choose()
    assert Counter(one.place.round for one in first.early) == {2: 2, 3: 2}
    log.down = False
    with monkeypatch.context() as patch:
        patch.setattr(log, "read", lambda *_: [])  # a replica that lags behind
        with pytest.raises(LogError, match="the log ends before position"):
            first.choose()
    assert isinstance(learn(first), StepReport)


def test_groups_that_are_gone_from_the_log_are_an_error_in_words(folder: Path) -> None:
    log = MemoryLog()
    first, _ = sent_ahead(lockstep(folder), log)
    positions = {one.arrival.position for one in first.early}
    with pytest.raises(ValueError, match=r"the log ends before position .*another log\?"):
        read_again(MemoryLog(), positions)


# Reading again


def noise(log: MemoryLog, count: int) -> None:
    log.append([(f"noise.{n}", bytes([n % 256])) for n in range(count)])


def test_records_far_apart_are_read_without_what_is_between() -> None:
    log = CountingLog()
    noise(log, 5000)
    found = read_again(log, {3, 4, 4000})
    assert [entry.position for entry in found] == [3, 4, 4000]
    assert log.asked == [(2, 2), (3999, 1)]


def test_records_close_to_each_other_are_read_at_once() -> None:
    log = CountingLog()
    noise(log, 5000)
    positions = set(range(1, 4000, MOST_BETWEEN))
    assert {entry.position for entry in read_again(log, positions)} == positions
    assert len(log.asked) == 4  # of 1,024 records at most


class SparseLog(MemoryLog):
    """What a peer is sent of a log whose groups stand in lots: positions with holes."""

    def __init__(self, positions: Iterable[int]) -> None:
        super().__init__()
        self.positions = tuple(positions)

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        before = sum(position <= after for position in self.positions)
        read = super().read(before, limit, sender)
        return [Entry(self.positions[e.position - 1], e.id, e.record) for e in read]


@given(st.sets(st.integers(1, 3000), min_size=1, max_size=60), st.data())
def test_of_a_part_of_a_log_each_record_is_read_once(all: set[int], data: st.DataObject) -> None:
    log = SparseLog(sorted(all))
    noise(log, len(all))
    wanted = data.draw(st.sets(st.sampled_from(sorted(all)), min_size=1))
    assert [entry.position for entry in read_again(log, wanted)] == sorted(wanted)


def test_a_peer_that_is_sent_a_part_of_the_log_comes_back_with_what_it_had(folder: Path) -> None:
    log = SparseLog([1, 2, 10, 50, 130, 131, *range(300, 400)])
    first, _ = sent_ahead(lockstep(folder), log)
    assert len(first.waiting) == 4
    assert revived(first).state() == first.state()
    share(first)
    assert isinstance(learn(first), StepReport)
    share(first)
    first.choose()
    assert Counter(c.group.id for c in first.waiting).most_common(1)[0][1] == 1


class HoledLog(MemoryLog):
    """One record was taken away."""

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        return [entry for entry in super().read(after, limit + 1) if entry.position != 7][:limit]


def test_a_record_that_is_gone_is_named() -> None:
    log = HoledLog()
    noise(log, 20)
    with pytest.raises(ValueError, match="no record at position 7 any more"):
        read_again(log, {5, 7, 9})
    with pytest.raises(ValueError, match="no record at position 7 any more"):
        read_again(log, {7})


# The list of them


def test_near_ones_are_given_in_order_and_kept_until_they_are_held() -> None:
    groups = EarlyGroups()
    groups.add([early(5, "b", 9), early(3, "a", 4), early(5, "a", 6), early(4, "b", 5)])
    assert [one.position for one in groups.near(4)] == [4, 5]
    assert (len(groups), groups.near(2)) == (4, [])
    groups.forget(4)
    assert [one.arrival.position for one in groups] == [9, 6]
    assert [one.arrival.position for one in groups.take_from({"a"})] == [6]
    assert [one.place.sender for one in groups] == ["b"]


# A flood in an async crew


def test_a_flood_is_held_as_far_as_it_can_have_its_turn(folder: Path) -> None:
    config = spread_crew(folder, pace="async", rounds=20, learning="max_age = 1")
    first, second = peers_of(config, MemoryLog())
    share(*[second] * 10)
    first.receive()
    most = 2 * first.waiting.per_step
    assert len(first.waiting) == most < 20
    assert first.waiting.dropped == Counter({("full1", "stale"): 20 - most})


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_what_a_flood_is_cut_to_is_all_that_is_ever_learned_of_it(
    max_age: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spread_crew(folder, pace="async", rounds=20, learning=f"max_age = {max_age}")
    reports = []
    for cut in (True, False):
        first, second = peers_of(config, MemoryLog())
        if not cut:
            monkeypatch.setattr(type(first.pace), "shed", lambda self, waiting, round: None)
        share(*[second] * 8)
        made = []
        for step in range(5):
            share(first, *[second] * (step % 3))
            report = learn(first)
            assert not isinstance(report, Wait)
            made.append(report)
        first.learned_rounds += 1
        reports.append((made, weights(first)))
    (cut_reports, cut_weights), (all_reports, all_weights) = reports
    assert cut_reports == all_reports
    assert are_equal(cut_weights, all_weights)
