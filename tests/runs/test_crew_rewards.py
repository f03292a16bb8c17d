"""Rewards in a whole crew: who computes them, how often, and what a user sees when they fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from motley.config import CrewConfig, parse_config
from motley.runs.local import LocalCrew, _newest
from motley.sim.simulation import SimCrew
from motley.tasks import RewardError, Scorer

pytestmark = pytest.mark.slow

CREW = """
[crew]
name = "rewarded"
task = "file:{folder}/p.jsonl"
objective = "ftis"
rounds = 2
group_size = 4
problems_per_round = 6
[task]
reward = "{folder}/counted:f"
[sampling]
max_tokens = 4
[evaluate]
problems = 1
every = 100
[[peer]]
name = "a"
model = "tiny:0.3m"
[[peer]]
name = "b"
model = "tiny:0.3m"
[[peer]]
name = "c"
model = "tiny:0.3m"
"""


def crew_of(folder: Path, body: str, more: str = "") -> CrewConfig:
    folder.mkdir(exist_ok=True)
    (folder / "counted.py").write_text(body)
    rows = "".join(f'{{"prompt": "sort {n}=", "answer": "1"}}\n' for n in range(40))
    (folder / "p.jsonl").write_text(rows)
    return parse_config(CREW.format(folder=folder).replace("rounds = 2\n", f"rounds = 2\n{more}"))


COUNTS = """
seen = []
def f(completions):
    seen.append(len(completions))
    return [(len(text) + i) % 2 for i, text in enumerate(completions)]
"""


def counted() -> list[int]:
    import counted  # type: ignore[import-not-found]

    return counted.seen


@pytest.mark.parametrize("pace", ["lockstep", "async"])
def test_every_reward_is_computed_once_in_one_process(tmp_path: Path, pace: str) -> None:
    crew = LocalCrew.start(crew_of(tmp_path / "crew", COUNTS, f'pace = "{pace}"\n'), tmp_path / "r")
    counted().clear()
    for _ in crew.rounds():
        pass
    evaluated = 3 * 1  # of three peers, after the last round
    assert sum(counted()) == 2 * 24 + evaluated
    assert all(peer.admission.refused == {} for peer in crew.peers)


def test_every_reward_is_computed_once_in_a_simulation(tmp_path: Path) -> None:
    config = crew_of(tmp_path / "crew", COUNTS)
    crew = SimCrew(config, tmp_path / "r")
    counted().clear()
    for _ in crew.rounds():
        pass
    assert 2 * 24 <= sum(counted()) <= 2 * 24 + 2 * 3


def test_own_rewards_are_not_computed_again_when_they_are_read(tmp_path: Path) -> None:
    crew = LocalCrew.start(crew_of(tmp_path / "crew", COUNTS), tmp_path / "r")
    first = crew.peers[0]
    first.half.sample()
    first.publish()
    first.half.scorer = Scorer(first.half.task)  # as after a restart: nothing is remembered
    counted().clear()
    first.receive_all()
    assert len(first.waiting) == 2
    assert counted() == []


RAISES = """
seen = []
def f(completions):
    seen.append(0)
    if len(seen) > 3:
        return [1 / 0 for text in completions]
    return [0.0] * len(completions)
"""


def test_what_an_own_reward_raises_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    crew = LocalCrew.start(crew_of(tmp_path / "crew", RAISES), tmp_path / "r")
    with pytest.raises(RewardError, match="reward counted:f failed: ZeroDivisionError") as caught:
        for _ in crew.rounds():
            pass
    assert "return [1 / 0 for text in completions]" in caught.value.details


def reader(crew: LocalCrew, monkeypatch: pytest.MonkeyPatch, reward: Any) -> Any:
    """The first peer, as if in a process of its own, where the function does something else."""
    for peer in crew.peers:
        peer.half.sample()
        peer.publish()
    first = crew.peers[0]
    first.half.scorer = Scorer(first.half.task)
    function = first.half.task._rewards.functions[0]
    monkeypatch.setattr(function, "function", reward)
    first.admission.steadiness = None  # it sampled with the function that all others have
    first.receive_all()
    return first


def test_what_a_strangers_completion_makes_it_raise_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        return [1 / 0 for _ in completions]

    crew = LocalCrew.start(crew_of(tmp_path / "crew", COUNTS), tmp_path / "r")
    with caplog.at_level(logging.WARNING):
        first = reader(crew, monkeypatch, broken)
    assert dict(first.admission.refused) == {("b", "unscorable"): 2, ("c", "unscorable"): 2}
    (said,) = caplog.messages
    assert "group b.0.0 is refused: reward counted:f failed: ZeroDivisionError" in said
    assert "return [1 / 0 for _ in completions]" in said
    assert "the last because the reward function failed on it" in _newest(first)


def test_a_reward_that_differs_when_computed_again_says_so_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moody(completions: list[str], **columns: Any) -> list[float]:
        return [7.5 for _ in completions]

    crew = LocalCrew.start(crew_of(tmp_path / "crew", COUNTS), tmp_path / "r")
    with caplog.at_level(logging.WARNING):
        first = reader(crew, monkeypatch, moody)
    assert dict(first.admission.refused) == {("b", "reward"): 2, ("c", "reward"): 2}
    (said,) = caplog.messages
    assert "claims a reward of" in said
    assert "computed here it is 7.5, for '" in said
    assert "set crew.check_rewards = false" in said
