from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import FixedClock, candidate, group, spread_crew
from motley.config import CrewConfig, parse_config
from motley.learning.pace import Async, Lockstep, Pace, Turns, holds_up, pace_of
from motley.learning.select import Candidate
from motley.learning.waiting import Round, StalenessWindow, Take, Wait, Waiting

TWO = ("full0", "full1")


def crew(folder: Path, pace: str, learning: str = "") -> CrewConfig:
    """Two peers, each with two groups of a round."""
    return spread_crew(folder, ("full", "full"), learning, pace=pace, rounds=9)


def waiting(config: CrewConfig, *candidates: Candidate, version: int = 0) -> Waiting:
    made = Waiting(config, StalenessWindow(config.learning, FixedClock(), version), "full0")
    made.window.made(version)
    for one in candidates:
        made.add(one)
    return made


def rounds(*authors: str, round: int = 0, since: int = 0) -> list[Candidate]:
    """A round of each author, which to full0 is its own; positions differ."""
    return [
        candidate(
            group(peer=author, round=round, slot=slot),
            own=author == "full0",
            arrived=since,
            position=100 * round + 10 * number + slot,
        )
        for number, author in enumerate(authors)
        for slot in range(2)
    ]


def taken(chosen: Take | Wait) -> list[str]:
    assert isinstance(chosen, Take)
    return [c.group.id for c in chosen.groups]


@pytest.mark.parametrize(("pace", "kind"), [("lockstep", Lockstep), ("async", Async)])
def test_the_crew_file_chooses(pace: str, kind: type[Pace], tmp_path: Path) -> None:
    assert isinstance(pace_of(crew(tmp_path, pace)), kind)


# Lockstep


def test_lockstep_takes_one_round_as_if_all_of_it_had_just_come(tmp_path: Path) -> None:
    config = crew(tmp_path, "lockstep")
    made = waiting(config, *rounds("full1", "full0"), *rounds("full1", round=1), version=3)
    chosen = Lockstep(config).choose(made, Round(0, TWO, quorum=2))
    assert taken(chosen) == ["full0.0.0", "full0.0.1", "full1.0.0", "full1.0.1"]
    assert isinstance(chosen, Take)
    assert {c.since for c in chosen.groups} == {3}
    assert [c.group.id for c in made] == ["full1.1.0", "full1.1.1"]


def test_lockstep_waits_for_everyone_or_when_closed_for_a_quorum(tmp_path: Path) -> None:
    config = crew(tmp_path, "lockstep")
    pace, made = Lockstep(config), waiting(config, *rounds("full0"))
    assert pace.awaited(made, Round(0, TWO, quorum=1)) == ["full1"]
    assert pace.choose(made, Round(0, TWO, quorum=1)) == Wait()
    assert pace.choose(made, Round(0, TWO, quorum=2, closed=True)) == Wait()
    assert len(made) == 2
    assert len(taken(pace.choose(made, Round(0, TWO, quorum=1, closed=True)))) == 2


def test_a_round_of_which_nothing_may_be_taken_is_over_all_the_same(tmp_path: Path) -> None:
    config = crew(tmp_path, "lockstep", "own_share = 1.0")
    made = waiting(config, *rounds("full1"))
    chosen = Lockstep(config).choose(made, Round(0, TWO, quorum=1, closed=True))
    assert chosen == Take(())
    assert len(made) == 0
    assert made.dropped == {("full1", "not selected"): 2}


def test_lockstep_does_not_want_groups_of_rounds_that_are_over(tmp_path: Path) -> None:
    pace = Lockstep(crew(tmp_path, "lockstep"))
    assert [pace.wants(group(round=round), learned_rounds=2) for round in (1, 2, 3)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("turns", "may", "has"),
    [
        (Turns(0, 0), True, False),
        (Turns(1, 0), False, True),
        (Turns(1, 1, replayed=True), True, False),
    ],
)
def test_lockstep_samples_the_round_that_it_learns_from_next(
    turns: Turns, may: bool, has: bool, tmp_path: Path
) -> None:
    config = crew(tmp_path, "lockstep")
    pace = Lockstep(config)
    assert (pace.may_sample("full0", turns, waiting(config)), pace.has_sampled(turns)) == (may, has)


# Async


def test_async_takes_the_freshest_of_others_or_under_pace_the_oldest(tmp_path: Path) -> None:
    groups = [
        *rounds("full1", since=0),
        *rounds("full1", round=1, since=1),
        *rounds("full0", round=2, since=2),
    ]
    for learning, first in (("", "full1.1.0"), ('stale = "pace"', "full1.0.0")):
        config = crew(tmp_path, "async", learning)
        made = waiting(config, *groups, version=2)
        chosen = taken(Async(config).choose(made, Round(0, TWO, quorum=2)))
        assert (len(chosen), chosen[0], len(made)) == (4, first, 2)


@pytest.mark.parametrize("learning", ["", 'stale = "pace"'])
def test_async_waits_for_its_own_share_and_for_nobody_by_name(
    learning: str, tmp_path: Path
) -> None:
    config = crew(tmp_path, "async", learning)
    pace, made, round = Async(config), waiting(config, *rounds("full1")), Round(0, TWO, quorum=2)
    for number in (5, 6):
        for one in rounds("full1", round=number):
            made.add(one)
    first, second = rounds("full0", round=7)
    made.add(first)
    assert (pace.choose(made, round), pace.awaited(made, round)) == (Wait(), [])
    made.add(second)
    assert Counter(name.split(".")[0] for name in taken(pace.choose(made, round))) == {
        "full0": 2,
        "full1": 2,
    }


@pytest.mark.parametrize("learning", ["", 'stale = "pace"'])
def test_async_takes_of_its_own_one_share_and_the_oldest(learning: str, tmp_path: Path) -> None:
    """Whoever has nothing of others takes smaller steps, and as many as it has rounds."""
    config = crew(tmp_path, "async", learning)
    own = [one for number in range(3) for one in rounds("full0", round=number, since=number)]
    pace, made, round = Async(config), waiting(config, *own, version=2), Round(0, TWO, quorum=2)
    for number in range(3):
        assert taken(pace.choose(made, round)) == [f"full0.{number}.0", f"full0.{number}.1"]
    assert pace.choose(made, round) == Wait()


def test_what_async_samples_itself_goes_before_any_number_of_others(tmp_path: Path) -> None:
    """With `hear` more senders may wait than are heard in a round."""
    names = ("full",) * 6
    config = spread_crew(tmp_path, names, pace="async", rounds=9, hear=1)
    others = [one for n in range(1, 6) for one in rounds(f"full{n}", round=n, since=0)]
    made = waiting(config, *others, *rounds("full0", round=8))
    chosen = taken(Async(config).choose(made, Round(0, config.authors, quorum=2)))
    assert (len(chosen), chosen[:2] if chosen[0] == "full0.8.0" else chosen[-2:]) == (
        4,
        ["full0.8.0", "full0.8.1"],
    )


def test_lost_weights_samples_count_as_its_own_and_do_not_stop_it(tmp_path: Path) -> None:
    """What it sampled with weights that it lost is a stranger's to `own_share`."""
    lost = [replace(one, own=False) for number in range(9) for one in rounds("full0", round=number)]
    round = Round(0, TWO, quorum=2)
    for learning, num_taken in (("", 2), ("own_share = 1.0", 0)):
        config = crew(tmp_path, "async", learning)
        pace, made = Async(config), waiting(config, *lost)
        chosen = pace.choose(made, round)
        assert len(chosen.groups if isinstance(chosen, Take) else ()) == num_taken
        assert pace.may_sample("full0", Turns(9, 0), made)
        for one in rounds("full0", round=10):
            made.add(one)
        assert taken(pace.choose(made, round)) == ["full0.10.0", "full0.10.1"]


LEARNER = """
[crew]
name = "far"
task = "digits"
objective = "ftis"
pace = "async"
rounds = 9
group_size = 2
problems_per_round = 4
[[peer]]
name = "l"
role = "learner"
model = "tiny:0.3m"
[[peer]]
name = "full0"
role = "sampler"
follows = "l"
[[peer]]
name = "full1"
"""


@pytest.mark.parametrize("other", ['role = "sampler"\nfollows = "l"', 'model = "tiny:0.3m"'])
def test_a_learner_that_does_not_sample_takes_a_rounds_worth_of_anybody(other: str) -> None:
    config = parse_config(LEARNER + other)
    pace, round = Async(config), Round(0, TWO, quorum=2)
    for authors in (("full0", "full0"), ("full0", "full1"), ("full1", "full1")):
        made = Waiting(config, StalenessWindow(config.learning, FixedClock(), 0), "l")
        for number, author in enumerate(authors):
            assert pace.choose(made, round) == Wait()
            for one in rounds(author, round=number):
                made.add(replace(one, stranger=True))
        assert len(taken(pace.choose(made, round))) == 4


def test_async_waits_where_nothing_may_be_taken_and_keeps_what_is_there(tmp_path: Path) -> None:
    config = crew(tmp_path, "async", "own_share = 1.0")
    made = waiting(config, *rounds("full1"), *rounds("full1", round=1))
    assert Async(config).choose(made, Round(0, TWO, quorum=2)) == Wait()
    assert (len(made), made.dropped.total()) == (4, 0)


def test_async_drops_what_is_stale_and_under_pace_does_not(tmp_path: Path) -> None:
    for learning, left in (("max_age = 1", 0), ('max_age = 1\nstale = "pace"', 2)):
        config = crew(tmp_path, "async", learning)
        made = waiting(config, *rounds("full1", since=0), version=2)
        assert Async(config).choose(made, Round(0, TWO, quorum=2)) == Wait()
        assert (len(made), made.dropped.total()) == (left, 2 - left)


@pytest.mark.parametrize(
    ("learning", "num_rounds", "unread", "may"),
    [
        ("max_age = 1", 1, 0, True),
        ("max_age = 1", 2, 0, False),  # it would be too old after these
        ("max_age = 1", 1, 1, False),
        ("max_age = 0", 0, 0, True),
        ("max_age = 0", 0, 1, False),
        ("max_age = 8", 2, 6, True),
        ("max_age = 8", 2, 7, False),
        ("max_age = 8", 3, 0, False),  # there is enough to learn from
        ("max_age = 0\nmax_age_s = 9.0", 0, 1, True),
        ('max_age = 1\nstale = "pace"', 2, 9, True),
        ('max_age = 1\nstale = "pace"', 3, 0, False),
    ],
)
def test_async_samples_unless_too_much_waits_and_never_while_steps_are_taken_again(
    learning: str, num_rounds: int, unread: int, may: bool, tmp_path: Path
) -> None:
    config = crew(tmp_path, "async", learning)
    groups = [one for round in range(num_rounds) for one in rounds("full0", round=round)]
    made, pace = waiting(config, *groups), Async(config)
    assert pace.may_sample("full0", Turns(7, 0, unread=unread), made) == may
    assert not pace.may_sample("full0", Turns(7, 0, replayed=True), made)


@pytest.mark.parametrize("window", ["max_age = 1", "max_age_s = 5.0"])
def test_who_sends_too_much_waits_and_nobody_else(window: str, tmp_path: Path) -> None:
    config = crew(tmp_path, "async", f'stale = "pace"\n{window}')
    flood = [one for round in range(30) for one in rounds("full1", round=round)]
    backlog = waiting(config, *flood, *rounds("full0", round=0)[:1]).backlog  # of 9 s
    assert holds_up(backlog, "full1", config)
    assert not holds_up(backlog, "full0", config)


@pytest.mark.parametrize("learning", ["", 'stale = "pace"'])
def test_a_flood_does_not_take_over_a_step(learning: str, tmp_path: Path) -> None:
    config = crew(tmp_path, "async", learning)
    flood = [one for round in range(30) for one in rounds("full1", round=round, since=2)]
    made = waiting(config, *flood, *rounds("full0", round=0, since=1), version=2)
    chosen = taken(Async(config).choose(made, Round(0, TWO, quorum=2)))
    assert sorted(name.split(".")[0] for name in chosen) == ["full0"] * 2 + ["full1"] * 2


def test_replayed_steps_say_nothing_of_what_seconds_have_made_stale(tmp_path: Path) -> None:
    config = spread_crew(
        tmp_path,
        ("full", "full"),
        "max_age_s = 5.0",
        pace="async",
        layout="horizontal",
        problems_per_round=1,
    )
    made = waiting(config, candidate(group(peer="full1"), family="0.0"))  # came at 0 s
    pace, round = Async(config), Round(1, TWO, quorum=2)
    pace.settle(made, round, replayed=True)
    assert len(made) == 1
    pace.settle(made, round, replayed=False)
    assert (len(made), made.dropped) == (0, {("full1", "incomplete"): 1})


# What does not depend on what waits


@pytest.mark.parametrize(
    ("pace", "learning", "beside", "unheard"),
    [
        ("lockstep", "max_age = 8", False, 1),
        ("async", "max_age = 8", True, 8),
        ("async", "max_age = 0", False, 1),
        ("async", "max_age = 0\nmax_age_s = 1.0", True, 1),
        ("async", 'max_age = 0\nstale = "pace"', True, 1),
    ],
)
def test_how_far_a_peer_goes_on_by_itself(
    pace: str, learning: str, beside: bool, unheard: int, tmp_path: Path
) -> None:
    chosen = pace_of(crew(tmp_path, pace, learning))
    assert (chosen.samples_beside, chosen.rounds_unheard) == (beside, unheard)
    assert (chosen.awaits_others, chosen.may_run_dry) == (pace == "lockstep", pace == "async")
