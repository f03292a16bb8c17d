"""A hostile peer with a valid key on a real hub, in short: `python tests/hostile.py` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import spread_crew
from hostile import BY_NAME, HOSTILE, ROUNDS, Life, fault_of, run_line
from motley.config import CrewConfig

pytestmark = pytest.mark.slow  # a process per peer


@pytest.mark.parametrize("line", ["cold", "later", "second-tables"])
def test_honest_peers_neither_stop_nor_wait_for_a_hostile_one(line: str, task: Path) -> None:
    result = run_line(BY_NAME[line], task, "lockstep", "ftis")
    assert result.fault == ""
    assert result.rounds == ROUNDS


# The checks


@pytest.fixture
def config(task: Path) -> CrewConfig:
    return spread_crew(task, ("full",) * 4)


WELL = Life(rounds=ROUNDS, longest_s=1.0, finished=True)


@pytest.mark.parametrize(
    ("life", "words"),
    [
        (WELL, ""),
        (Life(rounds=2, stopped="OSError: gone"), "full1 stopped: OSError: gone"),
        (Life(rounds=2), "full1 died in round 3"),
        (Life(rounds=2, finished=True), "full1 ended after round 2"),
        (Life(rounds=ROUNDS, longest_s=99.0, finished=True), "full1 waited 99 s"),
        (
            Life(rounds=ROUNDS, left_out=1, finished=True),
            "1 times a round was closed without an honest peer",
        ),
    ],
)
def test_what_goes_wrong_with_an_honest_peer_is_named(
    life: Life, words: str, config: CrewConfig
) -> None:
    assert fault_of({"full0": WELL, "full1": life, "full2": WELL}, config) == words
    assert HOSTILE in [peer.name for peer in config.peer]
