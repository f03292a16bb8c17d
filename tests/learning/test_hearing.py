"""Whom a learner hears in a round: a draw that anyone can make again."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fakes import spread_crew, write_task
from motley.config import ConfigError, CrewConfig
from motley.learning.fates import StepFates
from motley.learning.hearing import Hearing, Lots, Stretch, can_stand_in_lots, dealt
from sim.crews import far_crew

NAMES = tuple(f"p{number}" for number in range(40))


def crew(folder: Path, peers: int = 6, **settings: Any) -> CrewConfig:
    write_task(folder)
    return spread_crew(folder, ("full",) * peers, **settings)


def test_lots_are_dealt_as_the_protocol_says() -> None:
    hashes = {name: hashlib.sha256(f"7/12/{name}".encode()).hexdigest() for name in NAMES}
    order = sorted(NAMES, key=hashes.__getitem__)
    assert dealt(7, 12, NAMES, 6) == tuple(order[lot::6] for lot in range(6))


def test_everyone_is_in_one_lot_and_in_each_about_as_often() -> None:
    rounds, counts = 2000, Counter[tuple[str, int]]()
    for round in range(rounds):
        lots = dealt(0, round, NAMES, 5)
        assert sorted(name for lot in lots for name in lot) == sorted(NAMES)
        assert {len(lot) for lot in lots} == {8}
        counts.update((name, number) for number, lot in enumerate(lots) for name in lot)
    expected = rounds / 5
    assert len(counts) == 40 * 5
    assert max(abs(count - expected) for count in counts.values()) < 5 * (expected * 0.8) ** 0.5


@pytest.mark.parametrize("change", [{"seed": 1}, {"round": 4}])
def test_another_seed_or_round_is_another_deal(change: dict[str, Any]) -> None:
    same = {"seed": 0, "round": 3, "names": NAMES, "num_lots": 8}
    assert dealt(**same) == dealt(**same)  # type: ignore[arg-type]
    assert dealt(**(same | change)) != dealt(**same)  # type: ignore[arg-type]


@pytest.mark.parametrize(("peers", "hear"), [(6, 2), (7, 2), (11, 3), (12, 1), (5, 3)])
def test_a_learner_hears_itself_and_so_many_others_in_its_lot(
    peers: int, hear: int, tmp_path: Path
) -> None:
    config = crew(tmp_path, peers=peers, hear=hear)
    lots = Lots(config)
    assert lots.count == peers // (hear + 1)
    for number, me in enumerate(config.authors):
        assert lots.of(me) == number % lots.count
        for round in range(20):
            lot = dealt(0, round, tuple(config.authors), lots.count)[lots.of(me)]
            first = number // lots.count % len(lot)
            others = [name for name in [*lot[first:], *lot[:first]] if name != me][:hear]
            assert len(others) == hear
            expected = [name for name in config.authors if name in {me, *others}]
            assert Hearing(config, me).of(round) == expected


@pytest.mark.parametrize(("peers", "hear"), [(40, 4), (48, 4), (60, 8)])
def test_everyone_is_heard_by_about_as_many(peers: int, hear: int, tmp_path: Path) -> None:
    config = crew(tmp_path, peers=peers, hear=hear)
    one = Hearing(config, "full0")
    for round in range(3):
        heard = Counter(
            name for me in config.authors for name in one._heard_by(me, round) if name != me
        )
        assert set(heard) == set(config.authors)
        assert max(heard.values()) <= 2 * hear


def test_who_is_heard_is_in_the_lot_that_is_listened_to(tmp_path: Path) -> None:
    config = crew(tmp_path, peers=11, hear=2)
    lots = Lots(config)
    for me in config.authors:
        hearing = Hearing(config, me)
        for round in range(12):
            heard = {name for name in hearing.of(round) if name != me}
            assert {lots.of_group(f"{name}.{round}.1") for name in heard} == {lots.of(me)}


@pytest.mark.parametrize(
    "id", ["hub.charter", "full1.table", "full1", "full1.-1.0", "full1.99999999999.0", "who.1.0"]
)
def test_what_is_no_group_of_the_crew_is_in_no_lot(id: str, tmp_path: Path) -> None:
    assert Lots(crew(tmp_path, hear=2)).of_group(id) is None


@pytest.mark.parametrize(("hear", "spares"), [(None, False), (1, True), (2, True), (3, False)])
def test_groups_stand_in_lots_where_there_are_several(
    hear: int | None, spares: bool, tmp_path: Path
) -> None:
    settings = {} if hear is None else {"hear": hear}
    assert can_stand_in_lots(crew(tmp_path, **settings)) is spares


def test_without_hear_or_with_enough_of_it_everyone_is_heard(tmp_path: Path) -> None:
    for settings in ({}, {"hear": 5}, {"hear": 50}):
        config = crew(tmp_path, **settings)
        hearing = Hearing(config, "full0")
        assert hearing.of(2) == config.authors
        assert not hearing.passes_by("full3.2.0", 5, 4)
        assert config.problems_per_step("full0") == config.crew.problems_per_round


def test_a_learner_hears_its_own_samplers_whatever_is_drawn(tmp_path: Path) -> None:
    write_task(tmp_path)
    samplers = {"s0": "l", "s1": "l", "t0": "m", "t1": "m", "t2": "m"}
    config = far_crew(tmp_path, samplers=samplers, problems_per_round=10, hear=1)
    for round in range(10):
        heard = Hearing(config, "l").of(round)
        assert heard[:2] == ["s0", "s1"]
        assert len(heard) == 3
    assert not can_stand_in_lots(config)
    assert config.problems_per_step("l") == 2 * 3
    assert config.problems_per_step("m") == 2 * 4


def test_who_is_not_heard_is_passed_by_on_the_id_alone(tmp_path: Path) -> None:
    config = crew(tmp_path, hear=2, rounds=9)
    hearing = Hearing(config, "full0")
    (out, *_) = [name for name in config.authors if name not in hearing.of(4)]
    inside = hearing.of(4)[-1]
    assert hearing.passes_by(f"{out}.4.0", 10, 9)
    assert hearing.passes_by(f"{out}.4.1.0123456789abcdef", 11, 10)
    assert hearing.passes_by("nobody.4.0", 13, 12)
    assert not hearing.passes_by(f"{inside}.4.0", 14, 13)
    assert (hearing.passed_by, hearing.stretches) == (3, [Stretch(10, 11), Stretch(13, 13)])


def test_what_was_not_even_sent_is_counted_with_what_was_passed_by(tmp_path: Path) -> None:
    hearing = Hearing(crew(tmp_path, hear=2), "full0")
    assert not hearing.passes_by("hub.charter", 1, 0)
    assert not hearing.passes_by("full0.0.0", 6, 1)
    assert hearing.passes_by("nobody.0.0", 8, 6)
    assert not hearing.passes_by("full0.0.1", 9, 8)
    assert (hearing.passed_by, hearing.stretches) == (6, [Stretch(2, 5), Stretch(7, 8)])


@pytest.mark.parametrize(
    "id", ["charter", "hub.roster.3", "full5.table", "full5.weights.4", "full5.-1.0", "full5.x"]
)
def test_what_is_no_group_is_left_to_admission(id: str, tmp_path: Path) -> None:
    assert not Hearing(crew(tmp_path, hear=1), "full0").passes_by(id, 1, 0)


@pytest.mark.parametrize("round", ["3", "99999999999", "9" * 5000, "٣"])
def test_an_id_of_a_round_that_the_crew_does_not_have_is_left_to_admission(
    round: str, tmp_path: Path
) -> None:
    assert not Hearing(crew(tmp_path, hear=1, rounds=3), "full0").passes_by(
        f"full5.{round}.0", 1, 0
    )


def test_what_it_remembers_does_not_grow_with_what_it_passes_by(tmp_path: Path) -> None:
    hearing = Hearing(crew(tmp_path, hear=1, rounds=10**6), "full0")
    for round in range(5000):
        hearing.passes_by(f"full{1 + round % 5}.{round}.0", 2 * round, 2 * round - 1)
    assert len(hearing._draws) <= 256
    assert len(hearing.stretches) <= 4096


def test_the_last_round_of_everyone_who_is_heard_is_known(tmp_path: Path) -> None:
    config = crew(tmp_path, hear=1, rounds=12)
    hearing = Hearing(config, "full0")
    for name, last in hearing.last_rounds().items():
        rounds = [round for round in range(12) if hearing.hears(name, round)]
        assert last == rounds[-1]
    assert hearing.last_rounds()["full0"] == 11


def test_a_step_tells_which_positions_were_not_heard() -> None:
    step = StepFates(round=1, peer="a", cursor=20, unheard=[Stretch(3, 5), Stretch(9, 9)])
    assert [p for p in range(12) if step.is_unheard(p)] == [3, 4, 5, 9]
    assert step.num_unheard == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hear": 0}, "hear=0 leaves a learner alone with itself"),
        ({"hear": 1, "quorum": 3}, "quorum=3 is more than the 2 peers whom a learner hears"),
        ({"hear": 2, "layout": "horizontal", "group_size": 6}, "remove hear"),
    ],
)
def test_what_cannot_be_heard_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        crew(tmp_path, **settings)
