"""Asynchronous crews of any speeds, on a clock of numbers, without models: who waits for whom."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FixedClock, candidate, group
from motley.config import CrewConfig, parse_config
from motley.learning.pace import Async, Turns
from motley.learning.select import Candidate
from motley.learning.waiting import Round, StalenessWindow, Take, Waiting

ROUNDS = 6
Speed = tuple[int, int]  # seconds for a round of sampling, and for a step


def crew(names: list[str], share: int, learning: str, rounds: int) -> CrewConfig:
    peers = "".join(f'[[peer]]\nname = "{name}"\nmodel = "tiny:0.3m"\n' for name in names)
    return parse_config(
        f'[crew]\nname = "turns"\ntask = "digits"\nobjective = "ftis"\npace = "async"\n'
        f"rounds = {rounds}\ngroup_size = 2\nproblems_per_round = {share * len(names)}\n"
        f"[learning]\n{learning}\n{peers}"
    )


@dataclass
class Turner:
    """A peer that does nothing but take its turns: it learns if it can, else it samples."""

    config: CrewConfig
    name: str
    sample_s: int
    learn_s: int
    sampled: int = 0
    read: int = 0  # of them
    worked_s: int = 0
    busy: bool = False
    steps: list[tuple[Candidate, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        window = StalenessWindow(self.config.learning, FixedClock(), 0)
        window.made(0)
        self.waiting = Waiting(self.config, window, self.name)

    @property
    def finished(self) -> bool:
        return len(self.steps) == self.config.crew.rounds

    def hear(self, sender: str, round: int, slot: int, version: int, position: int) -> None:
        made = group(peer=sender, round=round, slot=slot)
        own = sender == self.name
        since = version if own else self.waiting.window.version
        self.waiting.add(candidate(made, own=own, arrived=since, position=position))

    def choose(self) -> tuple[Candidate, ...]:
        names = self.config.authors
        chosen = Async(self.config).choose(self.waiting, Round(len(self.steps), names, 1))
        return chosen.groups if isinstance(chosen, Take) else ()

    def may_sample(self) -> bool:
        turns = Turns(self.sampled, len(self.steps), unread=self.sampled - self.read)
        pace, rounds = Async(self.config), self.config.crew.rounds
        return self.sampled < rounds and pace.may_sample(self.name, turns, self.waiting)


@dataclass
class World:
    """Everyone's turns, in order; what is sampled is on everyone's log after a while."""

    turners: list[Turner]
    delay_s: int = 0
    now_s: int = 0
    positions: int = 0
    events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    ends_s: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        for turner in self.turners:
            self._next(turner)
        while self.events:
            self.now_s, _, event = heapq.heappop(self.events)
            event()

    def _at(self, time_s: int, event: Callable[[], None]) -> None:
        self.positions += 1
        heapq.heappush(self.events, (time_s, self.positions, event))

    def _next(self, turner: Turner) -> None:
        if turner.busy or turner.finished:
            return
        if groups := turner.choose():
            self._work(turner, turner.learn_s, lambda: self._learned(turner, groups))
        elif turner.may_sample():
            version = turner.waiting.window.version
            self._work(turner, turner.sample_s, lambda: self._sampled(turner, version))

    def _work(self, turner: Turner, takes_s: int, then: Callable[[], None]) -> None:
        turner.busy = True
        turner.worked_s += takes_s
        self._at(self.now_s + takes_s, then)

    def _learned(self, turner: Turner, groups: tuple[Candidate, ...]) -> None:
        turner.busy = False
        turner.steps.append(groups)
        turner.waiting.window.made(len(turner.steps))
        if turner.finished:
            self.ends_s[turner.name] = self.now_s
        self._next(turner)

    def _sampled(self, turner: Turner, version: int) -> None:
        turner.busy = False
        round, turner.sampled = turner.sampled, turner.sampled + 1
        self._at(self.now_s + self.delay_s, lambda: self._arrived(turner.name, round, version))
        self._next(turner)

    def _arrived(self, sender: str, round: int, version: int) -> None:
        for turner in self.turners:
            turner.read += turner.name == sender
            for slot in range(turner.config.problems_per_peer):
                self.positions += 1
                turner.hear(sender, round, slot, version, self.positions)
        for turner in self.turners:
            self._next(turner)


SPEEDS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=4)
STALE = st.sampled_from(['stale = "drop"', 'stale = "pace"'])


def lived(
    speeds: list[Speed], share: int, learning: str, delay_s: int = 0, rounds: int = ROUNDS
) -> World:
    names = [f"p{number}" for number in range(len(speeds))]
    config = crew(names, share, learning, rounds)
    world = World([Turner(config, n, *speed) for n, speed in zip(names, speeds, strict=True)])
    world.delay_s = delay_s
    world.run()
    return world


@settings(deadline=None, max_examples=40)
@given(SPEEDS, st.integers(1, 3), STALE, st.integers(1, 3))
def test_at_any_speeds_everyone_takes_as_many_steps_as_rounds_and_waits_for_nobody(
    speeds: list[Speed], share: int, stale: str, max_age: int
) -> None:
    world = lived(speeds, share, f"{stale}\nmax_age = {max_age}")
    for turner, (sample_s, learn_s) in zip(world.turners, speeds, strict=True):
        assert len(turner.steps) == turner.sampled == ROUNDS
        assert world.ends_s[turner.name] == turner.worked_s == ROUNDS * (sample_s + learn_s)
        taken = [c.position for groups in turner.steps for c in groups]
        assert len(taken) == len(set(taken))
        for number, groups in enumerate(turner.steps):
            assert len(groups) <= turner.waiting.per_step
            own = [c for c in groups if c.own]
            assert [c.group.round for c in own] == [number] * share


@settings(deadline=None, max_examples=25)
@given(SPEEDS, st.integers(1, 2), STALE, st.integers(1, 200))
def test_far_from_the_log_too_nobody_waits_for_another(
    speeds: list[Speed], share: int, stale: str, delay_s: int
) -> None:
    """What it learns from is its own, in order, as if it were alone."""
    crowd = lived(speeds, share, f"{stale}\nmax_age = {ROUNDS}", delay_s)
    for turner, speed in zip(crowd.turners, speeds, strict=True):
        assert len(turner.steps) == ROUNDS
        own = [[c.group.round for c in groups if c.own] for groups in turner.steps]
        assert own == [[number] * share for number in range(ROUNDS)]
        if stale == 'stale = "drop"':
            (alone,) = lived([speed], share, stale, delay_s).turners
            assert turner.worked_s == alone.worked_s


@settings(deadline=None, max_examples=25)
@given(SPEEDS, st.integers(1, 2), st.integers(0, 3), st.integers(0, 200))
def test_what_is_sampled_is_never_too_old_when_it_comes_back(
    speeds: list[Speed], share: int, max_age: int, delay_s: int
) -> None:
    """However far the log is, and however narrow the window: it waits for its own way instead."""
    world = lived(speeds, share, f"max_age = {max_age}", delay_s)
    for turner in world.turners:
        assert len(turner.steps) == ROUNDS
        assert turner.waiting.dropped[turner.name, "stale"] == 0


def test_one_that_is_ten_times_slower_holds_nobody_up_and_both_hear_each_other() -> None:
    world = lived([(10, 2), (100, 20)], 3, "max_age = 8", rounds=40)
    assert world.ends_s == {"p0": 40 * 12, "p1": 40 * 120}
    quick, slow = (
        [Counter(c.group.origin.peer for c in groups) for groups in turner.steps]
        for turner in world.turners
    )
    assert [size["p0"] for size in quick] == [3] * 40
    assert [size["p1"] for size in slow] == [3] * 40
    # what is there of the other: to the quick one a round in ten of its own, to the slow one more
    # than it can use before it is too old
    assert sum(size["p1"] for size in quick) == 3 * 4
    assert [size["p0"] for size in slow[:8]] == [3] * 8
