from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fakes import candidate, group
from motley.learning.journal import Journal, WrittenStep


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def step(round: int, *positions: int, closed: bool = False) -> WrittenStep:
    return WrittenStep(
        round=round,
        cursor=10 * round + 9,
        closed=closed,
        positions=positions or (10 * round + 5,),
        sha256=f"{round}",
    )


def written(path: Path, *steps: WrittenStep) -> Journal:
    journal = Journal(path)
    for one in steps:
        journal.add(one)
    return journal


def test_a_step_names_the_records_it_was_taken_from_in_their_order() -> None:
    first, second = (
        replace(candidate(group(slot=slot), position=7 + slot), hash=bytes([slot]) * 32)
        for slot in range(2)
    )
    found = WrittenStep.of(3, 20, True, [second, first])
    assert found == WrittenStep(
        round=3,
        cursor=20,
        closed=True,
        positions=(8, 7),
        sha256=hashlib.sha256(bytes([1]) * 32 + bytes(32)).hexdigest(),
    )
    assert WrittenStep.of(3, 20, True, []).positions == ()


def test_what_is_added_survives_reopening(path: Path) -> None:
    written(path, step(0), step(1, 11, 13, closed=True))
    again = Journal(path)
    assert [again.of(round) for round in range(3)] == [step(0), step(1, 11, 13, closed=True), None]


def test_the_same_step_twice_is_one(path: Path) -> None:
    journal = written(path, step(0), step(0))
    content = path.read_bytes()
    assert content.count(b"\n") == 1
    journal = Journal(path)
    journal.add(step(0))
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changed", [{"positions": (1, 2)}, {"sha256": "other"}, {"cursor": 3}, {"closed": True}]
)
def test_another_step_for_a_round_is_an_error_and_changes_nothing(
    changed: dict[str, object], path: Path
) -> None:
    journal = written(path, step(4, 45, 46))
    other = msgspec.structs.replace(step(4, 45, 46), **changed)
    words = (
        r"round 4 was learned from records \[45, 46\] before the restart .*; is it another log, "
        r"or were files of this run changed\?"
    )
    with pytest.raises(ValueError, match=words):
        journal.add(other)
    assert journal.of(4) == Journal(path).of(4) == step(4, 45, 46)


@pytest.mark.parametrize("length", [1, 10, -1])
def test_a_torn_last_line_was_never_acted_on(length: int, path: Path) -> None:
    written(path, step(0), step(1))
    with path.open("ab") as file:
        file.write(msgspec.json.encode(step(2))[:length])
    journal = Journal(path)
    assert journal.of(2) is None
    journal.add(step(2, 28))
    again = Journal(path)
    assert [again.of(round) for round in range(3)] == [step(0), step(1), step(2, 28)]


def test_a_whole_line_without_its_end_was_never_acted_on(path: Path) -> None:
    written(path, step(0))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert Journal(path).of(0) is None


def test_steps_that_every_checkpoint_holds_are_forgotten_for_good(path: Path) -> None:
    journal = written(path, *(step(round) for round in range(5)))
    journal.forget_before(3)
    expected = [None, None, None, step(3), step(4)]
    assert [journal.of(round) for round in range(5)] == expected
    assert [Journal(path).of(round) for round in range(5)] == expected
    journal.add(step(5))
    assert [Journal(path).of(round) for round in range(6)] == [*expected, step(5)]


def test_a_line_in_the_middle_that_is_no_step_is_an_error(path: Path) -> None:
    written(path, step(0))
    path.write_bytes(b"no step\n" + path.read_bytes())
    with pytest.raises(
        ValueError, match=r"line 1 of .*journal\S* is no step .*; put the file back"
    ):
        Journal(path)


def test_steps_behind_a_lost_one_are_forgotten(path: Path) -> None:
    journal = written(path, step(1), step(2), step(4), step(5))
    assert journal.forget_unreachable(2) == 2
    assert [journal.of(round) is None for round in range(6)] == [True, False, False, *[True] * 3]
    assert Journal(path).reach == 3
    assert journal.forget_unreachable(0) == 2
