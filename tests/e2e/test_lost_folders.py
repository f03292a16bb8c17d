"""A member whose folder knows less of it than the log: it goes on, and so does everyone else."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.test_participants import House, HouseOf, assert_whole_chains, house_of, quick
from fakes import spread_crew
from motley.learning.checkpoint import checkpoints
from motley.runs.metrics import read_metrics

__all__ = ["house_of", "quick"]  # fixtures

pytestmark = [
    pytest.mark.slow,  # whole crews, each with a server
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter"),
]

ROUNDS = 6


def crew(task: Path, **settings: Any) -> Any:
    return spread_crew(
        task, ("full", "last"), learning="checkpoint_every = 3", **({"rounds": ROUNDS} | settings)
    )


def without_journal(folder: Path, copy: Path) -> None:
    (folder / "journal.jsonl").unlink()


def with_half_a_journal(folder: Path, copy: Path) -> None:
    journal = folder / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[: -len(journal.read_bytes()) // 3])


def with_a_hole_in_the_journal(folder: Path, copy: Path) -> None:
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"round":3,' not in line))
    shutil.rmtree(checkpoints(folder / "checkpoints")[-1])


def as_it_was(folder: Path, copy: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def with_its_key_only(folder: Path, copy: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    shutil.copy(copy / "peer.key", folder)


def with_a_damaged_state(folder: Path, copy: Path) -> None:
    state = checkpoints(folder / "checkpoints")[-1] / "state.json"
    state.write_bytes(state.read_bytes()[:-40])


def without_checkpoints(folder: Path, copy: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def without_metrics(folder: Path, copy: Path) -> None:
    (folder / "metrics.jsonl").unlink()


LOSSES = [
    without_journal,
    with_half_a_journal,
    with_a_hole_in_the_journal,
    as_it_was,
    with_its_key_only,
    with_a_damaged_state,
    without_checkpoints,
    without_metrics,
]


def lose(house: House, name: str, loss: Callable[[Path, Path], None]) -> None:
    """Have a member come back after five rounds with what is left of its folder.

    Its copy is of the first round.
    """
    folder, copy = house.folder / name, house.folder / "copy"
    house.until(lambda: house.learned(name) == 1)
    house.leave(name)
    shutil.copytree(folder, copy)
    house.join(name)
    house.until(lambda: house.learned(name) == 5)
    house.leave(name)
    loss(folder, copy)
    house.join(name)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "settings", [{}, {"pace": "async"}], ids=lambda s: s.get("pace", "lockstep")
)
def test_whatever_a_member_has_lost_everyone_ends(
    settings: dict[str, Any], loss: Callable[..., None], task: Path, house_of: HouseOf
) -> None:
    house = house_of(crew(task, **settings))
    house.join()
    lose(house, "last1", loss)
    house.finish()
    for name in house.names:
        assert house.members[name].finished
        assert not house.peer(name).admission.refused
        assert read_metrics(house.folder / name)[-1].round == ROUNDS
    ids = Counter(group.id for group in house.groups())
    assert ids == {f"{n}.{r}.{s}": 1 for n in house.names for r in range(ROUNDS) for s in (0, 1)}
    assert_whole_chains(house.entries())


def test_it_says_what_it_has_lost(task: Path, house_of: HouseOf) -> None:
    house = house_of(crew(task))
    house.join()
    lose(house, "last1", with_a_hole_in_the_journal)
    assert any(
        "the journal lacks a step after round 0: 1 behind" in text for text in house.said["last1"]
    )
    house.leave("last1")
    with_a_damaged_state(house.folder / "last1", house.folder)
    with pytest.raises(ValueError, match=r"no other checkpoint is left; put one back from a copy"):
        house.join("last1")
