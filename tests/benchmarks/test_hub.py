"""A small crew at a real hub, with all that a large one goes through."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from motley.benchmarks.hub import HubParts, HubPlan, HubTrial, Read, try_hub
from motley.benchmarks.hub_figures import (
    Lag,
    _lag,
    accounts_of,
    check_rows,
    checks_of,
    figure_rows,
    rank,
    sent_to,
)
from motley.benchmarks.hub_peers import PeerSample
from motley.exchange import Entry

SMALL = HubPlan(peers=6, rounds=4, hear=2, churn=1, processes=1)


@pytest.fixture(scope="module")
def trial() -> HubTrial:
    return try_hub(SMALL)


@pytest.mark.slow  # a whole crew, in processes
def test_whoever_is_killed_comes_late_or_leaves_nothing_is_lost_or_doubled(trial: HubTrial) -> None:
    checks = checks_of(trial)
    assert checks.hold
    assert checks.published == checks.on_log > 0
    assert checks.to_hear > checks.on_log  # of everything, by several
    assert sum(life.was_killed for life in trial.lives) == 2
    rounds = {account.peer: account.rounds for account in accounts_of(trial)}
    (left,) = trial.parts.leave
    assert rounds.pop(left) == 2
    assert set(rounds.values()) == {4}


@pytest.mark.slow
def test_what_is_wrong_shows(trial: HubTrial) -> None:
    first = next(life for life in trial.lives if life.accounts)
    (name, account), *_ = first.accounts.items()
    first.accounts[name] = msgspec.structs.replace(account, published=99)
    checks = checks_of(trial)
    first.accounts[name] = account
    assert checks.lost == 99 - account.published
    assert not checks.hold
    assert not replace(checks_of(trial), missed=1).hold
    twice = [*trial.reads, trial.reads[-1]]
    before, trial.reads = trial.reads, twice
    assert checks_of(trial).doubled == 1
    trial.reads = before


@pytest.mark.slow
def test_a_peer_is_sent_its_lot_its_own_and_what_the_hub_says(trial: HubTrial) -> None:
    assert trial.hub.register.state.lots
    every = {read.entry.id for read in trial.reads}
    for name, reads in sent_to(trial).items():
        ids = {read.entry.id for read in reads}
        assert ids < every
        assert {id for id in every if id.split(".")[0] in (name, "hub")} <= ids
    assert {read.entry.id for reads in sent_to(trial).values() for read in reads} == every


@pytest.mark.slow
def test_figures_and_checks_are_tables(trial: HubTrial) -> None:
    figures = {row["figure"]: row["value"] for row in figure_rows(trial)}
    assert figures["a peer's round, s, median"]
    assert figures["of them records"]
    assert {row["check"]: row["count"] for row in check_rows(checks_of(trial))}["lost"] == 0


def test_who_leaves_comes_late_or_is_killed_are_different_peers() -> None:
    parts = HubParts.of(HubPlan(peers=12, churn=2, processes=3), [f"p{n}" for n in range(12)])
    stay = [name for names in parts.stay for name in names]
    assert sorted([*parts.killed, *parts.late, *stay]) == sorted(f"p{n}" for n in range(12))
    assert not set(parts.leave) & {*parts.killed, *parts.late}
    assert set(parts.leave) <= set(stay)


def test_too_few_peers_for_what_is_to_happen_are_refused() -> None:
    with pytest.raises(ValueError, match="use at least 34"):
        HubPlan(peers=20, churn=10)
    with pytest.raises(ValueError, match="use 4 or more"):
        HubPlan(peers=20, churn=1, rounds=3)


def test_a_reader_is_behind_by_what_has_come_and_it_has_not_read() -> None:
    reads = [Read(Entry(2 * n, f"a.{n}.0", b""), float(n)) for n in range(1, 6)]
    sample = PeerSample(4.5, 4, 0, 0, 0, 0)  # it has read the first two
    assert _lag(sample, reads) == Lag(2, 1.5)  # the third has been there since 3
    assert _lag(PeerSample(2.5, 4, 0, 0, 0, 0), reads) == Lag(0, 0.0)


def test_a_rank_is_the_value_that_so_much_is_not_above() -> None:
    assert rank([*range(1, 101)], 0.99) == 99
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank([3.0], 1.0) == 3.0
    assert rank([], 0.5) == 0.0
