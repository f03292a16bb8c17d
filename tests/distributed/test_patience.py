"""When a peer goes on without others: a quorum says so, and nobody alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import candidate, group, spread_crew
from motley.clock import VirtualClock
from motley.distributed.patience import REMEDY_S, Patience
from motley.learning.hearing import Hearing
from motley.learning.pace import pace_of
from motley.learning.waiting import Round, StalenessWindow, Waiting
from motley.peers.arrivals import Arrival, EarlyGroup, EarlyGroups
from motley.trust.admitted import GroupPlace

NAMES = ["full0", "full1", "full2", "full3"]


@dataclass
class FakePeer:
    """Of a lockstep crew of four: what waits at full0, and who was shut out."""

    config: Any
    groups: Sequence[tuple[str, int]]  # (sender, round), both slots
    revoked: Sequence[str] = ()
    refused: Sequence[str] = ()  # whose groups of the round came, and do not count
    learned_rounds: int = 0
    me: Any = field(default_factory=lambda: SimpleNamespace(name="full0"))
    early: EarlyGroups = field(default_factory=EarlyGroups)

    def __post_init__(self) -> None:
        clock = VirtualClock()
        self.pace = pace_of(self.config)
        self.hearing = Hearing(self.config, self.me.name)
        self.half = SimpleNamespace(sampled_rounds=self.config.crew.rounds)
        self.admission = SimpleNamespace(
            refused=Counter({(name, "reward"): 2 for name in self.refused}),
            kept=[],
            revoked=frozenset(self.revoked),
        )
        self.scrutiny = SimpleNamespace(is_awaited=lambda name: True)
        self.admitted = SimpleNamespace(complete=Counter(full0=3, full1=3, full2=1))
        window = StalenessWindow(self.config.learning, clock, 0)
        self.waiting = Waiting(self.config, window, self.me.name)
        for number, (sender, round) in enumerate(self.groups):
            for slot in (0, 1):
                self.waiting.add(
                    candidate(
                        group(peer=sender, round=round, slot=slot), position=2 * number + slot
                    )
                )

    @property
    def crewmates(self) -> list[str]:
        return [name for name in NAMES if name not in self.revoked]

    def awaited(self) -> list[str]:
        return self.pace.awaited(self.waiting, Round(self.learned_rounds, self.crewmates, 2))

    @property
    def senders(self) -> list[str]:
        return NAMES

    def forgone(self) -> list[str]:
        return [name for name in self.awaited() if name in self.refused]


@dataclass
class FakeStation:
    config: Any
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.log = SimpleNamespace(connection=SimpleNamespace(trouble=""))
        self.presence = SimpleNamespace(heard={}, await_beats=lambda peers: None)


def patience(
    task: Path,
    *groups: tuple[str, int],
    revoked: Sequence[str] = (),
    refused: Sequence[str] = (),
    **crew: Any,
) -> Any:
    config = spread_crew(task, ("full",) * 4, **({"deadline_s": 60.0} | crew))
    station = FakeStation(config)
    return Patience(station, FakePeer(config, groups, revoked, refused)), station.clock  # type: ignore[arg-type]


EVERYONE_ELSE = [(name, 0) for name in NAMES[1:]]


@pytest.mark.parametrize(
    ("groups", "crew", "gone_on"),
    [
        ([*EVERYONE_ELSE, ("full3", 1)], {}, False),
        ([*EVERYONE_ELSE, ("full3", 2)], {"quorum": 1}, False),
        ([("full3", 2)], {}, False),
        ([("full2", 1), ("full3", 1)], {}, False),
        ([*EVERYONE_ELSE, ("full2", 1), ("full3", 1)], {}, True),
        ([*EVERYONE_ELSE, ("full2", 1), ("full3", 1)], {"quorum": 3}, False),
        ([*EVERYONE_ELSE, ("full1", 1), ("full2", 1), ("full3", 2)], {"quorum": 3}, True),
        ([*EVERYONE_ELSE, ("full0", 1), ("full3", 1)], {}, False),
    ],
    ids=[
        "one is ahead",
        "one is ahead, and a quorum of one",
        "one is ahead of a round that nobody has",
        "two are ahead of a round that nobody has",
        "two are ahead",
        "two are ahead, and a quorum of three",
        "three are ahead",
        "one is ahead, and what was ours before",
    ],
)
def test_the_crew_has_gone_on_when_a_quorum_has(
    groups: list[tuple[str, int]], crew: dict[str, Any], gone_on: bool, task: Path
) -> None:
    one, _ = patience(task, *groups, **crew)
    assert one.has_gone_on(0) == one.is_closed() == gone_on


def test_who_has_sent_later_rounds_that_are_not_held_is_ahead_too(task: Path) -> None:
    one, _ = patience(task, *EVERYONE_ELSE, ("full2", 1))
    assert not one.has_gone_on(0)
    one._peer.early.add([EarlyGroup(GroupPlace("full3", 2, 0), Arrival(90, 0, 0.0))])
    assert one.has_gone_on(0)


def test_who_was_shut_out_says_nothing_of_the_crew(task: Path) -> None:
    groups = [*EVERYONE_ELSE, ("full2", 1), ("full3", 1)]
    one, _ = patience(task, *groups, revoked=["full3"])
    assert not one.has_gone_on(0)


@pytest.mark.parametrize("deadline_s", [0.0, 60.0])
def test_nobody_waits_for_groups_that_came_and_were_refused(deadline_s: float, task: Path) -> None:
    there = [(name, 0) for name in NAMES[:2]]
    for refused, vain in (([], False), (["full2"], False), (["full2", "full3"], True)):
        one, _ = patience(task, *there, refused=refused, deadline_s=deadline_s)
        assert one.is_closed() == vain
        assert bool(one.stuck) == vain
    one._station.log.connection.trouble = "the hub is away"
    assert not one.is_closed()


def test_a_round_that_can_never_be_whole_is_said_with_reasons_and_the_remedy(task: Path) -> None:
    one, _ = patience(task, ("full0", 0), refused=NAMES[1:])
    assert one.words() == one.stuck
    assert one.stuck == (
        "round 1 cannot go on: groups of full1, full2, full3 came and do not count, and it needs "
        "those of 2 peers, refused full1: 2 for reward, full2: 2 for reward, full3: 2 for reward; "
        "if rewards come out differently each time or on each machine, set crew.check_rewards = "
        "false and resume"
    )


def test_a_learner_whose_samplers_are_all_muted_is_stuck_whatever_the_pace(task: Path) -> None:
    for pace in ("lockstep", "async"):
        one, _ = patience(task, revoked=NAMES, pace=pace)
        assert one.stuck.startswith("every peer that samples for full0 is muted, ")
        assert "see Groups are refused in docs/troubleshooting.md" in one.stuck


def test_long_waits_say_how_to_go_on_without_who_is_waited_for(task: Path) -> None:
    one, clock = patience(task, ("full0", 0), ("full1", 0), ("full3", 0), deadline_s=0.0)
    assert one.words() == "round 1: waiting for full2 for 0 s"
    clock.sleep_s(REMEDY_S)
    assert one.words() == (
        f"round 1: waiting for full2 for {REMEDY_S:.0f} s; to go on without one, the hub's owner "
        "says motley hub ... --revoke full2"
    )


def test_an_async_peer_waits_for_its_own_groups_alone(task: Path) -> None:
    one, _ = patience(task, pace="async", rounds=3)
    assert one.words() == "waiting for its own groups: 0 of 2 are there"
    assert one.is_all_there()
    one, _ = patience(task, pace="async", rounds=4)
    assert one.words() == (
        "waiting for its own groups: 0 of 2 are there; full0 has sent 3 of 4 rounds"
    )
    assert not one.is_all_there()


def test_at_the_end_of_an_async_crew_it_says_who_has_not_sent_everything(task: Path) -> None:
    one, _ = patience(task, pace="async", rounds=3, layout="horizontal", problems_per_round=1)
    assert not one.is_all_there()
    assert one.words() == (
        "waiting for groups: 0 are there; full2 has sent 1 of 3 rounds; "
        "full3 has sent 0 of 3 rounds"
    )


# Where each hears some of the others


def test_who_does_not_hear_this_peer_is_no_witness_that_the_crew_went_on(task: Path) -> None:
    config = spread_crew(task, ("full",) * 12, deadline_s=60.0, hear=4)
    hearing = Hearing(config, "full0")
    deaf, listening = (
        [n for n in config.authors[1:] if hearing.is_heard_by(n, 0) is hears]
        for hears in (False, True)
    )
    there = [(name, 0) for name in NAMES]
    for ahead, gone_on in ((deaf, False), (listening, True)):
        peer = FakePeer(config, [*there, *((name, 1) for name in ahead)])
        found = Patience(FakeStation(config), peer)  # type: ignore[arg-type]
        assert found.has_gone_on(0) is gone_on
